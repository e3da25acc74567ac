"""Exchanges through pinned host memory by copy engines, as torch.distributed has them."""

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication.all_reduce import all_reduce
from megatron.compression.communication.host_memory import CopyEngines
from megatron.compression.communication.host_transport import HostTransport
from megatron.compression.communication.topology import find_topology
from megatron.compression.communication.transports import Transports
from tests.distributed import test_tagc
from tests.distributed.spawn import spawn
from tests.distributed.test_host_memory import check_the_same, exchanges_worker, trained
from tests.distributed.tiny_ddp import start
from tests.gpu.devices import DEVICES

WORLD_SIZES = [
    pytest.param(n, marks=pytest.mark.skipif(n > DEVICES, reason=f"needs {n} CUDA devices")) for n in (2, 4)
]

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchanges(world_size: int) -> None:
    """Uneven, empty, larger than the rings, and several under way."""
    spawn(exchanges_worker, world_size, CopyEngines, "cuda", backend="nccl")


def sums_worker(rank: int, world_size: int) -> list[bool]:
    transports, same = Transports("host"), []
    (line,) = transports.prepare([dist.group.WORLD])
    assert "through host memory" in line
    by_copies = transports.transport(dist.group.WORLD)
    assert isinstance(by_copies, HostTransport)
    by_nccl = Transports("collective").transport(dist.group.WORLD)
    generator = torch.Generator("cuda").manual_seed(rank)
    weight = torch.randn(2048, 2048, device="cuda")
    for number in range(40):
        x = torch.randn(1 + 99991 * number, device="cuda", generator=generator).bfloat16()
        codec = parse_codec(("int6", "taco", "int6:outliers=on", "lossless")[number % 4])
        work = all_reduce(x, codec, by_copies)
        busy = weight @ weight  # what runs meanwhile
        work.advance()
        same.append(torch.equal(work.wait(), all_reduce(x, codec, by_nccl).wait()))
        del busy
    return same


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices, not one shared")
def test_sums_have_the_same_bits() -> None:
    """Whatever carries the payloads."""
    for same in spawn(sums_worker, 2, backend="nccl"):
        assert all(same)


def data_parallel_worker(rank: int, world_size: int) -> None:
    test_tagc.DEVICE = f"cuda:{torch.cuda.current_device()}"
    for node_size in (None, 2) if world_size > 2 else (None,):
        by_copies, by_nccl = (
            find_topology(dist.group.WORLD, node_size, Transports(choice))
            for choice in ("host", "collective")
        )
        assert "through host memory" in by_copies.describe()
        for _ in range(3):  # the rings go round
            check_the_same(by_copies, by_nccl)
    start(rank)
    assert trained(rank, "host") == trained(rank, "collective")


@pytest.mark.parametrize("world_size", [2, 4])
def test_data_parallel_payloads_have_the_same_bits(world_size: int) -> None:
    """Gradients by SDP4Bit and others, several buckets under way, weights, and TAGC; over one node, and over
    two of two devices; and a training, whose hooks run in autograd's thread."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices, none of them shared")
    spawn(data_parallel_worker, world_size, backend="nccl")
