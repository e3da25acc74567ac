"""The transports over symmetric memory and copies, one process a GPU."""

import random as python_random

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import build_codec
from megatron.compression.collectives import (
    SymmetricTransport,
    TorchTransport,
    Transports,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from tests.distributed.spawn import spawn


def needs(devices: int):
    """Skip where there are fewer devices."""
    return pytest.mark.skipif(torch.cuda.device_count() < devices, reason=f"needs {devices} CUDA devices")


WORLD_SIZES = [pytest.param(2, marks=needs(2)), pytest.param(4, marks=needs(4))]


def transports_worker(rank: int, world_size: int, choice: str) -> None:
    """Every transport gives the same bits, and the symmetric one counts what it stores."""
    group = dist.group.WORLD
    transports = Transports(choice)
    (line,) = transports.prepare([group])
    assert "symmetric memory" in line
    assert transports.prepare([group]) == []
    sends: list[tuple[str, int]] = []
    symmetric = transports.transport(group, lambda operation, sent: sends.append((operation, sent)))
    assert isinstance(symmetric, SymmetricTransport)
    plain = TorchTransport(group)
    torch.manual_seed(rank)
    for settings in ({"format": "int8"}, {"format": "int4", "rounding": "dither"}):
        codec = build_codec("taco", **settings)
        for shape in ((world_size, 40), (world_size * 128, 1000), (4096, 1024)):
            x = torch.randn(shape, device="cuda").bfloat16()
            for operation in (all_reduce, reduce_scatter, all_gather):
                expected = operation(x, codec, plain, key=11)
                assert torch.equal(operation(x, codec, symmetric, key=11), expected), (operation, shape)
                handle = operation(x, codec, symmetric, async_op=True, key=11)
                assert torch.equal(handle.wait(), expected), (operation, shape)
    sends.clear()
    x = torch.ones(world_size * 2**20, device="cuda").bfloat16()
    all_reduce(x, build_codec("taco", format="int8"), symmetric)
    half = (world_size - 1) * 2**20 // 128 * 132  # whole tiles, an fp32 step a group
    assert sends == [("all_to_all", half), ("all_gather", half)]
    assert all_reduce(x, build_codec("identity"), symmetric)[0] == world_size  # over torch.distributed


@pytest.mark.multigpu
@pytest.mark.parametrize("choice", ["symmetric", "copies"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_transports_agree(world_size: int, choice: str) -> None:
    spawn(transports_worker, world_size, choice, backend="nccl")


def copies_worker(rank: int, world_size: int) -> None:
    """Collectives of random sizes behind GEMMs, several under way, fused ones between them, all compared."""
    group = dist.group.WORLD
    transports = Transports("copies")
    transports.prepare([group])
    behind, codec = transports.transport(group), build_codec("taco", format="int8")
    draw = python_random.Random(0)  # the same on every rank
    torch.manual_seed(rank)
    matrix = torch.randn(4096, 4096, device="cuda").bfloat16()
    base = torch.randn(3 * 2**20, device="cuda").bfloat16()
    cases = []
    for _ in range(20):
        numel, offset = 16 * world_size * int(2 ** draw.uniform(0, 15)), 16 * draw.randrange(2**15)
        x = base[offset : offset + numel].view(world_size, -1)
        operation = draw.choice((all_reduce, reduce_scatter, all_gather))
        cases.append((operation, x, operation(x, codec, TorchTransport(group))))
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    under_way = []
    for _ in range(1000):
        operation, x, expected = draw.choice(cases)
        if draw.random() < 0.2:
            wrong += (operation(x, codec, behind) != expected).any()
        else:
            under_way.append((operation(x, codec, behind, async_op=True), expected))
            torch.matmul(matrix, matrix)
        while len(under_way) > draw.randrange(4):
            handle, expected = under_way.pop(0)
            wrong += (handle.wait() != expected).any()
    assert int(wrong) == 0
    behind.symmetric.lanes[0].check()


@pytest.mark.multigpu
@pytest.mark.parametrize("connections", ["1", "32"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_copies_behind_gemms(world_size: int, connections: str, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    spawn(copies_worker, world_size, backend="nccl")
