"""CAAT-Net's distributed tests again, on CUDA devices over NCCL."""

import pytest

from tests.distributed.spawn import spawn
from tests.distributed.test_caat_net import check_against_emulation, gradient_worker
from tests.distributed.test_caat_net_traffic import check_traffic, traffic_worker
from tests.gpu.devices import WORLD_SIZES

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradients(world_size: int) -> None:
    """fp64 gradients of GPUs against autograd on the CPU."""
    check_against_emulation(spawn(gradient_worker, world_size, backend="nccl"), 0.5)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_traffic_and_replicas(world_size: int) -> None:
    """The hand count of the bytes; ranks agree on what they share, bit for bit."""
    check_traffic(spawn(traffic_worker, world_size, backend="nccl"))
