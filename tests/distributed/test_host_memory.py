"""Exchanges through shared host memory, with threads in place of copy engines."""

import ctypes
import functools
import glob
import os
import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from megatron.compression.communication.collectives import all_reduce
from megatron.compression.communication.host_memory import (
    SLOTS,
    HostMemory,
    HostMemoryError,
    Step,
    largest,
)
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.communication.transport import HostTransport, TorchTransport
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
        for copies in self._queues.values():
            threading.Thread(target=self._work, args=(copies,), daemon=True).start()

    @staticmethod
    def _work(copies: queue.Queue) -> None:
        while True:
            copy = copies.get()
            copy()

    def begin(self) -> None:
        """Nothing is under way on a CPU."""

    def copy(self, step: Step, host: int, device: int, word: int) -> None:
        """Copy a step's bytes when its slot's word allows it, and set the word.

        A sender waits until its slot is empty (0); a receiver until the word has reached its step.
        """
        flag = ctypes.c_uint32.from_address(word)
        target = host if step.sends else device
        source = device if step.sends else host

        def is_ready() -> bool:
            if step.awaits is None:
                return True
            if step.sends:
                return flag.value == 0
            return flag.value >= step.awaits

        def move() -> None:
            while not is_ready():
                time.sleep(1e-4)
            ctypes.memmove(target, source, step.size)
            if step.sets is not None:
                flag.value = step.sets

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
        for copies, done in zip(queues.values(), self.done, strict=True):
            copies.put(done.set)

    def wait(self) -> None:
        assert all(done.wait(30) for done in self.done)


def exchanges_worker(rank: int, world: int, streams: type = Threads, device: str = "cpu") -> None:
    """Compare random exchanges through host memory with torch.distributed's.

    Args:
        rank: this rank.
        world: number of ranks.
        streams: copies the bytes.
        device: of the tensors.
    """
    if device == "cpu":
        host_memory._FOLDER = tempfile.gettempdir()  # /dev/shm may be small
    memory = HostMemory(dist.group.WORLD, streams)
    sent: list[tuple[str, int]] = []
    transport = HostTransport(memory, lambda *message: sent.append(message))
    exchanges = Exchanges(transport, rank, world, device)
    for number in range(12):
        exchanges.start_all_to_all(larger_than_the_rings=number % 10 == 0)
        exchanges.start_all_gather()
        if number % 3 == 2:  # six are under way
            exchanges.wait()
    assert {operation for operation, _ in sent} == {"all_to_all", "all_gather"}
    column = torch.zeros(1, 1, device=device)
    with pytest.raises(ValueError, match="splits"):
        transport.all_to_all(column, [2] * world, [1] * world)


class Exchanges:
    """Random exchanges of one rank that are under way.

    Args:
        transport: through host memory.
        rank: this rank.
        world: number of ranks.
        device: of the tensors.
    """

    def __init__(self, transport: HostTransport, rank: int, world: int, device: str) -> None:
        self.transport = transport
        self.rank = rank
        self.world = world
        self.device = device
        self.sizes = random.Random(0)  # all ranks draw the same sizes
        self.values = torch.Generator().manual_seed(rank)
        self.under_way: list[tuple] = []
        """Result, work, expected result."""

    def start_all_to_all(self, larger_than_the_rings: bool) -> None:
        """Start an exchange of bytes, with rows of any number for each peer."""
        ranks = range(self.world)
        rows = [[self.sizes.choice((0, 1, 700, 4000)) for _ in ranks] for _ in ranks]
        if larger_than_the_rings:
            width = largest(2) * (SLOTS + 2) // 4000
        else:
            width = self.sizes.choice((1, 96, 700))
        send_counts = rows[self.rank]
        recv_counts = [row[self.rank] for row in rows]
        shape = (sum(send_counts), width)
        x = torch.randint(0, 255, shape, dtype=torch.uint8, generator=self.values)
        x = x.to(self.device)
        expected = x.new_empty((sum(recv_counts), width))
        dist.all_to_all_single(expected, x, recv_counts, send_counts)
        result, work = self.transport.all_to_all(x, send_counts, recv_counts)
        self.under_way.append((result, work, expected))

    def start_all_gather(self) -> None:
        """Start a gather of bf16 values, of any number."""
        numel = self.sizes.choice((1, 1000, 10**6))
        x = torch.randn(numel, generator=self.values).bfloat16().to(self.device)
        expected = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(expected, x)
        result, work = self.transport.all_gather(x[None])
        self.under_way.append((result, work, torch.stack(expected)))

    def wait(self) -> None:
        """Wait for every exchange, and compare."""
        for result, work, expected in self.under_way:
            work.wait()
            assert torch.equal(result, expected)
        self.under_way.clear()


def test_exchanges_have_the_results_of_torch_distributed() -> None:
    """They are uneven, empty, larger than the rings, of two types, and several are under way."""
    spawn(exchanges_worker, 3)


SUMMED = ("int6", "int6:outliers=on", "taco", "int8:normalize=standardize", "sdp4bit", "identity")
"""Codecs that encode into memory themselves, and codecs of which a payload is copied there."""


