"""CAAT-Net in Megatron's loop: layouts train the same function, and checkpoints belong to it."""

import pytest

from tests.distributed.launch import Run, pretrain, tiny_flags
from tests.distributed.test_matrix import check_copies

ITERATIONS = 4
HALF = ("--caat-net-sync-fraction", "0.5")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")  # layouts draw different masks
TP2 = ("--tensor-model-parallel-size", "2")


def train(*flags: str, ranks: int = 2, check: bool = True, **replaced: str) -> Run:
    """Run a tiny training in fp32 at TP 2.

    Args:
        flags: added to the tiny run's.
        ranks: number of ranks.
        check: require that the run succeeds.
        replaced: values of the tiny run's flags by name.
    """
    return pretrain(*tiny_flags(*TP2, *flags, **replaced), ranks=ranks, check=check)


@pytest.fixture(scope="module")
def initial_weights(tmp_path_factory) -> tuple[str, ...]:
    """Flags of CAAT-Net that start from one set of weights."""
    folder = str(tmp_path_factory.mktemp("initial"))
    train(*HALF, "--save", folder, "--save-interval", "1", train_iters="1")
    load = ("--load", folder, "--finetune", "--no-load-optim", "--no-load-rng")
    return (*HALF, *NO_DROPOUT, *load)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> str:
    """The folder of the TP 2 run's checkpoints."""
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def run_at_tp2(initial_weights: tuple[str, ...], checkpoints: str) -> Run:
    """The run that other layouts are compared with."""
    saved = ("--save", checkpoints, "--save-interval", "2")
    evaluated = ("--eval-interval", "4", "--eval-iters", "2")
    return train(*initial_weights, *saved, *evaluated)


def test_it_trains(run_at_tp2: Run) -> None:
    assert run_at_tp2.losses[ITERATIONS] < run_at_tp2.losses[1]


def test_it_evaluates(run_at_tp2: Run) -> None:
    assert run_at_tp2.ranks[-1].validation[0] < run_at_tp2.losses[1]


def test_log_names_the_shared_channels(run_at_tp2: Run) -> None:
    line = "CAAT-Net sums 16 of 32 channels of each row-parallel output over 2 ranks"
    assert line in run_at_tp2.output


def test_replicated_parameters_keep_their_bits(run_at_tp2: Run) -> None:
    check_copies(run_at_tp2)


LAYOUTS = {
    "virtual pipeline stages": "--pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout E|t|t|L --micro-batch-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "data parallelism": "--micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --recompute-granularity selective --recompute-modules core_attn mlp",
}
"""Both accumulate or recompute as well."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_the_same_function(
    run_at_tp2: Run, initial_weights: tuple[str, ...], layout: str
) -> None:
    run = train(*initial_weights, *LAYOUTS[layout].split(), ranks=4)
    check_copies(run)
    assert run.losses == pytest.approx(run_at_tp2.losses, rel=2e-6)


def test_checkpoint_is_refused_by_another_function(run_at_tp2: Run, checkpoints: str) -> None:
    """Without CAAT-Net its weights would be those of another model: one line says so."""
    run = train("--load", checkpoints, check=False)
    assert run.returncode != 0
    assert run.errors
    for line in run.errors:
        assert "was trained with --caat-net-sync-fraction 0.5" in line
