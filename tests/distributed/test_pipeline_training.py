"""Whole runs with compressed pipeline stages: bytes by hand, evaluations with and without the codecs."""

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
    return tiny_flags(
        "--pipeline-model-parallel-size", "2", *more, hidden_size="64", eval_interval="2"
    )


COMPRESSED = flags("--pp-compression", "tah-quant", "--eval-iters", "1")


def sent(run: Run, channel: str, phase: str = "train") -> dict[str, tuple[int, int, int]]:
    """{kind: (messages, sent bytes, uncompressed bytes)} over all ranks."""
    totals: dict[str, tuple[int, int, int]] = {}
    for rank in run.ranks:
        for row in rank.ledger:
            if (row["traffic"], row["phase"]) == (channel, phase):
                calls, bytes_sent, plain = totals.get(row["kind"], (0, 0, 0))
                calls += row["calls"] if row["operation"] == "send" else 0
                totals[row["kind"]] = (
                    calls,
                    bytes_sent + row["sent_bytes"],
                    plain + row["plain_bytes"],
                )
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
    assert (
        "pipeline parallelism: activations as tah-quant, gradients as int6:group=32,scales=single,hadamard=off"
        in whole.output
    )
    assert whole.losses[ITERATIONS] < whole.losses[1]
    assert whole.ranks[-1].validation[-1] == pytest.approx(whole.losses[ITERATIONS], rel=0.05)


def test_repeated_iterations_train_alike(whole: Run) -> None:
    """Megatron runs an iteration of a suspicious loss twice: every message is sent and counted again."""
    suspicious = """--no-check-for-nan-in-loss-and-grad --check-for-spiky-loss --error-injection-rate 1
        --error-injection-type transient_error"""
    repeated = pretrain(*COMPRESSED, *suspicious.split())
    assert repeated.losses == whole.losses and repeated.parameters == whole.parameters
    assert sent(repeated, "pp.backward")["compressed"][0] == (2 * ITERATIONS - 1) * MESSAGES, (
        "not the first"
    )


CODECS = """--taco format=int4 --compression-min-mb 0 --pp-compression tah-quant
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
"""Coarse in both dimensions, and recomputed under no_grad."""


def validated(*more: str) -> list[str]:
    """TP 2 x PP 2, an evaluation every other iteration and two at the end."""
    return flags("--tensor-model-parallel-size", "2", "--eval-iters", "1", *more)


def rows(run: Run, phase: str) -> list[list[dict]]:
    """The ledger of each rank in a phase, without what never is compressed."""
    return [
        [
            row
            for row in rank.ledger
            if row["phase"] == phase and not row["traffic"].endswith("other")
        ]
        for rank in run.ranks
    ]


def test_evaluations_are_uncompressed_and_training_is_what_it_was(tmp_path) -> None:
    """Compressed with the flag and without; and an uncompressed evaluation of the former's checkpoint."""
    saved = str(tmp_path / "saved")
    words = [
        *validated(*CODECS.split()),
        "--save",
        saved,
        "--save-interval",
        "4",
        "--validate-uncompressed",
    ]
    exact = pretrain(*words, ranks=4)
    evaluated = pretrain(*validated("--load", saved), ranks=4)
    coded = pretrain(*validated(*CODECS.split()), ranks=4)
    # Losses of validation and test data: to the last bit those of an uncompressed evaluation.
    found, noisy, plain = (run.ranks[-1].validation for run in (exact, coded, evaluated))
    assert len(found) == len(noisy) == 4 and len(plain) == 2 and found[2:] == plain
    assert all(with_flag != without for with_flag, without in zip(found, noisy, strict=True))
    assert "evaluation sends activations uncompressed (--validate-uncompressed)" in exact.output
    # Training: losses, parameters and bytes are those without the flag.
    assert (
        exact.losses == coded.losses
        and len(exact.losses) == 4
        and exact.parameters == coded.parameters
    )
    assert rows(exact, "train") == rows(coded, "train")
    assert {row["kind"] for rank in rows(exact, "train") for row in rank} == {"compressed", "off"}
    # The ledger: evaluations have a kind of their own; four here, two in the uncompressed run.
    for with_flag, uncompressed in zip(rows(exact, "eval"), rows(evaluated, "eval"), strict=True):
        assert with_flag and {row["kind"] for row in with_flag} == {"evaluation"}
        assert {row["kind"] for row in uncompressed} == {"off"}
        sent = {(row["traffic"], row["operation"]): row["sent_bytes"] for row in with_flag}
        assert sent == {
            (row["traffic"], row["operation"]): 2 * row["sent_bytes"] for row in uncompressed
        }
