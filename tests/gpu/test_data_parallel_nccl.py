"""The tests of SDP4Bit, TAGC and FSDP2 again, on CUDA devices over NCCL."""

from collections.abc import Callable

import pytest
import torch

from tests.distributed import test_fsdp2, test_outer_hop, test_tagc
from tests.distributed.spawn import spawn
from tests.distributed.test_data_parallel_hooks import (
    codecs_worker,
    identity_worker,
    nodes_worker,
    rollback_worker,
    warm_up_worker,
)
from tests.distributed.test_data_parallel_nodes import (
    cut_worker,
    hosts_worker,
    uneven_nodes_worker,
)
from tests.distributed.test_sdp4bit import check_bytes, replica_worker, started_bytes_worker
from tests.gpu.devices import needs

pytestmark = pytest.mark.multigpu


@needs(2)
def test_an_exact_codec_changes_nothing() -> None:
    """The hooks alone leave two ranks' weights as they are, to the bit."""
    for results in spawn(identity_worker, 2, backend="nccl"):
        for name, (plain, hooked, _) in results.items():
            assert plain == hooked, name


@needs(2)
@pytest.mark.parametrize("worker", [codecs_worker, warm_up_worker])
def test_any_codec_serves(worker: Callable) -> None:
    """It learns, replicas stay alike, and begins when it should."""
    spawn(worker, 2, backend="nccl")


@needs(2)
@pytest.mark.parametrize("weights", ["int8", "sdp4bit", "lossless"])
def test_weights_written_before_the_next_forward_pass_stay(weights: str) -> None:
    """Written weights are detected on the device."""
    write = "past torch's version counters"
    assert spawn(rollback_worker, 2, weights, write, backend="nccl") == [0, 0]


@needs(4)
def test_replicas_stay_identical() -> None:
    """Four ranks, 50 iterations with overlap, and plain DDP."""
    for (first, last), (plain_first, plain_last) in spawn(replica_worker, 4, backend="nccl"):
        assert last < first - 1.0 and plain_last < plain_first - 0.3


@needs(2)
def test_instances_of_one_rank() -> None:
    """Two optimizer instances: the hop between them in 8 bits."""
    for ratio in spawn(test_outer_hop.one_rank_worker, 2, backend="nccl"):
        assert ratio <= 0.52 / 2


@needs(4)
def test_optimizer_instances() -> None:
    """Two instances of two ranks: an exact codec changes no bit; replicas are equal; 8 bits."""
    spawn(test_outer_hop.exact_worker, 4, backend="nccl")
    spec = "none:outer=int8"
    for sent, differs, _ in spawn(test_outer_hop.instances_worker, 4, spec, backend="nccl"):
        now, before = sent
        assert now <= 0.26 * before and differs < 1e-3


@needs(4)
def test_two_nodes() -> None:
    """Two nodes of two ranks: topology, training, bytes."""
    spawn(hosts_worker, 4, backend="nccl")
    spawn(uneven_nodes_worker, 4, backend="nccl")
    spawn(nodes_worker, 4, 2, backend="nccl")
    for results in spawn(started_bytes_worker, 4, 2, backend="nccl"):
        check_bytes(results)


@needs(4)
def test_parameters_cut_without_the_mark() -> None:
    """Each tensor-parallel rank trains its own softmax offsets."""
    for gradient, weight in spawn(cut_worker, 4, backend="nccl"):
        assert gradient < 1e-3 and weight < 0.5


def _on_gpu(rank: int, world_size: int, worker: str, *args):
    test_tagc.DEVICE = f"cuda:{torch.cuda.current_device()}"  # which ranks may share
    return getattr(test_tagc, worker)(rank, world_size, *args)


@needs(4)
@pytest.mark.parametrize(("world_size", "node_size"), [(2, None), (3, None), (4, 2)])
def test_tagc_loses_nothing(world_size: int, node_size: int | None) -> None:
    """The sum that arrived and the values that are remembered make up the gradients."""
    spawn(_on_gpu, world_size, "sum_worker", node_size, backend="nccl")


@needs(2)
def test_tagc_bits_that_travel() -> None:
    """16 / 3.85 + 1 bits a value, and the ledger counts them."""
    for sizes in spawn(_on_gpu, 2, "bytes_worker", backend="nccl"):
        assert 5.0 < 8 * sizes["wires"] / sizes["values"] < 5.6


@needs(2)
@pytest.mark.parametrize("wire", ["sketch", "packed"])
def test_tagc_is_not_poisoned(wire: str) -> None:
    """An infinity is in the sum, and not in the memory."""
    spawn(_on_gpu, 2, "_non_finite_worker", True, wire, backend="nccl")


@needs(4)
@pytest.mark.parametrize("name", test_tagc.TRAININGS)
def test_tagc_learns_and_weights_agree(name: str) -> None:
    """Sketches and packed values, with the distributed optimizer and overlap, and plain DDP."""
    for losses in spawn(_on_gpu, 4, "training_worker", name, 50, backend="nccl"):
        assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def _fsdp2_on_gpu(rank: int, world_size: int, worker: Callable) -> None:
    test_fsdp2.DEVICE = "cuda"
    worker(rank, world_size)


@needs(2)
@pytest.mark.parametrize(
    "worker",
    [
        test_fsdp2.lossless_worker,
        test_fsdp2.int8_worker,
        test_fsdp2.two_models_worker,
        test_fsdp2.overflow_worker,
        test_fsdp2.unnoticed_worker,
        test_fsdp2.unannounced_worker,
        test_fsdp2.parts_worker,
    ],
)
def test_fsdp2_on_gpus(worker: Callable) -> None:
    """Losses of lossless gathers are equal to the last bit, int8's near; a shard may not fit.

    FSDP2 has streams of its own, and prefetches.
    """
    spawn(_fsdp2_on_gpu, 2, worker, backend="nccl")


@needs(4)
@pytest.mark.parametrize(
    "worker",
    [
        test_fsdp2.replicas_worker,
        test_fsdp2.divisor_worker,
        test_fsdp2.stages_worker,
        test_fsdp2.hook_worker,
    ],
)
def test_fsdp2_with_replicas(worker: Callable) -> None:
    """HSDP, NCCL's sums that multiply before they add, two stages, a hook of the user's."""
    spawn(_fsdp2_on_gpu, 4, worker, backend="nccl")


def _copies_on_gpu(rank: int, world_size: int, gather: str, reduce: str) -> tuple:
    test_fsdp2.DEVICE = "cuda"
    return test_fsdp2.copies_worker(rank, world_size, gather, reduce, {"data": 2, "tensor": 2})


@needs(4)
@pytest.mark.parametrize("name", ["int8", "sdp4bit"])
def test_fsdp2_beside_tensor_parallelism(name: str) -> None:
    """Norms and biases that tensor ranks hold alike keep their bits."""
    results = spawn(_copies_on_gpu, 4, *test_fsdp2.COPIES[name], backend="nccl")
    assert results[0] == results[1] and results[2] == results[3]
