"""The tests of SDP4Bit, TAGC and FSDP2 again, on CUDA devices over NCCL."""

from collections.abc import Callable

import pytest
import torch

from tests.distributed import test_fsdp2, test_outer_hop, test_tagc
from tests.distributed.spawn import spawn
from tests.distributed.test_data_parallel_hooks import identity_worker
from tests.distributed.test_data_parallel_nodes import four_ranks_worker
from tests.distributed.test_sdp4bit import check_bytes, replica_worker
from tests.gpu.devices import needs

pytestmark = pytest.mark.multigpu


@needs(2)
def test_an_exact_codec_changes_nothing() -> None:
    """The hooks alone leave two ranks' weights as they are, to the bit."""
    for results in spawn(identity_worker, 2, backend="nccl"):
        for name, (plain, hooked, _) in results.items():
            assert plain == hooked, name


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
    """Two instances of two ranks: an exact codec changes no bit, replicas are alike; bytes of 8 bits."""
    for results in spawn(test_outer_hop.instances_worker, 4, backend="nccl"):
        (now, before), differs, _ = results["none:outer=int8"]
        assert now <= 0.26 * before and differs < 1e-3


@needs(4)
def test_two_nodes() -> None:
    """Two nodes of two ranks: training, bytes, state."""
    for results in spawn(four_ranks_worker, 4, backend="nccl"):
        check_bytes(results)


def _on_gpu(rank: int, world_size: int, worker: str, *args):
    test_tagc.DEVICE = f"cuda:{torch.cuda.current_device()}"  # which ranks may share
    return getattr(test_tagc, worker)(rank, world_size, *args)


@needs(4)
@pytest.mark.parametrize(("world_size", "node_size"), [(2, None), (3, None), (4, 2)])
def test_tagc_exchanges(world_size: int, node_size: int | None) -> None:
    for sizes in spawn(_on_gpu, world_size, "exchange_worker", node_size, backend="nccl"):
        assert not sizes or 5.0 < 8 * sizes["wires"] / sizes["values"] < 5.6


@needs(4)
def test_tagc_learns_and_weights_agree() -> None:
    """Sketches and packed values, with the distributed optimizer and overlap, and plain DDP."""
    for everything in spawn(_on_gpu, 4, "training_worker", 50, backend="nccl"):
        for losses in everything:
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
    """Its own streams, prefetching, kernels: losses of lossless gathers equal to the last bit, int8 near; a
    shard that does not fit."""
    spawn(_fsdp2_on_gpu, 2, worker, backend="nccl")


@needs(4)
def test_fsdp2_with_replicas() -> None:
    """HSDP, NCCL's sums that multiply before they add, and two pipeline stages."""
    spawn(_fsdp2_on_gpu, 4, test_fsdp2.replicas_worker, backend="nccl")
