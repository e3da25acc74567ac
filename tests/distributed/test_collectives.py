"""The compressed collectives at world sizes 2, 3 and 4, over gloo."""

import datetime
import traceback
from collections.abc import Iterator

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
from taco_kernels.common import ceil_div
from taco_kernels.symmetric_memory.group import timeout_of
from tests.distributed.spawn import spawn, spawned
from tests.distributed.tiny_gpt import device_of

SHAPES = [(0,), (1,), (7, 5), (128,), (3, 2, 128), (130, 33)]
SLICES = [(2, 64), (1, 5), (4, 96)]
"""Rows and columns of a rank's slice, with and without padding inside it."""
ONE_HOP = {"fp8-e4m3": 0.028, "fp8-e5m2": 0.056, "int8": 0.008, "int4": 0.14}
"""Relative L2 bound of one encode of Gaussian values, by format."""


def _rank_tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of rank ``rank``, on the calling rank's device."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    return torch.randn(shape, generator=generator).to(device_of(dist.get_rank()), dtype)


def _relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    norm = exact.double().norm()
    if not norm:
        return float(value.double().norm())
    return float((value.double() - exact.double()).norm() / norm)


def _cases(world_size: int) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield this rank's tensor and every rank's, of every shape and dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            inputs = [_rank_tensor(rank, shape, dtype) for rank in range(world_size)]
            yield inputs[dist.get_rank()], inputs


def check_exact_sums(world_size: int) -> None:
    """Check that exact sums are those in fp32 in the order of the ranks: identity, and no codec."""
    group = dist.group.WORLD
    for x, inputs in _cases(world_size):
        in_order = sum((addend.float() for addend in inputs[1:]), inputs[0].float()).to(x.dtype)
        exact_sum = all_reduce(x, parse_codec("identity"), TorchTransport(group)).wait()
        assert torch.equal(exact_sum, in_order), (x.shape, x.dtype)
        # Without a codec: the addends travel in 16 bits, their fp32 sum is rounded once.
        rounded_once = fp32_all_reduce(x, group).wait()
        assert torch.equal(rounded_once, in_order), (x.shape, x.dtype)


def check_lossy_sums(world_size: int) -> dict[str, bytes]:
    """Sums are right within the codec's bound, and their inputs stay; the bits of all of them."""
    transport = TorchTransport(dist.group.WORLD)
    bits = {}
    for x, inputs in _cases(world_size):
        exact = torch.stack([addend.double() for addend in inputs]).sum(0)
        before = x.clone()
        for format, bound in ONE_HOP.items():
            result = all_reduce(x, parse_codec(f"taco:format={format}"), transport).wait()
            assert result.shape == x.shape and result.dtype == x.dtype
            # One or two independent errors, and bf16's own rounding; small tensors fluctuate.
            hops = 1 if world_size == 2 else 2
            limit = hops**0.5 * bound + 0.004 if x.numel() > 500 else 3 * bound + 0.01
            assert _relative_error(result, exact) <= limit, (x.shape, x.dtype, format)
            bits[f"{x.shape} {x.dtype} {format}"] = result.float().cpu().numpy().tobytes()
        assert torch.equal(x, before), "the input must be left as it is"
    return bits


def check_given_buffers(world_size: int) -> None:
    """A result in a buffer of the caller's has the bits of a new one."""
    transport = TorchTransport(dist.group.WORLD)
    codec = parse_codec("taco")
    for x, _ in _cases(world_size):
        buffer = torch.full_like(x, 7.0)
        all_reduce(x, codec, transport, out=buffer).wait()
        assert torch.equal(buffer, all_reduce(x, codec, transport).wait())
    x = _rank_tensor(dist.get_rank(), (world_size * 4, 96), torch.float32)
    shard = reduce_scatter(x, codec, transport).wait()
    buffer = torch.empty_like(shard)
    reduce_scatter(x, codec, transport, out=buffer).wait()
    assert torch.equal(buffer, shard)


def check_scatter(world_size: int) -> None:
    """Check each rank's slice of the sum, and that a first dimension has to divide."""
    rank = dist.get_rank()
    transport = TorchTransport(dist.group.WORLD)
    codec = parse_codec("taco")
    for rows, columns in SLICES:
        inputs = [
            _rank_tensor(sender, (world_size * rows, columns), torch.float32)
            for sender in range(world_size)
        ]
        exact = torch.stack([x.double() for x in inputs]).sum(0)[rank * rows : (rank + 1) * rows]
        shard = reduce_scatter(inputs[rank], codec, transport).wait()
        assert shard.shape == (rows, columns)
        assert _relative_error(shard, exact) < 0.05
    with pytest.raises(ValueError, match="must divide"):
        reduce_scatter(torch.ones(world_size + 1, 2), codec, transport)


def check_gather(world_size: int) -> None:
    """Every slice, this rank's too, is what its wire decodes to."""
    transport = TorchTransport(dist.group.WORLD)
    codec = parse_codec("taco")
    for rows, columns in SLICES:
        inputs = [_rank_tensor(rank, (rows, columns), torch.float32) for rank in range(world_size)]
        gathered = all_gather(inputs[dist.get_rank()], codec, transport).wait()
        decoded = [codec.decode(codec.encode(x[None]), x.shape, x.dtype)[0] for x in inputs]
        assert torch.equal(gathered, torch.cat(decoded))


