"""FSDP2's tests again, on CUDA devices over NCCL: FSDP's own streams, prefetching, kernels."""

from collections.abc import Callable

import pytest

from tests.distributed import test_fsdp2
from tests.distributed.spawn import spawn
from tests.gpu.devices import needs

pytestmark = pytest.mark.multigpu


def _on_gpu(rank: int, world_size: int, worker: Callable) -> None:
    test_fsdp2.DEVICE = "cuda"
    worker(rank, world_size)


@needs(2)
@pytest.mark.parametrize("worker", [test_fsdp2.learning_worker, test_fsdp2.overflow_worker])
def test_on_gpus(worker: Callable) -> None:
    """Losses of lossless gathers equal to the last bit, int8 near; a shard that does not fit."""
    spawn(_on_gpu, 2, worker, backend="nccl")
