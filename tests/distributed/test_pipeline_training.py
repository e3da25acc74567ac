"""Whole runs with compressed pipeline stages: bytes by hand, evaluation, warm-up."""

import pytest

from tests.distributed.launch import Run, pretrain, tiny_flags

ITERATIONS = 4
MESSAGES = 2  # micro-batches of an iteration
FORWARD = 1536 + 400 + 128 + 128 + 64 + 16
"""One message of 32 tokens x 2 sequences x 64 channels: 64 tiles of 64 values at 3 bits; a fourth bit for 25
of 32 tokens of both sequences; fp16 steps and zeros; a byte of pivot a tile; 2 words of widths, padded."""
BACKWARD = 4096 * 6 // 8 + 128 * 2
"""6 bits a value and 128 bf16 scales."""
PLAIN = 4096 * 4


def flags(*more: str) -> list[str]:
    """Two stages in fp32."""
    return tiny_flags("--pipeline-model-parallel-size", "2", *more, hidden_size="64", eval_interval="2")


COMPRESSED = flags("--pp-compression", "tah-quant", "--eval-iters", "1")


def sent(run: Run, channel: str, phase: str = "train") -> dict[str, tuple[int, int, int]]:
    """{kind: (messages, sent bytes, uncompressed bytes)} over all ranks."""
    totals: dict[str, tuple[int, int, int]] = {}
    for rank in run.ranks:
        for row in rank.ledger:
            if (row["traffic"], row["phase"]) == (channel, phase):
                calls, bytes_sent, plain = totals.get(row["kind"], (0, 0, 0))
                calls += row["calls"] if row["operation"] == "send" else 0
                totals[row["kind"]] = calls, bytes_sent + row["sent_bytes"], plain + row["plain_bytes"]
    return totals


@pytest.fixture(scope="module")
def whole() -> Run:
    """A run of four iterations."""
    return pretrain(*COMPRESSED)


def test_bytes_by_hand(whole: Run) -> None:
    """Two messages an iteration each way; evaluations send forward alone."""
    count = ITERATIONS * MESSAGES
    assert sent(whole, "pp.forward") == {"compressed": (count, count * FORWARD, count * PLAIN)}
    assert sent(whole, "pp.backward") == {"compressed": (count, count * BACKWARD, count * PLAIN)}
    evaluated = sent(whole, "pp.forward", "eval")["compressed"]
    assert evaluated[0] > 0 and evaluated[1:] == (evaluated[0] * FORWARD, evaluated[0] * PLAIN)
    assert sent(whole, "pp.backward", "eval") == {}
    assert 8 * FORWARD / 4096 <= 4.5 and 8 * BACKWARD / 4096 <= 6.6
    assert "pipeline stages send tah-quant, back int6:group=32,scales=single,hadamard=off" in whole.output
    assert whole.losses[ITERATIONS] < whole.losses[1]
    assert whole.ranks[-1].validation[-1] == pytest.approx(whole.losses[ITERATIONS], rel=0.05)


def test_repeated_iterations_train_alike(whole: Run) -> None:
    """Megatron runs an iteration of a suspicious loss twice: every message is sent and counted again."""
    suspicious = """--no-check-for-nan-in-loss-and-grad --check-for-spiky-loss --error-injection-rate 1
        --error-injection-type transient_error"""
    repeated = pretrain(*COMPRESSED, *suspicious.split())
    assert repeated.losses == whole.losses and repeated.parameters == whole.parameters
    assert sent(repeated, "pp.backward")["compressed"][0] == (2 * ITERATIONS - 1) * MESSAGES, "not the first"
