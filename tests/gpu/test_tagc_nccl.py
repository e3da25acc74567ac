"""TAGC's distributed tests again, on CUDA devices over NCCL: the Triton kernels and real streams."""

import pytest
import torch

from tests.distributed import test_tagc
from tests.distributed.spawn import spawn
from tests.gpu.devices import DEVICES

pytestmark = pytest.mark.multigpu


def _needs(devices: int):
    return pytest.mark.skipif(devices > DEVICES, reason=f"needs {devices} CUDA devices")


def _on_gpu(rank: int, world_size: int, worker: str, *args):
    test_tagc.DEVICE = f"cuda:{torch.cuda.current_device()}"  # which ranks may share
    return getattr(test_tagc, worker)(rank, world_size, *args)


@_needs(4)
@pytest.mark.parametrize(("world_size", "node_size"), [(2, None), (3, None), (4, 2)])
def test_exchanges(world_size: int, node_size: int | None) -> None:
    for sizes in spawn(_on_gpu, world_size, "exchange_worker", node_size, backend="nccl"):
        assert not sizes or 5.0 < 8 * sizes["wires"] / sizes["values"] < 5.6


@_needs(4)
def test_training_learns_and_weights_agree() -> None:
    """Sketches and packed values, with the distributed optimizer and overlap, and plain DDP."""
    for everything in spawn(_on_gpu, 4, "training_worker", 50, backend="nccl"):
        for losses in everything:
            assert sum(losses[-5:]) < 0.85 * sum(losses[:5])
