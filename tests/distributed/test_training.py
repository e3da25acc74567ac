"""pretrain_gpt.py with and without --taco: golden losses, resuming."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import go_back_to, pretrain
from tests.distributed.server import MOCK_DOCUMENTS

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "losses.json"
GOLDEN_ITERATIONS = 12
MODEL = """--hidden-size 64 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --attention-dropout 0
    --hidden-dropout 0 --use-cpu-initialization --seed 5"""
GPT = MODEL.split()
TP_2 = [*GPT, "--tensor-model-parallel-size", "2"]
EVERY_MESSAGE = ["--taco", "--compression-min-mb", "0"]


def golden_run(flags: list[str]) -> dict[int, float]:
    """Losses of the run on record, at tensor-parallel 2."""
    options = {"train_iters": str(GOLDEN_ITERATIONS), "exact": True, "env": {MOCK_DOCUMENTS: "100000"}}
    return pretrain(*TP_2, *flags, **options).exact_losses()


@pytest.mark.parametrize(
    ("name", "flags", "tolerance"),
    [
        # fp32, so that only the order of BLAS's sums differs from machine to machine.
        ("uncompressed", [], 1e-6),
        # A last-digit difference can move a value to the next grid point.
        ("taco", EVERY_MESSAGE, 2e-4),
    ],
)
def test_golden_losses(name: str, flags: list[str], tolerance: float) -> None:
    """The losses are those on record, which are stored with every digit."""
    golden = {int(iteration): loss for iteration, loss in json.loads(GOLDEN.read_text())[name].items()}
    assert golden_run(flags) == pytest.approx(golden, rel=tolerance)
    assert golden[GOLDEN_ITERATIONS] < golden[1] - 0.5, "the golden run has learnt something"


def test_resume_with_two_codecs_is_exact(tmp_path) -> None:
    """Losses after a resume equal the uninterrupted run's to the last digit."""
    saved = tmp_path / "checkpoints"
    codecs = ("--tp-compression", "int5/int6", "--compression-min-mb", "0")
    flags = [*TP_2, *codecs, "--bf16", "--train-iters", "6", "--save", str(saved), "--save-interval", "3"]
    whole = pretrain(*flags, exact=True).exact_losses()
    go_back_to(3, saved)
    resumed = pretrain(*flags, "--load", str(saved), exact=True).exact_losses()
    assert resumed == {iteration: whole[iteration] for iteration in (4, 5, 6)}
