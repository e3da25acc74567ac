"""The tests of tensor and context parallelism and CAAT-Net again, on CUDA devices over NCCL."""

import functools

import pytest
import torch

from tests.distributed import test_context_parallel
from tests.distributed.spawn import spawn
from tests.distributed.test_caat_net import (
    check_against_emulation,
    check_traffic,
    gradient_worker,
    traffic_worker,
)
from tests.distributed.test_collectives import collectives_worker
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
    by_rank = spawn(replica_worker, world_size, ITERATIONS, backend="nccl")
    first_hashes, first_loss, last_loss = by_rank[0]
    assert last_loss < first_loss - 0.5
    for hashes, _, _ in by_rank:
        assert hashes == first_hashes


@needs(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fewer_query_groups_than_ranks(sequence_parallel: bool) -> None:
    """The gather of qkv is compressed, and its results are right."""
    check_few_groups(sequence_parallel, backend="nccl")


@functools.cache
def attention(transport: str) -> list[dict]:
    """Return the results of context parallelism by rank."""
    return spawn(test_context_parallel.attention_worker, 2, transport, backend="nccl")


@needs(2)
@pytest.mark.parametrize("codec", test_context_parallel.CODECS)
@pytest.mark.parametrize("mask", test_context_parallel.MASKS)
@pytest.mark.parametrize("transport", ["collective", "auto"])
def test_context_parallel_ranks_compute_what_one_process_does(transport, mask, codec) -> None:
    test_context_parallel.check_fp64(attention(transport), mask, codec)


@needs(2)
@pytest.mark.parametrize("transport", ["collective", "auto"])
def test_context_parallel_codecs(transport: str) -> None:
    """Lossless changes no bit, and int8 little."""
    test_context_parallel.check_lossless(attention(transport))
    test_context_parallel.check_int8(attention(transport))


@needs(2)
@pytest.mark.parametrize("spec", ["lossless", "int8"])
def test_context_parallel_transports_have_the_same_bits(spec: str) -> None:
    for collective, auto in zip(attention("collective"), attention("auto"), strict=True):
        expected = collective["bf16"][spec].tensors
        actual = auto["bf16"][spec].tensors
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_caat_net_gradients(world_size: int) -> None:
    """fp64 gradients of GPUs against autograd on the CPU."""
    check_against_emulation(spawn(gradient_worker, world_size, backend="nccl"), 0.5)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_caat_net_traffic_and_replicas(world_size: int) -> None:
    """The hand count of the bytes; ranks agree on what they share, bit for bit."""
    check_traffic(spawn(traffic_worker, world_size, backend="nccl"))
