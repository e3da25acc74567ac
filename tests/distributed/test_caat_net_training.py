"""CAAT-Net in Megatron's loop: every layout trains the same function, and checkpoints belong to it."""

from pathlib import Path

import pytest

from tests.distributed.launch import Run, pretrain, tiny_flags
from tests.distributed.test_matrix import check_replicas

ITERATIONS = 4
HALF = ("--caat-net-sync-fraction", "0.5")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")  # layouts draw other numbers
TP2 = ("--tensor-model-parallel-size", "2")


class Runs:
    """Tiny runs in fp32; all layouts start from one set of weights."""

    def __init__(self, directory: Path) -> None:
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

    def train(self, *flags: str, ranks: int = 2, check: bool = True, **replaced: str) -> Run:
        return pretrain(*tiny_flags(*flags, **replaced), ranks=ranks, check=check)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """The run that the others are compared with, saved after every second iteration."""
    return Runs(tmp_path_factory.mktemp("caat"))


def test_it_trains_and_evaluates(runs: Runs) -> None:
    """The loss falls, evaluation runs, and ranks keep their replicated parameters alike."""
    losses = runs.plain.losses
    assert losses[ITERATIONS] < losses[1]
    assert runs.plain.ranks[-1].validation[0] < losses[1]
    assert "CAAT-Net sums 16 of 32 channels of each row-parallel output over 2 ranks" in runs.plain.output
    check_replicas(runs.plain)


PIPELINE = (
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|t|L --micro-batch-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
DATA = (
    "--micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--recompute-granularity selective --recompute-modules core_attn mlp"
)


@pytest.mark.parametrize("layout", [PIPELINE, DATA])
def test_layouts_train_the_same_function(runs: Runs, layout: str) -> None:
    """Virtual pipeline stages, data parallelism, recomputation, accumulation: the same losses."""
    run = runs.train(*TP2, *HALF, *NO_DROPOUT, *runs.from_initial(), *layout.split(), ranks=4)
    check_replicas(run)
    for iteration, loss in runs.plain.losses.items():
        assert run.losses[iteration] == pytest.approx(loss, rel=2e-6)


def test_other_models_are_refused(runs: Runs) -> None:
    """A checkpoint loaded as another function of its weights: one line that says so."""
    run = runs.train(*TP2, "--load", str(runs.saved), check=False)
    assert run.returncode != 0
    reason = "was trained with --caat-net-sync-fraction 0.5"
    assert run.errors and all(reason in line for line in run.errors)
