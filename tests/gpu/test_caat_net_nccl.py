"""CAAT-Net's distributed tests again, on CUDA devices over NCCL."""

import pytest
import torch
import torch.distributed as dist

from taco_kernels.taco import CodecConfig
from tests.distributed.caat_net_setup import BATCH
from tests.distributed.spawn import spawn
from tests.distributed.test_caat_net import (
    INT8,
    RECOMPUTE,
    check_against_emulation,
    check_with_codec,
    gradient_worker,
    gradients_of,
)
from tests.distributed.test_caat_net_traffic import check_traffic, sent_in, traffic_worker, train_twice
from tests.distributed.tiny_gpt import HIDDEN, LAYERS, SEQUENCE, start_model_parallel
from tests.gpu.devices import DEVICES

WORLD_SIZES = [
    pytest.param(n, marks=pytest.mark.skipif(n > DEVICES, reason=f"needs {n} CUDA devices")) for n in (2, 4)
]

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradients(world_size: int) -> None:
    """fp64 gradients of GPUs against autograd on the CPU."""
    check_against_emulation(spawn(gradient_worker, world_size, backend="nccl"), 0.5)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_traffic_and_replicas(world_size: int) -> None:
    """The hand count of the bytes; ranks agree on what they share, bit for bit."""
    check_traffic(spawn(traffic_worker, world_size, backend="nccl"))


MANY = 256  # sequences: a shared message takes 512 KiB, several tiles


def auto_worker(rank: int, world_size: int) -> dict:
    """Gradients in fp32, then training in bf16 on few sequences and on many, over what ``auto`` takes."""
    from taco_kernels.symmetric_memory import unavailable_reason

    start_model_parallel(world_size)
    return {
        "symmetric": unavailable_reason(dist.group.WORLD) is None,
        "gradients": gradients_of(rank, world_size, 0.5, RECOMPUTE, codec=INT8),
        "few": train_twice(rank, world_size, 0.5, INT8),
        "many": train_twice(rank, world_size, 0.5, INT8, size=MANY),
    }


def _stored(values: int, world_size: int, symmetric: bool) -> int:
    """Bytes that one rank sends in an all-reduce of this many bf16 values."""
    config = CodecConfig("int8", scales="single")
    piece = config.chunk_numel(values, world_size)
    if not symmetric:
        return 2 * (world_size - 1) * config.wire_bytes(piece)
    from taco_kernels.taco.spec import tuning_of

    tile = tuning_of("encode", config).tile  # of groups of 128, on any device
    return 2 * (world_size - 1) * -(-piece // tile) * (tile // 128) * 130


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_auto_transport(world_size: int) -> None:
    """``--compression-transport auto``: gradients to the codec's error, replicas alike, bytes by hand.

    Between devices with peer access that is symmetric memory: a group of 128 values takes 130 bytes, and
    W - 1 pieces are stored in each of two hops, in whole tiles. Elsewhere payloads go to NCCL.
    """
    by_rank = spawn(auto_worker, world_size, backend="nccl")
    check_with_codec([rank["gradients"] for rank in by_rank], 0.5, RECOMPUTE)
    symmetric = by_rank[0]["symmetric"]
    for name, size in (("few", BATCH), ("many", MANY)):
        full = SEQUENCE * size * HIDDEN
        expected = 2 * sum(_stored(n, world_size, symmetric) for n in [full] + 2 * LAYERS * [full // 2])
        first = by_rank[0][name]
        for rank in by_rank:
            result = rank[name]
            for channel in ("tp.forward", "tp.backward"):
                rows = [row for row in result["rows"] if row["traffic"] == channel]
                assert {row["kind"] for row in rows} == {"compressed"}
                assert sent_in(rows, channel) == expected, (name, channel)
            assert result["losses"] == first["losses"] and result["losses"][1] < result["losses"][0]
            for parameter, value in first["replicated"].items():
                assert torch.equal(value, result["replicated"][parameter]), (name, parameter)
            assert torch.equal(first["shared"], result["shared"])
