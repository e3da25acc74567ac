"""CUDA graphs of Megatron's loop: the losses and bytes of the same run without them, and an end."""

from pathlib import Path

import pytest

from tests.gpu.devices import needs
from tests.gpu.training import losses, train

pytestmark = [pytest.mark.multigpu, needs(2)]

FLAGS = """--transformer-impl local --tensor-model-parallel-size 2 --hidden-size 256 --num-attention-heads 8
    --seq-length 64 --max-position-embeddings 64 --bf16 --attention-dropout 0 --hidden-dropout 0
    --train-iters 12 --eval-interval 6 --eval-iters 5 --split 80,10,10
    --no-create-attention-mask-in-dataloader --no-check-for-nan-in-loss-and-grad
    --tp-compression int6 --compression-min-mb 0 --compression-transport collective"""
KINDS = {
    "full_iteration": "--cuda-graph-impl full_iteration",
    "captured again": "--cuda-graph-impl full_iteration --compression-start-iteration 6",
    "layers": "--cuda-graph-impl local",
}


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> dict[str, dict]:
    """Reports by what makes another run of it."""
    folder = tmp_path_factory.mktemp("eager")
    return {
        more: train(*FLAGS.split(), *more.split(), processes=2, report=folder / str(len(more)))
        for more in ("", "--compression-start-iteration 6")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_train_as_without(kind: str, eager: dict, tmp_path: Path) -> None:
    """To the last bit, in training and evaluation; an iteration's bytes are those of each replay."""
    flags = KINDS[kind]
    reference = eager["--compression-start-iteration 6" if "start" in flags else ""]
    report = train(*FLAGS.split(), *flags.split(), processes=2, report=tmp_path / "report")
    assert losses(report) == losses(reference)
    evaluated, expected = (
        [row["losses"] for row in one["history"] if "split" in row] for one in (report, reference)
    )
    assert evaluated == expected and len(evaluated) >= 2
    last, other = (
        next(row for row in one["history"] if row["iteration"] == 12 and "split" not in row)
        for one in (report, reference)
    )
    assert last["bytes_per_iteration"] == other["bytes_per_iteration"]
