"""CAAT-Net in Megatron's loop: every layout trains the same function, and checkpoints belong to it."""

from pathlib import Path

import pytest

from tests.distributed.launch import Run, pretrain, tiny_flags
from tests.distributed.test_matrix import check_copies

ITERATIONS = 4
HALF = ("--caat-net-sync-fraction", "0.5")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")  # layouts draw other numbers
TP2 = ("--tensor-model-parallel-size", "2")


def train(*flags: str, ranks: int = 2, check: bool = True, **replaced: str) -> Run:
    """A tiny run in fp32."""
    return pretrain(*tiny_flags(*TP2, *flags, **replaced), ranks=ranks, check=check)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Run, list[str], Path]:
    """The run that the others are compared with, flags of the weights that all start from, checkpoints."""
    directory = tmp_path_factory.mktemp("caat")
    initial, saved = directory / "initial", directory / "saved"
    train(*HALF, "--save", str(initial), "--save-interval", "1", train_iters="1")
    load = ("--load", str(initial), "--finetune", "--no-load-optim", "--no-load-rng")
    flags = [*HALF, *NO_DROPOUT, *load]
    more = (
        "--save",
        str(saved),
        "--save-interval",
        "2",
        "--eval-interval",
        "4",
        "--eval-iters",
        "2",
    )
    return train(*flags, *more), flags, saved


def test_it_trains_and_evaluates(runs) -> None:
    """The loss falls, evaluation runs, and ranks keep their replicated parameters alike."""
    plain, *_ = runs
    assert plain.losses[ITERATIONS] < plain.losses[1]
    assert plain.ranks[-1].validation[0] < plain.losses[1]
    assert (
        "CAAT-Net sums 16 of 32 channels of each row-parallel output over 2 ranks" in plain.output
    )
    check_copies(plain)


PIPELINE = (
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|t|L --micro-batch-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
DATA = (
    "--micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--recompute-granularity selective --recompute-modules core_attn mlp"
)


@pytest.mark.parametrize("layout", [PIPELINE, DATA])
def test_layouts_train_the_same_function(runs, layout: str) -> None:
    """Virtual pipeline stages, data parallelism, recomputation, accumulation: the same losses."""
    plain, flags, _ = runs
    run = train(*flags, *layout.split(), ranks=4)
    check_copies(run)
    assert run.losses == pytest.approx(plain.losses, rel=2e-6)


def test_other_models_are_refused(runs) -> None:
    """A checkpoint loaded as another function of its weights: one line that says so."""
    run = train("--load", str(runs[-1]), check=False)
    assert run.returncode != 0
    reason = "was trained with --caat-net-sync-fraction 0.5"
    assert run.errors and all(reason in line for line in run.errors)
