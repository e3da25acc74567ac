"""CUDA graphs of Megatron's loop: the losses and bytes of the same run without them, and an end."""

from pathlib import Path

import pytest

from tests.gpu.devices import needs
from tests.gpu.training import losses, train

pytestmark = [pytest.mark.multigpu, needs(2)]

FLAGS = """--transformer-impl local --tensor-model-parallel-size 2 --hidden-size 256
    --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --bf16
    --attention-dropout 0 --hidden-dropout 0
    --train-iters 12 --eval-interval 6 --eval-iters 5 --split 80,10,10
    --no-create-attention-mask-in-dataloader --no-check-for-nan-in-loss-and-grad
    --tp-compression int6 --compression-min-mb 0 --compression-transport collective"""
KINDS = {
    "full_iteration": "--cuda-graph-impl full_iteration",
    "captured again": "--cuda-graph-impl full_iteration --compression-start-iteration 6",
    "layers": "--cuda-graph-impl local",
}


LATE = "--compression-start-iteration 6"


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> dict[str, dict]:
    """Reports of the runs without graphs: from the start, and with a late start of compression."""
    folder = tmp_path_factory.mktemp("eager")
    late = train(*FLAGS.split(), *LATE.split(), processes=2, report=folder / "late")
    return {"": train(*FLAGS.split(), processes=2, report=folder / "start"), LATE: late}


def evaluations(report: dict) -> list[dict]:
    """Return the losses of each evaluation."""
    return [row["losses"] for row in report["history"] if "split" in row]


def last_bytes(report: dict) -> dict:
    """Return the bytes of the last iteration."""
    rows = [row for row in report["history"] if row["iteration"] == 12 and "split" not in row]
    return rows[0]["bytes_per_iteration"]


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_train_as_without(kind: str, eager: dict, tmp_path: Path) -> None:
    """Losses and evaluations are equal to the last bit; an iteration's bytes are each replay's."""
    flags = KINDS[kind]
    expected = eager[LATE if LATE in flags else ""]
    report = train(*FLAGS.split(), *flags.split(), processes=2, report=tmp_path / "report")
    assert losses(report) == losses(expected)
    assert len(evaluations(report)) >= 2
    assert evaluations(report) == evaluations(expected)
    assert last_bytes(report) == last_bytes(expected)
