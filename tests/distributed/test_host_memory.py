"""Exchanges through shared host memory, with threads in place of copy engines: the protocol of rings."""

import ctypes
import queue
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from megatron.compression.communication.host_memory import (
    SLOTS,
    HostMemory,
    HostMemoryError,
    awaited,
    largest,
    steps,
    tells,
)
from megatron.compression.communication.host_transport import HostTransport
from tests.distributed.spawn import spawn


class Threads:
    """Two threads that do what two streams would: in order, each on its own."""

    def __init__(self, base: int, size: int) -> None:
        self._queues = {sends: queue.Queue() for sends in (True, False)}
        for waiting in self._queues.values():
            threading.Thread(target=self._work, args=(waiting,), daemon=True).start()

    @staticmethod
    def _work(waiting: queue.Queue) -> None:
        while True:
            waiting.get()()

    def begin(self) -> None:
        """Nothing is under way on a CPU."""

    def copy(self, sends: bool, host: int, device: int, size: int) -> None:
        to, source = (host, device) if sends else (device, host)
        self._queues[sends].put(lambda: ctypes.memmove(to, source, size))

    def copy_own(self, to: int, source: int, size: int) -> None:
        self.copy(True, to, source, size)

    def await_counter(self, sends: bool, counter: int, value: int) -> None:
        def wait() -> None:
            while (ctypes.c_uint32.from_address(counter).value - value + 2**31) % 2**32 < 2**31:
                time.sleep(1e-4)

        self._queues[sends].put(wait)

    def set_counter(self, sends: bool, counter: int, value: int) -> None:
        def set_to() -> None:
            ctypes.c_uint32.from_address(counter).value = value

        self._queues[sends].put(set_to)

    def end(self, kept: object) -> "Ended":
        return Ended(self._queues, kept)


class Ended:
    """Waits for both threads."""

    def __init__(self, queues: dict, kept: object) -> None:
        self.kept, self.done = kept, [threading.Event() for _ in queues]
        for waiting, done in zip(queues.values(), self.done, strict=True):
            waiting.put(done.set)

    def wait(self) -> None:
        assert all(done.wait(30) for done in self.done)


def exchanges_worker(rank: int, world: int, streams: type = Threads, device: str = "cpu") -> None:
    memory = HostMemory(dist.group.WORLD, streams)
    sent: list[tuple[str, int]] = []
    transport = HostTransport(memory, lambda *what: sent.append(what))
    generator, sizes = torch.Generator().manual_seed(rank), random.Random(0)
    under_way = []
    for number in range(30):
        rows = [[sizes.choice((0, 1, 700, 4000)) for _ in range(world)] for _ in range(world)]
        width = (
            sizes.choice((1, 96, 700)) if number % 10 else largest(2) * (SLOTS + 2) // 4000
        )  # rings go round
        x = torch.randint(0, 255, (sum(rows[rank]), width), dtype=torch.uint8, generator=generator).to(device)
        came = [row[rank] for row in rows]
        expected = x.new_empty((sum(came), width))
        dist.all_to_all_single(expected, x, came, rows[rank])
        under_way.append((*transport.all_to_all_rows(x, rows[rank], came), expected))
        own = torch.randn(sizes.choice((1, 1000, 10**6)), generator=generator).bfloat16().to(device)
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own)
        under_way.append((*transport.all_gather(own), torch.stack(parts)))
        if number % 3 == 2:  # several were under way
            for got, work, wanted in under_way:
                work.wait()
                assert torch.equal(got, wanted)
            under_way.clear()
    assert {name for name, _ in sent} == {"all_to_all", "all_gather"}


@pytest.mark.parametrize("world", [2, 3])
def test_exchanges(world: int) -> None:
    """Uneven, empty, larger than the rings, of several types, and several under way: as torch.distributed."""
    spawn(exchanges_worker, world)


def refusing(base: int, size: int) -> Threads:
    if dist.get_rank() == 1:
        raise HostMemoryError("no such driver")
    return Threads(base, size)


def refused_worker(rank: int, world: int) -> str:
    with pytest.raises(HostMemoryError) as caught:
        HostMemory(dist.group.WORLD, refusing)
    return str(caught.value)


def test_all_ranks_learn_of_a_problem() -> None:
    """Nobody goes on alone."""
    assert spawn(refused_worker, 2) == ["rank 1: no such driver"] * 2


@pytest.mark.parametrize("sizes", [(5, 0, 90 << 20), (2**20, 2**20, 2**20), (0, 0, 0)])
def test_steps_in_order(sizes: tuple[int, ...]) -> None:
    """Each rank's, one after the other, end, exchange by exchange: what is awaited comes earlier."""
    world = len(sizes)
    matrix = [[sizes[(sender + receiver) % world] for receiver in range(world)] for sender in range(world)]
    left = [2 * steps(r, tuple(matrix[r]), tuple(row[r] for row in matrix)) for r in range(world)]
    sent, got, told = ({(a, b): 0 for a in range(world) for b in range(world)} for _ in range(3))
    while any(left):
        before = sum(map(len, left))
        for rank, (step, *others) in ((rank, one) for rank, one in enumerate(left) if one):
            pair = (rank, step.peer) if step.sends else (step.peer, rank)
            if step.sends and told[pair] >= awaited(sent[pair], step):
                assert sent[pair] - got[pair] < SLOTS
                sent[pair] += 1
            elif not step.sends and sent[pair] > got[pair]:
                got[pair] += 1
                told[pair] = got[pair] if tells(step) else told[pair]
            else:
                continue
            left[rank] = others
        assert sum(map(len, left)) < before, left
    assert sent == got == told