def sums_worker(rank: int, world: int) -> None:
    """Compare sums of two ranks through host memory with torch.distributed's, bit by bit."""
    host_memory._FOLDER = tempfile.gettempdir()
    through_memory = HostTransport(HostMemory(dist.group.WORLD, Threads))
    by_torch = TorchTransport(dist.group.WORLD)
    assert through_memory.in_place and not by_torch.in_place
    generator = torch.Generator().manual_seed(rank)
    for spec in SUMMED:
        codec = parse_codec(spec)
        for tokens in (0, 1, 7):  # nothing, less than a group, no whole number of them
            x = torch.randn(tokens, 3, 128, generator=generator).bfloat16()
            before = x.clone()
            works = [all_reduce(x, codec, transport) for transport in (through_memory, by_torch)]
            actual, expected = (work.wait() for work in works)
            assert torch.equal(actual, expected), (spec, tokens)
            assert torch.equal(x, before)
            # The sum in the addend's place, which is free once it is encoded.
            all_reduce(x, codec, through_memory, x).wait()
            assert torch.equal(x, expected), (spec, tokens)


def test_payloads_that_are_encoded_where_they_are_gathered_have_the_same_bits() -> None:
    spawn(sums_worker, 2)


closed: list[int] = []


class Refusing(Threads):
    """Streams that the second rank's driver refuses."""

    def __init__(self, base: int, size: int) -> None:
        if dist.get_rank() == 1:
            raise TypeError("no such driver")
        super().__init__(base, size)

    def close(self) -> None:
        closed.append(dist.get_rank())


PROBLEMS = {
    "the second rank's driver": "rank 1: no such driver",
    "the file is missing on the second rank": "/nowhere",
    "the file has another size on the second rank": "rank 1: ",
    "too little room": "65 MiB",
    "no room while the file is made": "No space left",
    "the folder is missing": "missing",
}
"""What keeps ranks from sharing memory, and a part of the reason that both have."""


def refused_worker(rank: int, world: int, folder: str) -> dict[str, str]:
    """Return the reasons by problem."""
    reasons = {}

    def refuse(problem: str, streams: type = Threads) -> None:
        with pytest.raises(HostMemoryError) as refused:
            HostMemory(dist.group.WORLD, streams)
        reasons[problem] = str(refused.value)
        if rank == 0:  # which makes the file
            assert not glob.glob(f"{folder}/*"), "a file stays"

    def open_on_the_second_rank(path: str) -> Callable:
        opened = open
        return lambda name, mode: opened(path if rank == 1 else name, mode)

    def no_space(*file) -> None:
        raise OSError(28, "No space left on device")

    host_memory._FOLDER = folder
    refuse("the second rank's driver", Refusing)
    assert closed == ([0] if rank == 0 else [])
    # As if the second rank were in another container.
    host_memory.open = open_on_the_second_rank("/nowhere")
    refuse("the file is missing on the second rank")
    host_memory.open = open_on_the_second_rank(os.devnull)
    refuse("the file has another size on the second rank")
    del host_memory.open

    actual = os.statvfs(folder)
    blocks = (100 << 20) // actual.f_frsize  # 100 MiB
    little_room = os.statvfs_result((*actual[:3], blocks, blocks, *actual[5:]))
    with mock.patch("os.statvfs", lambda path: little_room):
        refuse("too little room")
    with (
        mock.patch("os.statvfs", lambda path: actual),
        mock.patch("os.posix_fallocate", no_space),
    ):
        refuse("no room while the file is made")
    host_memory._FOLDER = f"{folder}/missing"
    refuse("the folder is missing")
    return reasons


@pytest.fixture(scope="module")
def reasons(tmp_path_factory) -> list[dict[str, str]]:
    """Results of ``refused_worker`` by rank."""
    return spawn(refused_worker, 2, str(tmp_path_factory.mktemp("refused")))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_all_ranks_learn_of_a_problem(reasons: list[dict[str, str]], problem: str) -> None:
    """No rank goes on without the others, whatever fails and where."""
    first, second = reasons
    assert first[problem] == second[problem]
    assert PROBLEMS[problem] in first[problem]


@contextmanager
def no_peers(streams: Callable = Threads) -> Iterator[None]:
    """Make a host with two GPUs that have no peer access; threads stand in for copy engines."""
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
    """Sum the gradients of three buckets that are under way at once, in two steps.

    Args:
        topology: of the ranks.
        spec: the codec.
        sharded: each rank needs its shard only.

    Returns:
        The buckets' sums after each step, and the ledger.
    """
    ledger = Ledger()
    device = test_tagc.DEVICE
    actual = []
    syncs = []
    for numel in (60_032, 20_480, 4 * 4096):
        if not sharded:
            numel -= 3  # no multiple of anything
        flat = torch.zeros(numel, device=device)
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
    """Return weights gathered after two optimizer steps, and the ledger."""
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
    """Return TAGC's sum, whose payloads differ in size from rank to rank, and the ledger."""
    sync = test_tagc.make_sync(sharded, torch.float32, wire="packed", topology=topology)
    test_tagc.fill(sync, 0, topology.rank)
    sync.start().wait()
    return [sync.bucket.shard if sharded else sync.bucket.gradients], sync.bucket.ledger.rows()


