"""The protocol of exchanges by copies, with threads as ranks: everything but the devices' streams."""

import random
import threading
import time

import pytest
import torch

from taco_kernels.symmetric_memory import copies

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
