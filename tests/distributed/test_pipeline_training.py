"""Whole runs with compressed pipeline stages.

Bytes are counted by hand; evaluations run with the codecs and without.
"""

import itertools
from dataclasses import dataclass

import pytest

from tests.distributed.launch import Run, pretrain, tiny_flags

ITERATIONS = 4
MESSAGES = 2  # micro-batches of an iteration
VALUES = 32 * 2 * 64
"""Values of one message: 32 tokens x 2 sequences x 64 channels."""
FORWARD = 1536 + 400 + 128 + 128 + 64 + 16
"""Bytes of one message in TAH-Quant.

64 tiles of 64 values at 3 bits; a fourth bit for 25 of 32 tokens of both sequences; fp16 steps and
zeros; a byte of pivot a tile; 2 words of widths, padded.
"""
BACKWARD = VALUES * 6 // 8 + 128 * 2
"""Bytes of one gradient: 6 bits a value and 128 bf16 scales."""
UNCOMPRESSED = VALUES * 4


def flags(*more: str) -> list[str]:
    """Return the flags of two stages in fp32, and more."""
    return tiny_flags(
        "--pipeline-model-parallel-size", "2", *more, hidden_size="64", eval_interval="2"
    )


COMPRESSED = flags("--pp-compression", "tah-quant", "--eval-iters", "1")


@dataclass
class Traffic:
    """What all ranks sent in a channel."""

    messages: int = 0
    sent_bytes: int = 0
    uncompressed_bytes: int = 0


def traffic_by_kind(run: Run, channel: str, phase: str = "train") -> dict[str, Traffic]:
    """Sum the ledgers of all ranks.

    Args:
        run: the finished run.
        channel: pp.forward or pp.backward.
        phase: train or eval.
    """
    totals: dict[str, Traffic] = {}
    for row in itertools.chain.from_iterable(rank.ledger for rank in run.ranks):
        if (row["traffic"], row["phase"]) == (channel, phase):
            total = totals.setdefault(row["kind"], Traffic())
            if row["operation"] == "send":
                total.messages += row["calls"]
            total.sent_bytes += row["sent_bytes"]
            total.uncompressed_bytes += row["plain_bytes"]
    return totals


@pytest.fixture(scope="module")
def compressed_run() -> Run:
    """A run of four iterations."""
    return pretrain(*COMPRESSED)


def test_bytes_of_training_by_hand(compressed_run: Run) -> None:
    """Two messages an iteration each way."""
    count = ITERATIONS * MESSAGES
    forward = Traffic(count, count * FORWARD, count * UNCOMPRESSED)
    backward = Traffic(count, count * BACKWARD, count * UNCOMPRESSED)
    assert traffic_by_kind(compressed_run, "pp.forward") == {"compressed": forward}
    assert traffic_by_kind(compressed_run, "pp.backward") == {"compressed": backward}


def test_bytes_of_evaluations_by_hand(compressed_run: Run) -> None:
    """Evaluations send forward alone."""
    forward = traffic_by_kind(compressed_run, "pp.forward", "eval")["compressed"]
    assert forward.messages > 0
    assert forward.sent_bytes == forward.messages * FORWARD
    assert forward.uncompressed_bytes == forward.messages * UNCOMPRESSED
    assert traffic_by_kind(compressed_run, "pp.backward", "eval") == {}


def test_bits_a_value() -> None:
    assert 8 * FORWARD / VALUES <= 4.5
    assert 8 * BACKWARD / VALUES <= 6.6


def test_log_names_the_codecs(compressed_run: Run) -> None:
    gradients = "int6:group=32,scales=single,hadamard=off"
    line = f"pipeline parallelism: activations as tah-quant, gradients as {gradients}"
    assert line in compressed_run.output


def test_loss_falls_and_validation_follows(compressed_run: Run) -> None:
    losses = compressed_run.losses
    assert losses[ITERATIONS] < losses[1]
    validation = compressed_run.ranks[-1].validation
    assert validation[-1] == pytest.approx(losses[ITERATIONS], rel=0.05)


@pytest.fixture(scope="module")
def repeated_run() -> Run:
    """The same run, whose every loss is suspicious to Megatron: it runs such an iteration twice."""
    suspicious = """--no-check-for-nan-in-loss-and-grad --check-for-spiky-loss
        --error-injection-rate 1 --error-injection-type transient_error"""
    return pretrain(*COMPRESSED, *suspicious.split())


def test_repeated_iterations_train_to_the_same_bits(compressed_run: Run, repeated_run: Run) -> None:
    assert repeated_run.losses == compressed_run.losses
    assert repeated_run.parameters == compressed_run.parameters


