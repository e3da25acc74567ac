"""The loss meter on GPUs: training is the same with it and without, eager and in a CUDA graph."""

from pathlib import Path

import pytest

from tests.gpu.devices import needs
from tests.gpu.test_graphs import last_bytes
from tests.gpu.training import losses, train

pytestmark = [pytest.mark.multigpu, needs(2)]

FLAGS = """--transformer-impl local --tensor-model-parallel-size 2 --sequence-parallel
    --hidden-size 256 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --bf16
    --attention-dropout 0.1 --hidden-dropout 0.1
    --train-iters 12 --eval-interval 100 --eval-iters 0 --split 100,0,0
    --no-create-attention-mask-in-dataloader --no-check-for-nan-in-loss-and-grad
    --tp-compression int4 --compression-min-mb 0"""


@pytest.mark.parametrize("graphs", ["none", "full_iteration"])
def test_training_is_the_same_with_the_meter(graphs: str, tmp_path: Path) -> None:
    """Dropout draws random numbers from states that the graph holds."""
    flags = (*FLAGS.split(), "--cuda-graph-impl", graphs)
    off = train(*flags, processes=2, report=tmp_path / "off")
    meter = ("--compression-loss-interval", "2")
    on = train(*flags, *meter, processes=2, report=tmp_path / "on")
    assert losses(on) == losses(off)
    assert last_bytes(on) == last_bytes(off)
    cost = on["summary"]["cost_in_loss"]
    assert cost["pairs"] >= 5
    assert cost["broken_pairs"] == 0
    assert abs(cost["percent"]) < 5
