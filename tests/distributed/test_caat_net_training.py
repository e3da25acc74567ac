"""CAAT-Net in Megatron's loop: every layout trains the same function, and checkpoints belong to it."""

import re
from pathlib import Path

import pytest

from tests.distributed.forked import ForkedRun, pretrain
from tests.distributed.launch import tiny_flags

ITERATIONS = 4
CODEC_LOSS, CODEC_NORM = 1e-4, 5e-3  # relative, of 8 bits
HALF = ("--caat-net-sync-fraction", "0.5")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")  # layouts draw other numbers
TP2 = ("--tensor-model-parallel-size", "2")


class Runs:
    """Tiny runs in fp32; all layouts start from one set of weights."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.initial = directory / "initial"
        self.saved = directory / "saved"
        self.train(*TP2, *HALF, *("--save", str(self.initial), "--save-interval", "1"), train_iters="1")
        self.plain = self.train(
            *(*TP2, *HALF, *NO_DROPOUT, *self.from_initial()),
            *("--save", str(self.saved), "--save-interval", "2"),
            *("--eval-interval", "4", "--eval-iters", "2"),
        )

    def from_initial(self) -> list[str]:
        return ["--load", str(self.initial), "--finetune", "--no-load-optim", "--no-load-rng"]

    def train(self, *flags: str, ranks: int = 2, check: bool = True, **replaced: str) -> ForkedRun:
        settings = {"train_iters": str(ITERATIONS), **replaced}
        words = tiny_flags(*flags, **settings)
        return pretrain(*words, ranks=ranks, directory=self.directory, check=check)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """The run that the others are compared with, saved after every second iteration."""
    return Runs(tmp_path_factory.mktemp("caat"))


def _check_all_compressed(run: ForkedRun) -> None:
    for rank in run.ranks:
        rows = [row for row in rank.ledger if row["traffic"] in ("tp.forward", "tp.backward")]
        assert rows and {row["kind"] for row in rows} == {"compressed"}
        sent, plain = (sum(row[size] for row in rows) for size in ("sent_bytes", "plain_bytes"))
        half = 5 / 3  # of five all-reduces four send half of the channels, the embedding's sends all
        assert 3.7 < plain / sent / half < 4, "8.125 bits for 32, and padding"


def _check_replicas(run: ForkedRun) -> None:
    for rank in run.ranks:
        for other in run.ranks:
            if other.place[0] == rank.place[0]:
                for name in rank.replicated:
                    assert rank.parameters[name] == other.parameters[name], name


def test_it_trains_and_evaluates(runs: Runs) -> None:
    """The loss falls, evaluation runs, and ranks keep their replicated parameters alike."""
    losses = runs.plain.losses
    assert losses[ITERATIONS] < losses[1]
    assert runs.plain.ranks[-1].validation[0] < losses[1]
    assert "CAAT-Net sums 16 of 32 channels of each row-parallel output over 2 ranks" in runs.plain.output
    _check_replicas(runs.plain)


PIPELINE = (
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|t|L --micro-batch-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
DATA = (
    "--micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--recompute-granularity selective --recompute-modules core_attn mlp"
)
INT8 = ["--tp-compression", "int8:scales=single", "--compression-min-mb", "0"]


@pytest.mark.parametrize("layout", [PIPELINE, DATA])
def test_layouts_train_the_same_function(runs: Runs, layout: str) -> None:
    """Virtual pipeline stages, data parallelism, recomputation, accumulation: the same losses."""
    run = runs.train(*TP2, *HALF, *NO_DROPOUT, *runs.from_initial(), *layout.split(), ranks=4)
    _check_replicas(run)
    for iteration, loss in runs.plain.losses.items():
        assert run.losses[iteration] == pytest.approx(loss, rel=2e-6)


def test_layouts_with_a_codec(runs: Runs) -> None:
    """With 8 bits nearly the same losses and gradient norms, and nothing of the layers goes uncompressed."""
    run = runs.train(*TP2, *HALF, *NO_DROPOUT, *INT8, *runs.from_initial(), *DATA.split(), ranks=4)
    _check_replicas(run)
    assert run.losses != runs.plain.losses
    for iteration, loss in runs.plain.losses.items():
        assert run.losses[iteration] == pytest.approx(loss, rel=CODEC_LOSS)
    norms, exact = _gradient_norms(run), _gradient_norms(runs.plain)
    assert len(norms) == len(exact) == ITERATIONS
    assert norms == pytest.approx(exact, rel=CODEC_NORM)
    _check_all_compressed(run)


def _gradient_norms(run: ForkedRun) -> list[float]:
    return [float(norm) for norm in re.findall(r"grad norm: ([\d.]+)", run.output)]


def test_resume_in_another_layout(runs: Runs) -> None:
    """From the checkpoint of iteration 2 on two pipeline stages: the same losses."""
    resume = ("--load", str(runs.saved), "--ckpt-step", "2", "--pipeline-model-parallel-size", "2")
    run = runs.train(*TP2, *HALF, *NO_DROPOUT, *resume, ranks=4)
    assert set(run.losses) == {3, 4}
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(runs.plain.losses[iteration], rel=2e-6)


def test_resume_is_bitwise(runs: Runs) -> None:
    """From the checkpoint of iteration 2 to the same parameters."""
    run = runs.train(*TP2, *HALF, *NO_DROPOUT, "--load", str(runs.saved), "--ckpt-step", "2")
    assert set(run.losses) == {3, 4}
    for rank, resumed in zip(runs.plain.ranks, run.ranks, strict=True):
        assert resumed.parameters == rank.parameters


def test_other_models_are_refused(runs: Runs) -> None:
    """A checkpoint loaded as another function of its weights: one line that says so."""
    run = runs.train(*TP2, "--load", str(runs.saved), check=False)
    assert run.returncode != 0
    reason = "was trained with --caat-net-sync-fraction 0.5"
    assert run.errors and all(reason in line for line in run.errors)