def test_messages_of_repeated_iterations_are_sent_and_counted_again(repeated_run: Run) -> None:
    backward = traffic_by_kind(repeated_run, "pp.backward")["compressed"]
    # Megatron does not repeat the first iteration.
    assert backward.messages == (2 * ITERATIONS - 1) * MESSAGES


CODECS = """--taco format=int4 --compression-min-mb 0 --pp-compression tah-quant
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
"""Coarse in both dimensions, and recomputed under no_grad."""


def evaluated_flags(*more: str) -> list[str]:
    """Return the flags of TP 2 x PP 2 that evaluates every other iteration and twice at the end."""
    return flags("--tensor-model-parallel-size", "2", "--eval-iters", "1", *more)


def messages_of_phase(run: Run, phase: str) -> list[list[dict]]:
    """Return each rank's rows of the ledger in a phase, without what is never compressed."""
    by_rank = []
    for rank in run.ranks:
        rows = [row for row in rank.ledger if row["phase"] == phase]
        by_rank.append([row for row in rows if not row["traffic"].endswith("other")])
    return by_rank


def sent_by_operation(rows: list[dict]) -> dict[tuple[str, str], int]:
    """Return {(traffic, operation): bytes sent}."""
    return {(row["traffic"], row["operation"]): row["sent_bytes"] for row in rows}


class TestUncompressedEvaluations:
    """--validate-uncompressed: evaluations are exact, and training is what it was."""

    @pytest.fixture(scope="class")
    def checkpoints(self, tmp_path_factory) -> str:
        return str(tmp_path_factory.mktemp("evaluations") / "saved")

    @pytest.fixture(scope="class")
    def with_flag(self, checkpoints: str) -> Run:
        """Compressed training with the flag; it saves its weights."""
        more = ("--save", checkpoints, "--save-interval", "4", "--validate-uncompressed")
        return pretrain(*evaluated_flags(*CODECS.split()), *more, ranks=4)

    @pytest.fixture(scope="class")
    def without_flag(self) -> Run:
        """The same training without the flag."""
        return pretrain(*evaluated_flags(*CODECS.split()), ranks=4)

    @pytest.fixture(scope="class")
    def uncompressed(self, with_flag: Run, checkpoints: str) -> Run:
        """An uncompressed evaluation of the weights that the first run has saved."""
        return pretrain(*evaluated_flags("--load", checkpoints), ranks=4)

    def test_losses_are_those_of_an_uncompressed_run(
        self, with_flag: Run, uncompressed: Run
    ) -> None:
        """They are equal to the last bit, on validation and on test data."""
        validation = with_flag.ranks[-1].validation
        assert len(validation) == 4
        assert len(uncompressed.ranks[-1].validation) == 2
        assert validation[2:] == uncompressed.ranks[-1].validation

    def test_losses_are_others_without_the_flag(self, with_flag: Run, without_flag: Run) -> None:
        exact = with_flag.ranks[-1].validation
        lossy = without_flag.ranks[-1].validation
        assert len(lossy) == 4
        for exact_loss, lossy_loss in zip(exact, lossy, strict=True):
            assert exact_loss != lossy_loss

    def test_log_says_so(self, with_flag: Run) -> None:
        line = "evaluation sends activations uncompressed (--validate-uncompressed)"
        assert line in with_flag.output

    def test_training_is_what_it_is_without_the_flag(
        self, with_flag: Run, without_flag: Run
    ) -> None:
        assert len(with_flag.losses) == 4
        assert with_flag.losses == without_flag.losses
        assert with_flag.parameters == without_flag.parameters

    def test_training_sends_the_same_compressed_bytes(
        self, with_flag: Run, without_flag: Run
    ) -> None:
        by_rank = messages_of_phase(with_flag, "train")
        assert by_rank == messages_of_phase(without_flag, "train")
        assert {row["kind"] for rows in by_rank for row in rows} == {"compressed", "off"}

    def test_ledger_has_evaluations_as_a_kind(self, with_flag: Run, uncompressed: Run) -> None:
        for rows in messages_of_phase(with_flag, "eval"):
            assert {row["kind"] for row in rows} == {"evaluation"}
        for rows in messages_of_phase(uncompressed, "eval"):
            assert {row["kind"] for row in rows} == {"off"}

    def test_evaluations_send_every_byte(self, with_flag: Run, uncompressed: Run) -> None:
        """The training run evaluates four times, the uncompressed one twice."""
        by_rank = zip(
            messages_of_phase(with_flag, "eval"),
            messages_of_phase(uncompressed, "eval"),
            strict=True,
        )
        for rows, uncompressed_rows in by_rank:
            expected = sent_by_operation(uncompressed_rows)
            assert sent_by_operation(rows) == {name: 2 * sent for name, sent in expected.items()}
