"""The compressed collectives at world sizes 2, 3 and 4, over gloo."""

import datetime

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import (
    CommSite,
    Ledger,
    Policy,
    Rule,
    Run,
    TorchTransport,
    Transports,
)
from megatron.compression.communication.collectives import (
    all_gather,
    all_reduce,
    fp32_all_reduce,
    reduce_scatter,
)
from taco_kernels.symmetric_memory.group import timeout_of
from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import device_of

SHAPES = [(0,), (1,), (7, 5), (128,), (3, 2, 128), (130, 33)]
# Relative L2 bound of one encode of Gaussian values, by format.
ONE_HOP = {"fp8-e4m3": 0.028, "fp8-e5m2": 0.056, "int8": 0.008, "int4": 0.14}


def _rank_tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What rank ``rank`` brings, on the calling rank's device."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    return torch.randn(shape, generator=generator).to(device_of(dist.get_rank()), dtype)


def _relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    norm = exact.double().norm()
    return (
        float((value.double() - exact.double()).norm() / norm)
        if norm
        else float(value.double().norm())
    )


def collectives_worker(rank: int, world_size: int) -> dict:
    """Check everything that a rank can see alone; return what must agree between the ranks."""
    group = dist.group.WORLD
    outputs = {}
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            inputs = [_rank_tensor(r, shape, dtype) for r in range(world_size)]
            exact = torch.stack([x.double() for x in inputs]).sum(0)
            x = inputs[rank]
            before = x.clone()

            exact_sum = all_reduce(x, parse_codec("identity"), TorchTransport(group)).wait()
            in_order = sum((other.float() for other in inputs[1:]), inputs[0].float())
            assert torch.equal(exact_sum, in_order.to(dtype)), (shape, dtype)
            # Without a codec: the addends travel in 16 bits, their fp32 sum is rounded once.
            rounded_once = fp32_all_reduce(x, group).wait()
            assert torch.equal(rounded_once, in_order.to(dtype)), (shape, dtype)

            for format, bound in ONE_HOP.items():
                codec = parse_codec(f"taco:format={format}")
                result = all_reduce(x, codec, TorchTransport(group)).wait()
                into = torch.full_like(x, 7.0)
                all_reduce(x, codec, TorchTransport(group), out=into).wait()
                assert torch.equal(result, into)
                assert result.shape == x.shape and result.dtype == dtype
                # One or two independent errors, and bf16's own rounding; small tensors fluctuate.
                hops = 1 if world_size == 2 else 2
                limit = hops**0.5 * bound + 0.004 if x.numel() > 500 else 3 * bound + 0.01
                assert _relative_error(result, exact) <= limit, (shape, dtype, format)
                outputs[f"{shape} {dtype} {format}"] = result.float().cpu().numpy().tobytes()
            assert torch.equal(x, before), "the input must be left as it is"
    _check_scatter_and_gather(rank, world_size, group)
    _check_bytes(world_size, group)
    _check_several_communicators(rank, world_size, group)
    slow = dist.new_group(range(world_size), timeout=datetime.timedelta(minutes=7))
    assert timeout_of(slow) == 420.0, "what torch waits for, the kernels wait for"
    return outputs


def _check_scatter_and_gather(rank: int, world_size: int, group) -> None:
    codec = parse_codec("taco")
    for rows, columns in ((2, 64), (1, 5), (4, 96)):  # with and without padding inside a shard
        inputs = [
            _rank_tensor(r, (world_size * rows, columns), torch.float32) for r in range(world_size)
        ]
        exact = torch.stack([x.double() for x in inputs]).sum(0)[rank * rows : (rank + 1) * rows]
        shard = reduce_scatter(inputs[rank], codec, TorchTransport(group)).wait()
        assert shard.shape == (rows, columns)
        assert _relative_error(shard, exact) < 0.05
        own = inputs[rank][:rows]
        gathered = all_gather(own, codec, TorchTransport(group)).wait()
        expected = torch.cat(
            [codec.decode(codec.encode(x[None, :rows]), own.shape, own.dtype)[0] for x in inputs]
        )
        assert torch.equal(gathered, expected), (
            "every slice, the own one too, is what its wire decodes to"
        )
        into = torch.empty_like(shard)
        assert (
            reduce_scatter(inputs[rank], codec, TorchTransport(group), out=into).wait() is not None
        )
        assert torch.equal(into, shard)
    with pytest.raises(ValueError, match="must divide"):
        reduce_scatter(torch.ones(world_size + 1, 2), codec, TorchTransport(group))


