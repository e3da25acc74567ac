"""Exchanges through shared host memory, with threads in place of copy engines: the protocol of rings."""

import ctypes
import glob
import os
import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import (
    Ledger,
    Policy,
    Rule,
    TransportError,
    Transports,
    host_memory,
)
from megatron.compression.communication.host_memory import (
    SLOTS,
    HostMemory,
    HostMemoryError,
    Step,
    largest,
)
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.communication.transport import HostTransport
from megatron.compression.data_parallel.codec_gradients import CodecGradientSync
from megatron.compression.data_parallel.compressor import GradientBucket
from megatron.compression.data_parallel.weights import BucketWeights
from tests.distributed import test_tagc
from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, start, train


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

    def copy(self, step: Step, host: int, device: int, word: int) -> None:
        now = ctypes.c_uint32.from_address(word)
        to, source = (host, device) if step.sends else (device, host)

        def move() -> None:
            while step.awaits is not None and (
                now.value if step.sends else now.value < step.awaits
            ):
                time.sleep(1e-4)
            ctypes.memmove(to, source, step.size)
            if step.sets is not None:
                now.value = step.sets

        self._queues[step.sends].put(move)

    def copy_local(self, target: int, source: int, size: int) -> None:
        self._queues[False].put(lambda: ctypes.memmove(target, source, size))

    def end(self, tensors: object) -> "Ended":
        return Ended(self._queues, tensors)

    def close(self) -> None:
        """Nothing is registered."""


class Ended:
    """Waits for both threads."""

    def __init__(self, queues: dict, tensors: object) -> None:
        self.tensors = tensors
        self.done = [threading.Event() for _ in queues]
        for waiting, done in zip(queues.values(), self.done, strict=True):
            waiting.put(done.set)

    def wait(self) -> None:
        assert all(done.wait(30) for done in self.done)


def exchanges_worker(rank: int, world: int, streams: type = Threads, device: str = "cpu") -> None:
    if device == "cpu":
        host_memory._FOLDER = tempfile.gettempdir()  # /dev/shm may be small
    memory = HostMemory(dist.group.WORLD, streams)
    sent: list[tuple[str, int]] = []
    transport = HostTransport(memory, lambda *what: sent.append(what))
    generator = torch.Generator().manual_seed(rank)
    sizes = random.Random(0)
    under_way = []
    for number in range(12):
        rows = [[sizes.choice((0, 1, 700, 4000)) for _ in range(world)] for _ in range(world)]
        rings_go_round = largest(2) * (SLOTS + 2) // 4000
        width = sizes.choice((1, 96, 700)) if number % 10 else rings_go_round
        x = torch.randint(
            0, 255, (sum(rows[rank]), width), dtype=torch.uint8, generator=generator
        ).to(device)
        recv_counts = [row[rank] for row in rows]
        expected = x.new_empty((sum(recv_counts), width))
        dist.all_to_all_single(expected, x, recv_counts, rows[rank])
        under_way.append((*transport.all_to_all(x, rows[rank], recv_counts), expected))
        own = torch.randn(sizes.choice((1, 1000, 10**6)), generator=generator).bfloat16().to(device)
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own)
        under_way.append((*transport.all_gather(own[None]), torch.stack(parts)))
        if number % 3 == 2:  # several were under way
            for got, work, wanted in under_way:
                work.wait()
                assert torch.equal(got, wanted)
            under_way.clear()
    assert {name for name, _ in sent} == {"all_to_all", "all_gather"}
    with pytest.raises(ValueError, match="splits"):
        transport.all_to_all(own.view(-1, 1), [len(own) + 1] * world, [1] * world)


def test_exchanges() -> None:
    """Uneven, empty, larger than the rings, of several types, and several under way: as torch.distributed."""
    spawn(exchanges_worker, 3)


closed: list[int] = []


