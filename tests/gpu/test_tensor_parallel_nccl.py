"""The distributed tests again, on CUDA devices over NCCL: the Triton kernels under the same checks."""

import pytest

from tests.distributed.spawn import spawn
from tests.distributed.test_collectives import collectives_worker
from tests.distributed.test_query_groups import check_few_groups
from tests.distributed.test_tensor_parallel_layers import TACO_BOUND, layers_worker
from tests.distributed.test_tensor_parallel_model import ITERATIONS, replica_worker
from tests.gpu.devices import DEVICES

WORLD_SIZES = [
    pytest.param(n, marks=pytest.mark.skipif(n > DEVICES, reason=f"needs {n} CUDA devices")) for n in (2, 4)
]

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives(world_size: int) -> None:
    """Sums within the codec's bound, the same bits on every rank."""
    by_rank = spawn(collectives_worker, world_size, backend="nccl")
    for other in by_rank[1:]:
        assert other == by_rank[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_layers(world_size: int) -> None:
    """Hooked layers against serial ones and megatron-core's."""
    for errors in spawn(layers_worker, world_size, backend="nccl"):
        assert all(1e-4 < error < TACO_BOUND for error in errors.values()), errors


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replicas_stay_identical(world_size: int) -> None:
    """Residual stream and replicated parameters agree bit for bit over 50 iterations."""
    (hashes, first, last), *others = spawn(replica_worker, world_size, ITERATIONS, backend="nccl")
    assert last < first - 0.5
    for other, _, _ in others:
        assert other == hashes


@pytest.mark.skipif(DEVICES < 4, reason="needs 4 CUDA devices")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fewer_query_groups_than_ranks(sequence_parallel: bool) -> None:
    """The gather of qkv, and what it stands for."""
    check_few_groups(sequence_parallel, backend="nccl")