def _check_bytes(world_size: int, group) -> None:
    """What the transport reports: pieces of whole groups, 136 bytes each, padded to 16 bytes; between two
    ranks all of it in one exchange, unless there are two codecs."""
    sends: list[tuple[str, int]] = []
    transport = TorchTransport(group, lambda operation, sent: sends.append((operation, sent)))
    all_reduce(
        torch.ones(1000, device=device_of(group.rank())), parse_codec("taco"), transport
    ).wait()
    groups = -(-1000 // (128 * world_size))
    piece = -(-groups * 136 // 16) * 16
    in_two = [("all_to_all", (world_size - 1) * piece), ("all_gather", (world_size - 1) * piece)]
    assert sends == ([("all_gather", 8 * 136)] if world_size == 2 else in_two)
    sends.clear()
    all_reduce(
        torch.ones(1000, device=device_of(group.rank())), parse_codec("int8/int4"), transport
    ).wait()
    assert [operation for operation, _ in sends] == ["all_to_all", "all_gather"]


def _check_several_communicators(rank: int, world_size: int, group) -> None:
    """Payloads shared between communicators arrive as they would on one, and count the same."""
    transports = Transports("collective", communicators=3)
    (line,) = transports.prepare([group])
    assert "3 communicators" in line and transports.prepare([group]) == []
    sends: list[tuple[str, int]] = []
    shared = transports.transport(group, lambda operation, sent: sends.append((operation, sent)))
    plain_sends: list[tuple[str, int]] = []
    plain = TorchTransport(group, lambda operation, sent: plain_sends.append((operation, sent)))
    codec = parse_codec("taco:format=int6")
    x = _rank_tensor(rank, (world_size * 4, 100), torch.float32)
    for operation in (all_reduce, reduce_scatter, all_gather):
        expected = operation(x, codec, plain).wait()
        assert torch.equal(operation(x, codec, shared).wait(), expected)
    assert sends == plain_sends


EMPTY = [(0,), (0, 4), (6, 0)]


def empty_messages_worker(rank: int, world_size: int, spec: str | None) -> dict[str, tuple]:
    """Shapes of the results of messages without values, by operation and shape."""
    ledger = Ledger()
    rules = {} if spec is None else {"tp.forward": Rule(parse_codec(spec))}
    site = CommSite("layer", dist.group.WORLD, Run(Policy(rules, ledger), ledger))
    shapes = {}
    for shape in EMPTY:
        x = torch.zeros(shape, device=device_of(rank))
        for operation in ("all_reduce", "reduce_scatter", "all_gather"):
            result = site.message("tp.forward", operation, 0).start(x).wait()
            shapes[f"{operation} {shape}"] = tuple(result.shape)
        gather = site.pair("tp.forward", None, 0).encoded_gather()
        result = gather.gather(gather.encode(x), x.shape, x.dtype).wait()
        shapes[f"encoded gather {shape}"] = tuple(result.shape)
    return shapes


@pytest.mark.parametrize("spec", [None, "int8", "identity", "lossless", "taco"])
def test_messages_without_values(spec: str | None) -> None:
    """They have the shapes that others would have, by every codec and without one."""
    for shapes in spawn(empty_messages_worker, 2, spec):
        for first, *rest in EMPTY:
            assert shapes[f"all_reduce {(first, *rest)}"] == (first, *rest)
            assert shapes[f"reduce_scatter {(first, *rest)}"] == (first // 2, *rest)
            assert shapes[f"all_gather {(first, *rest)}"] == (2 * first, *rest)
            assert shapes[f"encoded gather {(first, *rest)}"] == (2 * first, *rest)


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives(world_size: int) -> None:
    """Sums are right within the codec's bound, and all ranks end with the same bits."""
    by_rank = spawn(collectives_worker, world_size)
    assert len(by_rank[0]) == 2 * len(SHAPES) * len(ONE_HOP)
    for other in by_rank[1:]:
        assert other == by_rank[0]


def groups_worker(rank: int, world_size: int) -> None:
    """Ranks in different numbers of groups: one pair, a pair and a lone rank without wishes."""
    for _ in range(rank):  # rank r is in r groups of its own, which the others do not know of
        dist.new_group([rank], use_local_synchronization=True)
    pairs = {0: [0, 2], 2: [0, 2]}
    group = dist.new_group([0, 2])
    transports = Transports("collective", communicators=3)
    lines = transports.prepare([group] if rank in pairs else [])
    assert len(lines) == (rank in pairs)
    if rank not in pairs:
        return
    transport = transports.transport(group)
    assert len(set(transport.groups)) == 3 and transport.world_size == 2
    x = _rank_tensor(rank, (8, 128), torch.float32)
    result = all_reduce(x, parse_codec("taco"), transport).wait()
    assert torch.equal(result, all_reduce(x, parse_codec("taco"), TorchTransport(group)).wait())


@pytest.mark.skipif(
    torch.__version__ >= (2, 15), reason="torch's own new_group waits forever there, since 2.15"
)
def test_groups_are_made_where_ranks_are_in_different_numbers_of_them() -> None:
    """Further communicators of two ranks, one of them in two groups that the other does not know of."""
    spawn(groups_worker, 3)
