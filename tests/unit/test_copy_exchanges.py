"""The protocol of exchanges by copies, with threads as ranks: everything but the devices' streams."""

import random
import threading
import time

import pytest
import torch

from megatron.compression.codecs import build_codec
from megatron.compression.collectives import (
    CopyTransport,
    Transports,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from megatron.compression.collectives.choice import TransportError
from taco_kernels import Stream
from taco_kernels.symmetric_memory import copies
from tests.gpu import simulated_ranks as ranks

CALLS = 60


class Group:
    """As much of a process group as exchanges need."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world_size


class Host:
    """Memory and barriers that the ranks' threads share."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.barrier = world_size, threading.Barrier(world_size, timeout=60)
        self.made: list[list[torch.Tensor]] = []
        self._counts = [0] * world_size
        self._lock = threading.Lock()

    def memory(self, rank: int, nbytes: int):
        """The n-th memory of a rank is the n-th of all."""
        host, draw = self, random.Random(rank)
        with self._lock:
            index = self._counts[rank]
            self._counts[rank] += 1
            if index == len(self.made):
                self.made.append(
                    [torch.full((nbytes,), 99, dtype=torch.uint8) for _ in range(self.world_size)]
                )
        assert self.made[index][0].numel() == nbytes, "ranks must agree"

        class Memory:
            parts = self.made[index]

            def barrier(self) -> None:
                host.barrier.wait()
                time.sleep(draw.choice((0, 0, 0.002)))  # ranks drift apart

        return Memory()

    def exchanges(self, rank: int) -> copies.CopyExchanges:
        return copies.CopyExchanges(
            Group(rank, self.world_size), memory=lambda nbytes: self.memory(rank, nbytes)
        )


def on_all_ranks(world_size: int, call) -> list:
    """``call(rank, host)`` in a thread a rank; their results, or the first exception."""
    host, results, errors = Host(world_size), [None] * world_size, []

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank, host)
        except BaseException as error:
            errors.append(error)
            host.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def payload(call: int, source: int, target: int, nbytes: int) -> torch.Tensor:
    return ((torch.arange(nbytes) * 7 + call * 31 + source * 5 + target * 3) % 251).to(torch.uint8)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_byte_arrives_whatever_the_order(world_size: int, monkeypatch) -> None:
    """Sizes that grow and shrink, ranks that run ahead, up to three exchanges not yet waited for."""
    monkeypatch.setattr(copies, "SMALLEST_PLACE", 512)

    def call(rank: int, host: Host) -> int:
        exchanges, draw, open_ones = host.exchanges(rank), random.Random(1), []
        for number in range(CALLS):
            nbytes, gather = 16 * draw.randrange(1, 100), draw.random() < 0.5
            if gather:
                result = exchanges.all_gather(payload(number, rank, 0, nbytes))
                expected = [payload(number, peer, 0, nbytes) for peer in range(world_size)]
            else:
                wires = torch.stack([payload(number, rank, peer, nbytes) for peer in range(world_size)])
                result = exchanges.all_to_all(wires)
                expected = [payload(number, peer, rank, nbytes) for peer in range(world_size)]
            open_ones.append((*result, torch.stack(expected)))
            while len(open_ones) > draw.randrange(4):
                received, exchange, wanted = open_ones.pop(0)
                exchange.wait()
                assert torch.equal(received, wanted), number
        return len(host.made)

    made = on_all_ranks(world_size, call)
    assert set(made) == {made[0]} and 1 < made[0] < 8, "grown, by powers of two"


def test_one_place_would_not_do(monkeypatch) -> None:
    """The test above can fail: without a second place a rank that runs ahead overwrites what others read."""
    monkeypatch.setattr(copies, "PLACES", 1)
    with pytest.raises(AssertionError):
        test_every_byte_arrives_whatever_the_order(4, monkeypatch)


class Unused:
    """A symmetric group none of whose kernels may be asked for."""

    def __init__(self, group: Group) -> None:
        self.group = group


