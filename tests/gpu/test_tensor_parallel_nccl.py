"""The distributed tests of tensor and context parallelism and CAAT-Net again, on CUDA devices over NCCL."""

import pytest
import torch

from tests.distributed.spawn import spawn
from tests.distributed.test_caat_net import (
    check_against_emulation,
    check_traffic,
    gradient_worker,
    traffic_worker,
)
from tests.distributed.test_collectives import collectives_worker
from tests.distributed.test_context_parallel import attention_worker, check_ranks
from tests.distributed.test_tensor_parallel_layers import TACO_BOUND, layers_worker
from tests.distributed.test_tensor_parallel_model import (
    ITERATIONS,
    check_few_groups,
    replica_worker,
)
from tests.gpu.devices import WORLD_SIZES, needs

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives(world_size: int) -> None:
    """Every check of test_collectives.py, and the same bits on every rank."""
    by_rank = spawn(collectives_worker, world_size, backend="nccl")
    for results in by_rank:
        failures = {name: trace for name, trace in results.items() if isinstance(trace, str)}
        assert not failures
        assert results["lossy sums"] == by_rank[0]["lossy sums"]


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


@needs(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fewer_query_groups_than_ranks(sequence_parallel: bool) -> None:
    """The gather of qkv, and what it stands for."""
    check_few_groups(sequence_parallel, backend="nccl")


@needs(2)
def test_context_parallel_attention() -> None:
    """As on the CPU; and every transport gives the same bits."""
    found = {}
    for transport in ("collective", "auto"):
        found[transport] = spawn(attention_worker, 2, transport, backend="nccl")
        check_ranks(found[transport])
    for one, other in zip(*found.values(), strict=True):
        for spec in ("lossless", "int8"):
            assert all(map(torch.equal, one["bits"][spec][0], other["bits"][spec][0])), spec


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_caat_net_gradients(world_size: int) -> None:
    """fp64 gradients of GPUs against autograd on the CPU."""
    check_against_emulation(spawn(gradient_worker, world_size, backend="nccl"), 0.5)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_caat_net_traffic_and_replicas(world_size: int) -> None:
    """The hand count of the bytes; ranks agree on what they share, bit for bit."""
    check_traffic(spawn(traffic_worker, world_size, backend="nccl"))
