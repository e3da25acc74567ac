"""Runs of pretrain_gpt.py with Transformer Engine's layers: their checkpoints, and the other dimensions."""

import importlib.util
from pathlib import Path

import pytest

from tests.gpu.devices import DEVICES
from tests.gpu.training import losses, train

ENGINE = """--transformer-impl transformer_engine --bf16 --hidden-size 256 --use-distributed-optimizer
    --no-create-attention-mask-in-dataloader"""
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(DEVICES < 2, reason="needs 2 CUDA devices"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="needs Transformer Engine: scripts/setup.sh --with-transformer-engine",
    ),
]


def run(flags: str, report: Path) -> dict:
    """A run on two ranks."""
    return train(*ENGINE.split(), *flags.split(), processes=2, report=report)


def test_checkpoints_know_nothing_of_compression(tmp_path: Path) -> None:
    """Saved without --taco, loaded with it, saved again, loaded without: each goes on from there."""
    folder = tmp_path / "checkpoints"
    keep = f"{TENSOR} --train-iters 12 --save {folder} --load {folder} --save-interval 4 --exit-interval 4"
    found = {}
    for part, codec in enumerate(("", "--taco --compression-min-mb 0", "")):
        report = run(f"{keep} {codec}", tmp_path / str(part))
        sent = report["summary"]["bytes_per_iteration"]["tp.forward"]
        assert (sent["sent"] < 0.7 * sent["uncompressed"]) == bool(codec)
        found |= losses(report)
    assert sorted(found) == list(range(1, 13))
    exact = losses(run(f"{TENSOR} --train-iters 12", tmp_path / "whole"))
    assert {i: found[i] for i in range(1, 5)} == pytest.approx({i: exact[i] for i in range(1, 5)}, rel=1e-3)
    assert found == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "channel"),
    [
        ("--overlap-grad-reduce --overlap-param-gather --dp-compression sdp4bit", "dp.gradient"),
        ("--pipeline-model-parallel-size 2 --pp-compression tah-quant", "pp.forward"),
    ],
)
def test_other_dimensions(flags: str, channel: str, tmp_path: Path) -> None:
    """Gradients and pipeline messages of TE's layers go compressed as those of ours do."""
    report = run(flags, tmp_path)
    pair = report["summary"]["bytes_per_iteration"][channel]
    assert 0 < pair["sent"] < 0.6 * pair["uncompressed"]
    found = losses(report)
    assert sorted(found) == [1, 2, 3, 4] and found[4] < found[1]