def check_the_same(by_copies: Topology, by_torch: Topology) -> None:
    """Assert that data parallelism has the same bits and bytes over host memory and over torch."""
    assert by_copies.memory is not None
    assert by_torch.memory is None
    calls = [
        (summed, "sdp4bit", True),
        (summed, "sdp4bit", False),
        (summed, "lossless", True),
        (gathered,),
        (sparse, True),
        (sparse, False),
    ]
    for call, *settings in calls:
        actual, rows = call(by_copies, *settings)
        expected, expected_rows = call(by_torch, *settings)
        assert all(map(torch.equal, actual, expected)), (call, settings)
        assert bool(actual[0].any()), (call, settings)
        assert rows == expected_rows, (call, settings)


def trained(rank: int, transport: str) -> str:
    """Return the hash of the weights after three iterations; backward hooks start exchanges."""
    setup = Setup({"compression": "sdp4bit"}, transport=transport, micro_batches=2)
    training, _ = train(rank, setup, 3)
    assert (training.groups[0].plan.topology.memory is not None) == (transport == "host")
    assert "compressed" in training.kinds("dp.weight")
    assert "compressed" in training.kinds("dp.gradient")
    return training.digest()


@contextmanager
def threads_as_streams() -> Iterator[mock.Mock]:
    """Let transports share memory by threads; yields what makes the memory of a group."""
    memory_of = mock.Mock(
        side_effect=lambda group, fused: (HostMemory(group, Threads), "by threads")
    )
    with mock.patch.object(Transports, "_memory_of", memory_of):
        yield memory_of


def data_parallel_worker(rank: int, world: int) -> dict[str, str]:
    """Compare data parallelism over host memory with torch.distributed's.

    Returns:
        The description of each topology.
    """
    host_memory._FOLDER = tempfile.gettempdir()
    with no_peers():
        one_node = find_topology(dist.group.WORLD, None, Transports(communicators=3))
    transport = one_node.transport_over(None)
    assert type(transport) is HostTransport
    assert len(transport.groups) == 1
    check_the_same(one_node, find_topology(dist.group.WORLD, None))

    with no_peers():
        two_nodes = find_topology(dist.group.WORLD, 2, Transports(communicators=3))
    links = {link: two_nodes.transport_over(link) for link in (None, "intra", "inter")}
    assert [link for link in links if type(links[link]) is HostTransport] == ["intra"]
    communicators = {link: len(transport.groups) for link, transport in links.items()}
    assert communicators == {None: 3, "intra": 1, "inter": 3}
    check_the_same(two_nodes, find_topology(dist.group.WORLD, 2))

    reason = "transport host is not possible: no host memory to share"
    with no_peers(Refusing):
        with pytest.raises(TransportError, match=reason):
            find_topology(dist.group.WORLD, None, Transports("host"))
        four_nodes = find_topology(dist.group.WORLD, 1, Transports("host"))
    assert four_nodes.memory is None
    assert not four_nodes.method
    return {
        "one node": one_node.describe(),
        "two nodes": two_nodes.describe(),
        "four nodes": four_nodes.describe(),
        **trained_worker(rank),
    }


def trained_worker(rank: int) -> dict[str, str]:
    """Return the weights of a training over host memory and over torch.distributed."""
    start(rank)
    with threads_as_streams() as memory_of:
        by_copies = trained(rank, "host")
    by_torch = trained(rank, "collective")
    assert memory_of.call_count == 1
    return {"trained by copies": by_copies, "trained by torch": by_torch}


@functools.cache
def data_parallel_results() -> list[dict[str, str]]:
    """Return the results of ``data_parallel_worker`` by rank: bits and bytes are equal there."""
    return spawn(data_parallel_worker, 4)


SHARED = (
    "payloads travel through host memory between {} ranks (no peer access); "
    "MEGATRON_COMPRESSION_COMMUNICATORS=3 has nothing to share there"
)
DESCRIPTIONS = {
    "one node": f"4 ranks on one node; {SHARED.format(4)}",
    "two nodes": f"2 nodes of 2 ranks, 3 communicators; inside a node {SHARED.format(2)}; "
    "between nodes over torch.distributed",
    "four nodes": "4 nodes of 1 rank; payloads travel over torch.distributed",
}


@pytest.mark.parametrize("nodes", DESCRIPTIONS)
def test_data_parallel_payloads_travel_through_host_memory_inside_nodes(nodes: str) -> None:
    """Between nodes torch.distributed carries them; the bits and bytes are the same."""
    for rank in data_parallel_results():
        assert rank[nodes] == DESCRIPTIONS[nodes]


def test_training_over_host_memory_has_the_bits_of_torch_distributed() -> None:
    for rank in data_parallel_results():
        assert rank["trained by copies"] == rank["trained by torch"]