@pytest.mark.parametrize("settings", [{"format": "int8"}, {"format": "int6", "rounding": "dither"}], ids=str)
def test_collectives_over_copies_have_the_bits_of_one_process(settings: dict, monkeypatch) -> None:
    """All-reduce, reduce-scatter and all-gather through CopyTransport, with the bytes it counts."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    codec, world_size, key = build_codec("taco", **settings), 3, 8
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(6, 500, generator=generator) for _ in range(world_size)]
    slices = [x[:2] for x in xs]

    def call(rank: int, host: Host):
        sends: list[tuple[str, int]] = []
        transport = CopyTransport(
            Unused(Group(rank, world_size)),
            host.exchanges(rank),
            lambda name, sent: sends.append((name, sent)),
        )
        return [
            operation(x, codec, transport, async_op=True, key=key).wait()
            for operation, x in (
                (all_reduce, xs[rank]),
                (reduce_scatter, xs[rank]),
                (all_gather, slices[rank]),
            )
        ], sends

    stream = None if codec.config.rounding == "nearest" else Stream(key, 0)
    total = ranks.expected_all_reduce(xs, codec.config, stream)
    shards = ranks.expected_reduce_scatter(xs, codec.config, stream)
    gathered = ranks.expected_all_gather(slices, codec.config, stream)
    piece, shard = codec.config.chunk_numel(3000, world_size), codec.config.chunk_numel(1000)
    for rank, (results, sends) in enumerate(on_all_ranks(world_size, call)):
        for result, expected in zip(results, (total, shards[rank], gathered), strict=True):
            assert torch.equal(result, expected)
        assert [name for name, _ in sends] == ["all_to_all", "all_gather", "all_to_all", "all_gather"]
        wires = [codec.config.wire_bytes(numel) for numel in (piece, piece, shard, shard)]
        assert [sent for _, sent in sends] == [(world_size - 1) * nbytes for nbytes in wires]


@pytest.mark.parametrize("choice", ["symmetric", "copies"])
def test_without_devices_the_flag_is_refused(choice: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TransportError, match=f"--taco-transport {choice} is not possible: no CUDA device"):
        Transports(choice).prepare([Group(0, 2)])
    assert Transports("auto").transport(Group(0, 2)).fuses(build_codec("taco")) is False


def test_memory_that_cannot_be_shared(monkeypatch) -> None:
    """auto goes over torch.distributed and says why; who asked for symmetric memory is told."""
    import taco_kernels.symmetric_memory as symmetric_memory

    def refuse(group):
        raise symmetric_memory.SymmetricMemoryError("rank 1 cannot share its memory: pidfd_getfd: EPERM")

    monkeypatch.setattr(symmetric_memory, "SymmetricGroup", refuse)
    monkeypatch.setattr(Transports, "_why_collective", lambda self, group: None)
    monkeypatch.setattr("megatron.compression.collectives.choice.over_tcp", lambda group: False)
    monkeypatch.setattr("megatron.compression.collectives.choice.new_groups", lambda wanted: [])
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    group, transports = Group(0, 2), Transports("auto")
    assert transports.prepare([group]) == [
        "payloads travel over torch.distributed (rank 1 cannot share its memory: pidfd_getfd: EPERM)"
    ]
    assert transports.transport(group).overlaps
    with pytest.raises(TransportError, match="--taco-transport copies is not possible: rank 1 cannot share"):
        Transports("copies").prepare([group])


@pytest.mark.parametrize("communicators", [0, 1, 2])
def test_communicators_without_use_are_said(communicators: int, monkeypatch) -> None:
    """Symmetric memory needs none."""
    monkeypatch.setattr("taco_kernels.symmetric_memory.SymmetricGroup", lambda group: group)
    monkeypatch.setattr(Transports, "_why_collective", lambda self, group: None)
    monkeypatch.setattr("megatron.compression.collectives.choice.new_groups", lambda wanted: [])
    (line,) = Transports("auto", communicators).prepare([Group(0, 2)])
    assert line.startswith("payloads travel over symmetric memory between 2 ranks")
    assert ("--taco-communicators 2 has nothing to share" in line) == (communicators > 1)
