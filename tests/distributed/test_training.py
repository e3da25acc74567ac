"""pretrain_gpt.py with and without --taco: golden losses."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import pretrain, tiny_flags
from tests.distributed.server import MOCK_DOCUMENTS

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "losses.json"
GOLDEN_ITERATIONS = 12
MODEL = """--hidden-size 64 --seq-length 32 --micro-batch-size 2 --global-batch-size 4
    --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --seed 5"""
GPT = MODEL.split()


@pytest.mark.parametrize(
    ("name", "flags", "tolerance"),
    [
        # fp32, so that only the order of BLAS's sums differs from machine to machine.
        ("uncompressed", [], 1e-6),
        # A last-digit difference can move a value to the next grid point.
        ("taco", ["--taco", "outliers=off", "--compression-min-mb", "0"], 2e-4),
    ],
)
def test_golden_losses(name: str, flags: list[str], tolerance: float) -> None:
    """At TP 2 the losses are those on record, which are stored with every digit."""
    command = tiny_flags(
        *GPT, "--tensor-model-parallel-size", "2", *flags, train_iters=str(GOLDEN_ITERATIONS)
    )
    losses = pretrain(*command, env={MOCK_DOCUMENTS: "100000"}).losses
    recorded = json.loads(GOLDEN.read_text())[name]
    golden = {int(iteration): loss for iteration, loss in recorded.items()}
    assert losses == pytest.approx(golden, rel=tolerance)
    assert golden[GOLDEN_ITERATIONS] < golden[1] - 0.5, "the golden run has learnt something"