def check_bytes(world_size: int) -> None:
    """The transport reports pieces of whole groups, 136 bytes each, padded to 16 bytes; between two
    ranks all of it in one exchange, unless there are two codecs."""
    sends: list[tuple[str, int]] = []
    transport = TorchTransport(
        dist.group.WORLD, lambda operation, sent: sends.append((operation, sent))
    )
    x = torch.ones(1000, device=device_of(dist.get_rank()))
    all_reduce(x, parse_codec("taco:outliers=off"), transport).wait()
    if world_size == 2:
        assert sends == [("all_gather", 8 * 136)]
    else:
        groups = ceil_div(1000, 128 * world_size)
        sent = (world_size - 1) * ceil_div(groups * 136, 16) * 16
        assert sends == [("all_to_all", sent), ("all_gather", sent)]
    sends.clear()
    all_reduce(x, parse_codec("int8/int4"), transport).wait()
    assert [operation for operation, _ in sends] == ["all_to_all", "all_gather"]


def check_several_communicators(world_size: int) -> None:
    """Payloads shared between communicators arrive as they would on one, and count the same."""
    group = dist.group.WORLD
    transports = Transports("collective", communicators=3)
    (line,) = transports.prepare([group])
    assert "3 communicators" in line and transports.prepare([group]) == []
    sends: list[tuple[str, int]] = []
    shared = transports.transport(group, lambda operation, sent: sends.append((operation, sent)))
    sends_of_one: list[tuple[str, int]] = []
    single = TorchTransport(group, lambda operation, sent: sends_of_one.append((operation, sent)))
    codec = parse_codec("taco:format=int6")
    x = _rank_tensor(dist.get_rank(), (world_size * 4, 100), torch.float32)
    for operation in (all_reduce, reduce_scatter, all_gather):
        expected = operation(x, codec, single).wait()
        assert torch.equal(operation(x, codec, shared).wait(), expected)
    assert sends == sends_of_one


def check_timeout(world_size: int) -> None:
    """Check that kernels over symmetric memory wait as long as torch does."""
    slow = dist.new_group(range(world_size), timeout=datetime.timedelta(minutes=7))
    assert timeout_of(slow) == 420.0


def check_messages_without_values(world_size: int) -> None:
    """They have the shapes that others would have, by every codec and without one."""
    for spec in (None, "int8", "identity", "lossless", "taco"):
        ledger = Ledger()
        rules = {} if spec is None else {"tp.forward": Rule(parse_codec(spec))}
        site = CommSite("layer", dist.group.WORLD, Run(Policy(rules, ledger), ledger))
        for first, *rest in ((0,), (0, 4), (6 * world_size, 0)):
            x = torch.zeros((first, *rest), device=device_of(dist.get_rank()))
            expected = {
                "all_reduce": (first, *rest),
                "reduce_scatter": (first // world_size, *rest),
                "all_gather": (first * world_size, *rest),
            }
            for operation, shape in expected.items():
                result = site.message("tp.forward", operation, 0).start(x).wait()
                assert result.shape == shape, (spec, operation)
            gather = site.pair("tp.forward", None, 0).encoded_gather()
            result = gather.gather(gather.encode(x), x.shape, x.dtype).wait()
            assert result.shape == expected["all_gather"], spec


CHECKS = {
    "exact sums": check_exact_sums,
    "lossy sums": check_lossy_sums,
    "given buffers": check_given_buffers,
    "scatter": check_scatter,
    "gather": check_gather,
    "bytes": check_bytes,
    "several communicators": check_several_communicators,
    "timeout": check_timeout,
    "messages without values": check_messages_without_values,
}


def collectives_worker(rank: int, world_size: int) -> dict:
    """Return the result of each check, or the trace of its failure."""
    results = {}
    for name, check in CHECKS.items():
        try:
            results[name] = check(world_size)
        except Exception:
            results[name] = traceback.format_exc()
    return results


two_ranks = spawned(collectives_worker, 2)
three_ranks = spawned(collectives_worker, 3)


@pytest.mark.parametrize("ranks", ["two_ranks", "three_ranks"])
@pytest.mark.parametrize("name", [name for name in CHECKS if name != "lossy sums"])
def test_check_holds_on_every_rank(ranks: str, name: str, request: pytest.FixtureRequest) -> None:
    for results in request.getfixturevalue(ranks):
        assert results[name] is None, results[name]


@pytest.mark.parametrize("ranks", ["two_ranks", "three_ranks"])
def test_all_ranks_end_with_the_same_bits(ranks: str, request: pytest.FixtureRequest) -> None:
    """Lossy sums have equal bits, which are right within the codec's bound."""
    first, *rest = (results["lossy sums"] for results in request.getfixturevalue(ranks))
    assert isinstance(first, dict), first
    assert len(first) == 2 * len(SHAPES) * len(ONE_HOP)
    for bits in rest:
        assert bits == first


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
    torch.__version__ >= (2, 14), reason="torch's own new_group waits forever there, since 2.14"
)
def test_groups_are_made_where_ranks_are_in_different_numbers_of_them() -> None:
    """Two ranks make further communicators; one of them has two groups that the other lacks."""
    spawn(groups_worker, 3)