class Refusing(Threads):
    """Of the second rank, as a driver may be."""

    def __init__(self, base: int, size: int) -> None:
        if dist.get_rank() == 1:
            raise TypeError("no such driver")
        super().__init__(base, size)

    def close(self) -> None:
        closed.append(dist.get_rank())


def refused_worker(rank: int, world: int, folder: str) -> list[str]:
    host_memory._FOLDER = folder
    reasons = []

    def refused(streams: type = Threads) -> None:
        with pytest.raises(HostMemoryError) as caught:
            HostMemory(dist.group.WORLD, streams)
        reasons.append(str(caught.value))
        assert rank or not glob.glob(f"{folder}/*")  # rank 0 has made it

    refused(Refusing)
    assert closed == [0] * (rank == 0)
    opened = open
    for path in (
        "/nowhere",
        os.devnull,
    ):  # as if the second rank were in another container; another size
        host_memory.open = lambda name, mode, path=path: opened(path if rank == 1 else name, mode)
        refused()
    del host_memory.open
    room = os.statvfs(folder)
    of_folder = os.statvfs
    blocks = (100 << 20) // room.f_frsize
    os.statvfs = lambda path: os.statvfs_result((*room[:3], blocks, blocks, *room[5:]))
    refused()
    os.statvfs = lambda path: room
    os.posix_fallocate = lambda *file: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    refused()
    host_memory._FOLDER = f"{folder}/missing"
    os.statvfs = of_folder
    refused()
    return reasons


def test_all_ranks_learn_of_a_problem(tmp_path: Path) -> None:
    """Nobody goes on alone, whatever fails and where; no file stays."""
    first, second = spawn(refused_worker, 2, str(tmp_path))
    assert first == second
    expected = (
        "rank 1: no such driver",
        "/nowhere",
        "rank 1: ",
        "65 MiB",
        "No space left",
        "missing",
    )
    for reason, part in zip(first, expected, strict=True):
        assert part in reason


@contextmanager
def no_peers(streams: Callable = Threads) -> Iterator[None]:
    """As on a host with two GPUs that have no peer access, with threads in place of copy engines."""
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("taco_kernels.symmetric_memory.hosts_reason", lambda group: None),
        mock.patch(
            "taco_kernels.symmetric_memory.peer_access_reason", lambda group: "no peer access"
        ),
        mock.patch.object(HostMemory.__init__, "__defaults__", (streams,)),
    ):
        yield


def summed(topology: Topology, spec: str, sharded: bool) -> tuple[list, list[dict]]:
    """What three buckets under way at once hold after each of two steps, and the ledger."""
    ledger = Ledger()
    device = test_tagc.DEVICE
    actual = []
    syncs = []
    for numel in (60_032, 20_480, 4 * 4096):
        flat = torch.zeros(numel - (0 if sharded else 3), device=device)
        bucket = GradientBucket(flat, (), 0.25, sharded, topology, ledger)
        syncs.append(CodecGradientSync(bucket, parse_codec(spec)))
    for step in range(2):
        works = []
        for number, sync in enumerate(syncs):
            generator = torch.Generator().manual_seed(100 * topology.rank + 10 * number + step)
            sync.bucket.gradients.copy_(torch.randn(sync.bucket.numel, generator=generator))
            works.append(sync.start())
            if number:
                works[number - 1].advance()  # as a later bucket's hook does
        for sync, work in zip(syncs, works, strict=True):
            work.wait()
            actual.append((sync.bucket.shard if sharded else sync.bucket.gradients).clone())
    return actual, ledger.rows()


