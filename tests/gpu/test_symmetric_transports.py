"""The transport over symmetric memory, one process a GPU."""

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import (
    TorchTransport,
    Transports,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from megatron.compression.communication.transport import SymmetricTransport
from tests.distributed.spawn import spawn


def needs(devices: int):
    """Skip where there are fewer devices."""
    return pytest.mark.skipif(torch.cuda.device_count() < devices, reason=f"needs {devices} CUDA devices")


WORLD_SIZES = [pytest.param(2, marks=needs(2)), pytest.param(4, marks=needs(4))]


def transports_worker(rank: int, world_size: int) -> None:
    """Every transport gives the same bits, and the symmetric one counts what it stores."""
    group = dist.group.WORLD
    transports = Transports("symmetric")
    (line,) = transports.prepare([group])
    assert "symmetric memory" in line
    assert transports.prepare([group]) == []
    sends: list[tuple[str, int]] = []
    symmetric = transports.transport(group, lambda operation, sent: sends.append((operation, sent)))
    assert isinstance(symmetric, SymmetricTransport)
    plain = TorchTransport(group)
    torch.manual_seed(rank)
    for spec in ("taco:format=int8", "int4", "int5/int6"):
        codec = parse_codec(spec)
        for shape in ((world_size, 40), (world_size * 128, 1000), (4096, 1024)):
            x = torch.randn(shape, device="cuda").bfloat16()
            for operation in (all_reduce, reduce_scatter, all_gather):
                expected = operation(x, codec, plain).wait()
                assert torch.equal(operation(x, codec, symmetric).wait(), expected), (spec, operation, shape)
    sends.clear()
    x = torch.ones(world_size * 2**20, device="cuda").bfloat16()
    all_reduce(x, parse_codec("taco:format=int8"), symmetric).wait()
    half = (world_size - 1) * 2**20 // 128 * 132  # whole tiles, an fp32 step a group
    assert sends == [("all_to_all", half), ("all_gather", half)]
    for spec in ("identity", "sdp4bit"):  # over torch.distributed
        assert abs(all_reduce(x, parse_codec(spec), symmetric).wait()[0] - world_size) < 0.1


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_transports_agree(world_size: int) -> None:
    """Symmetric memory and torch.distributed, codecs with and without a kernel for the collective."""
    spawn(transports_worker, world_size, backend="nccl")