def gathered(topology: Topology) -> tuple[list, list[dict]]:
    """Weights behind two optimizer steps, and the ledger."""
    ledger = Ledger()
    weights = torch.randn(
        topology.world_size * 9088, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    rules = {"dp.weight": Rule(parse_codec("sdp4bit:intra=4"))}
    bytes_held = BucketWeights(
        weights.to(test_tagc.DEVICE), Policy(rules, ledger), topology, ledger
    )
    for _ in range(2):
        bytes_held.decide()
        bytes_held.update([(0, bytes_held.shard.float() * 1.01)])
        bytes_held.start().wait()
    return [bytes_held.weights], ledger.rows()


def sparse(topology: Topology, sharded: bool) -> tuple[list, list[dict]]:
    """TAGC's sum, whose payloads differ in size from rank to rank, and the ledger."""
    sync = test_tagc.make_sync(sharded, torch.float32, wire="packed", topology=topology)
    test_tagc.fill(sync, 0, topology.rank)
    sync.start().wait()
    return [sync.bucket.shard if sharded else sync.bucket.gradients], sync.bucket.ledger.rows()


def check_the_same(by_copies: Topology, by_torch: Topology) -> None:
    """Bits and bytes of everything that data parallelism sends, whatever carries it."""
    assert by_copies.memory is not None and by_torch.memory is None
    calls = [
        (summed, "sdp4bit", True),
        (summed, "sdp4bit", False),
        (summed, "lossless", True),
        (gathered,),
        (sparse, True),
        (sparse, False),
    ]
    for call, *settings in calls:
        (actual, rows), (expected, expected_rows) = (
            call(one, *settings) for one in (by_copies, by_torch)
        )
        assert all(map(torch.equal, actual, expected)) and bool(actual[0].any()), (call, settings)
        assert rows == expected_rows, (call, settings)


def trained(rank: int, transport: str) -> str:
    """Hash of the weights behind some iterations, of which backward hooks start exchanges."""
    setup = Setup({"compression": "sdp4bit"}, transport=transport, micro_batches=2)
    training, _ = train(rank, setup, 3)
    assert (training.groups[0].plan.topology.memory is not None) == (transport == "host")
    assert training.kinds("dp.weight") >= {"compressed"} <= training.kinds()
    return training.digest()


def data_parallel_worker(rank: int, world: int) -> list[str]:
    host_memory._FOLDER = tempfile.gettempdir()
    lines = []
    for node_size in (None, 2):
        with no_peers():
            topology = find_topology(dist.group.WORLD, node_size, Transports(communicators=3))
        hops = {
            link: type(topology.transport_over(link))
            for link in (None, "intra", "inter")[: 3 if node_size else 1]
        }
        assert [one for one in hops if hops[one] is HostTransport] == [
            "intra" if node_size else None
        ]
        shared = {link: len(topology.transport_over(link).groups) for link in hops}
        assert shared == ({None: 3, "intra": 1, "inter": 3} if node_size else {None: 1})
        check_the_same(topology, find_topology(dist.group.WORLD, node_size))
        lines.append(topology.describe())
    with no_peers(Refusing):
        with pytest.raises(
            TransportError, match="transport host is not possible: no host memory to share"
        ):
            find_topology(dist.group.WORLD, None, Transports("host"))
        far = find_topology(dist.group.WORLD, 1, Transports("host"))
    assert far.memory is None and not far.method
    start(rank)
    by_threads = mock.Mock(
        side_effect=lambda group, fused: (HostMemory(group, Threads), "by threads")
    )
    with mock.patch.object(Transports, "_memory_of", by_threads):
        weights = trained(rank, "host")
    assert weights == trained(rank, "collective") and by_threads.call_count == 1
    return [*lines, far.describe()]


def test_data_parallel_payloads() -> None:
    """Gradients, weights and TAGC, over one node and over two, and a training: the bits and bytes of
    torch.distributed; what crosses nodes stays with it."""
    here = "payloads travel through host memory between {} ranks (no peer access); "
    here += "MEGATRON_COMPRESSION_COMMUNICATORS=3 has nothing to share there"
    far = "between nodes over torch.distributed"
    assert set(map(tuple, spawn(data_parallel_worker, 4))) == {
        (
            f"4 ranks on one node; {here.format(4)}",
            f"2 nodes of 2 ranks, 3 communicators; inside a node {here.format(2)}; {far}",
            "4 nodes of 1 rank; payloads travel over torch.distributed",
        )
    }
