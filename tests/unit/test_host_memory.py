"""Host memory's protocol and order, on a stand-in for the CUDA driver that runs launches in any
order that streams, events and graphs allow."""

import ctypes
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.compression.communication import host_memory
from megatron.compression.communication.host_memory import (
    SLOTS,
    CopyQueues,
    DeviceBytes,
    Rings,
)

PATTERN = random.Random(0).randbytes(1 << 16)
UP, DOWN, MAIN, OTHER, CAPTURING, FORKED = range(1, 7)
"""Streams of a device."""


class Node:
    """Runs once, after others and when it is ready."""

    def __init__(self, after: list["Node"], run, ready) -> None:
        self.after = [*dict.fromkeys(after)]
        self.run = run
        self.ready = ready
        self.replay = 0


class Graph:
    def __init__(self) -> None:
        self.nodes = []
        self.ends = []
        self.active = True


class Driver:
    """Of one device: what is launched becomes nodes, and those of a capture its graph's."""

    def __init__(self) -> None:
        self.ends: dict[int, list[Node]] = {stream: [] for stream in range(1, 7)}
        self.captured: dict[
            int, list[Node]
        ] = {}  # of the streams that are in the capture, their ends
        self.graph: Graph | None = None
        self.events: list[tuple[Graph | None, list[Node]]] = []
        self.nodes: list[Node] = []
        self.current = MAIN

    def launch(self, stream: int, run=lambda replay: None, ready=lambda: True) -> int:
        ends = self.captured if stream in self.captured else self.ends
        ends[stream] = [Node(ends[stream], run, ready)]
        (self.nodes if ends is self.ends else self.graph.nodes).append(*ends[stream])
        return 0

    def cuEventCreate(self, made, flags: int) -> int:
        self.events.append((None, []))
        made._obj.value = len(self.events)
        return 0

    def cuEventRecord(self, event: int, stream: int) -> int:
        inside = stream in self.captured
        self.events[event - 1] = (
            (self.graph, self.captured[stream]) if inside else (None, self.ends[stream])
        )
        return 0

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        graph, nodes = self.events[event - 1]
        inside = stream in self.captured
        if inside if graph is None else not graph.active:
            return 905  # CUDA_ERROR_STREAM_CAPTURE_ISOLATION, or an event of a capture that is over
        ends = (
            self.ends if graph is None else self.captured
        )  # an event of a capture draws the stream into it
        ends[stream] = [*dict.fromkeys(ends.get(stream, []) + nodes)]
        return 0

    def cuStreamWaitValue32_v2(self, stream: int, address: int, value: int, equal: int) -> int:
        word = ctypes.c_uint32.from_address(address)
        return self.launch(
            stream, ready=lambda: word.value == value if equal else word.value >= value
        )

    def cuStreamWriteValue32_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        word = ctypes.c_uint32.from_address(address)
        return self.launch(stream, lambda replay: setattr(word, "value", value))

    def cuMemcpyDtoHAsync_v2(self, to: int, source: int, size: int, stream: int) -> int:
        return self.launch(stream, lambda replay: ctypes.memmove(to, source, size))

    cuMemcpyHtoDAsync_v2 = cuMemcpyDtoDAsync_v2 = cuMemcpyDtoHAsync_v2

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        return 0

    def begin_capture(self) -> Graph:
        self.graph = Graph()
        self.current = CAPTURING
        self.captured = {CAPTURING: []}
        return self.graph

    def end_capture(self) -> bool:
        """Return whether all streams of the capture have come back to the first."""
        graph = self.graph
        ends = self.captured[CAPTURING]
        graph.active = False
        joined = set(ends)
        new = list(ends)
        while new:
            more = [node for node in new.pop().after if node not in joined]
            joined.update(more)
            new += more
        self.graph = None
        self.current = MAIN
        self.captured = {}
        return joined >= set(graph.nodes)

    def replay(self, graph: Graph, number: int) -> None:
        """After the stream's earlier work and the graph's own earlier replay, as CUDA does."""
        before = [*self.ends[self.current], *graph.ends]
        copies = {}
        for node in graph.nodes:
            copies[node] = copy = Node(
                [copies[earlier] for earlier in node.after] or before, node.run, node.ready
            )
            copy.replay = number
        end = Node([*copies.values(), *before], lambda replay: None, lambda: True)
        self.nodes += [*copies.values(), end]
        self.ends[self.current] = graph.ends = [end]


class Rank:
    """Launches exchanges, captures and replays, each with a check of the bytes that arrive."""

    def __init__(self, rank: int, world: int, base: int, one_queue: bool) -> None:
        self.rank = rank
        self.world = world
        self.driver = Driver()
        self.buffers: list[ctypes.Array] = []
        queues = (DOWN if one_queue else UP, DOWN)
        self.engines = CopyQueues(self.driver, rank, ctypes.c_void_p(), queues, to_device=0)
        self.memory = Rings(rank, world, base, self.engines)
        self.checked = 0
        self.replays = 0

    def start(self, number: int, sizes: list[list[int]]):
        """An exchange on the current stream; returns what waits for it on the then current one."""
        driver = self.driver
        key = number * 1009
        sends, receives = (
            [ctypes.create_string_buffer(size + 1) for size in row]
            for row in (sizes[self.rank], [row[self.rank] for row in sizes])
        )
        self.buffers += sends + receives

        def begins(sender: int, receiver: int, replay: int) -> int:
            return (key + replay * 257 + sender * 31 + receiver * 17) % 50000

        def fill(replay: int) -> None:
            for peer, (out, into) in enumerate(zip(sends, receives, strict=True)):
                start = begins(self.rank, peer, replay)
                out[: len(out) - 1] = PATTERN[start : start + len(out) - 1]
                into[:] = bytes(len(into))

        def check(replay: int) -> None:
            self.checked += 1
            for peer, into in enumerate(receives):
                start = begins(peer, self.rank, replay)
                assert into[:-1] == PATTERN[start : start + len(into) - 1], (number, replay, peer)

        parts = (
            [DeviceBytes(ctypes.addressof(buffer), len(buffer) - 1) for buffer in buffers]
            for buffers in (sends, receives)
        )
        driver.launch(driver.current, fill)
        handle = self.memory.exchange(*parts, None)

        def wait() -> None:
            handle.wait()
            driver.launch(driver.current, check)

        return wait

    def capture(self, fails: bool, starts) -> Graph:
        """Exchanges on two streams of one capture, the other stream forked and joined."""
        driver = self.driver
        engines = self.engines
        graph = driver.begin_capture()
        engines.capture_begun(graph)
        engines._put_after(CAPTURING, FORKED)
        waits = []
        for stream, at_once, start in starts:
            driver.current = stream
            waits.append(start())
            if at_once:
                waits.pop()()
        if not fails:
            for wait in waits:
                wait()
        engines._put_after(FORKED, CAPTURING)
        assert driver.end_capture() or fails
        engines.capture_ended()
        return graph

    def replay(self, graph: Graph) -> None:
        self.replays += 1
        if content := self.engines.contents[graph]:
            self.engines.replaying(content)
        self.driver.replay(graph, self.replays)


def followers_of(nodes: list[Node]) -> dict[Node, list[Node]]:
    """Return the nodes that wait for each node."""
    followers: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for earlier in node.after:
            followers[earlier].append(node)
    return followers


def run_all(ranks: list[Rank], generator: random.Random) -> bool:
    """Run what can run, in any order; return whether all has run."""
    nodes = [node for rank in ranks for node in rank.driver.nodes]
    followers = followers_of(nodes)
    missing = {node: len(node.after) for node in nodes}
    free = [node for node in nodes if not node.after]
    while ready := [node for node in free if node.ready()]:
        # some streams run far ahead
        node = ready[-1] if generator.random() < 0.5 else generator.choice(ready)
        free.remove(node)
        node.run(node.replay)
        for later in followers.pop(node):
            missing[later] -= 1
            if not missing[later]:
                free.append(later)
    return not followers


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Makes the ranks of one host, whose pieces are small."""
    monkeypatch.setattr(host_memory, "largest", lambda world: 256)
    monkeypatch.setattr(host_memory, "LEAST", 64)
    host_memory.steps.cache_clear()
    made: list[Rank] = []
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda rank: made[rank].driver.current, raising=False
    )

    def make(world: int, one_queue: bool = False) -> tuple[list[Rank], ctypes.Array]:
        memory = ctypes.create_string_buffer(4096 + world * world * SLOTS * 256)
        made[:] = [Rank(rank, world, ctypes.addressof(memory), one_queue) for rank in range(world)]
        return made, memory

    yield make
    host_memory.steps.cache_clear()


STEPS = ("eager", "eager", "replay", "replay", "wait", "capture", "fail")
"""Steps of a program, each as often as it is to be chosen."""
SIZES = (0, 0, 1, 64, 300, 700, 3000)
"""Bytes of a part. A ring holds 4 pieces of at most 256 here, so the largest goes around it."""


class Program:
    """A random program that all ranks launch alike: it depends on the seed alone."""

    def __init__(self, rank: Rank, seed: int) -> None:
        self.rank = rank
        self.choose = random.Random(seed)
        self.graphs: list[Graph] = []
        self.waits: list = []

    def exchange(self):
        """Return a function that starts an exchange of random parts."""
        number = self.choose.randrange(10**6)
        world = range(self.rank.world)
        sizes = [[self.choose.choice(SIZES) for _ in world] for _ in world]
        return lambda: self.rank.start(number, sizes)

    def capture(self, fails: bool) -> None:
        """Capture three exchanges on two streams."""
        starts = []
        for _ in range(3):
            stream = self.choose.choice((CAPTURING, FORKED))
            at_once = self.choose.random() < 0.5
            starts.append((stream, at_once, self.exchange()))
        graph = self.rank.capture(fails, starts)
        if not fails:
            self.graphs.append(graph)

    def launch(self, count: int) -> None:
        """Launch so many steps, then wait for all exchanges."""
        for number in range(count):
            self.rank.driver.current = self.choose.choice((MAIN, OTHER))
            step = self.choose.choice(STEPS)
            if step == "eager":
                self.waits.append(self.exchange()())
            elif step == "wait" and self.waits:
                self.waits.pop(self.choose.randrange(len(self.waits)))()
            elif step in ("capture", "fail") or number == 0:
                self.capture(fails=step == "fail")
            elif self.graphs:
                self.rank.replay(self.choose.choice(self.graphs))
        for wait in self.waits:
            wait()


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize(("world", "count", "seeds"), [(2, 30, 8), (4, 14, 4)])
def test_bytes_arrive_in_any_order_of_execution(ranks, world, count, seeds, one_queue) -> None:
    """Parts are uneven, empty, or more than a ring holds; exchanges are under way on two streams.

    Captures that fail and replays on any stream lie between them.
    """
    for seed in range(seeds):
        group, memory = ranks(world, one_queue)
        for rank in group:
            Program(rank, seed).launch(count)
        assert run_all(group, random.Random(seed)), (seed, "ranks wait for each other")
        assert group[0].checked == group[-1].checked > 0
        assert not any(memory[:4096])  # all rings are empty


def test_a_capture_may_wait_for_an_exchange_that_was_launched_before(ranks) -> None:
    """It needs no edge to it, but its replays run after exchanges that are launched earlier."""
    group, _ = ranks(2)
    arrived: list[bool] = []
    for rank in group:
        wait = rank.start(1, [[64, 64], [64, 64]])
        graph = rank.driver.begin_capture()
        rank.engines.capture_begun(graph)
        wait()
        assert rank.driver.end_capture()
        rank.engines.capture_ended()
        handle = rank.start(2, [[0, 3000], [3000, 0]])
        into = rank.buffers[-1 - rank.rank]
        rank.driver.current = OTHER
        rank.replays = -1  # it checks the bytes that were launched
        rank.replay(graph)
        rank.driver.launch(OTHER, lambda replay, into=into: arrived.append(any(into[2900:-1])))
        handle()
    assert run_all(group, random.Random(0)) and arrived == [True, True]


def test_after_an_exchange_that_broke_off_nobody_goes_on(
    ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than to take one exchange's bytes for the next one's."""
    group, _ = ranks(2)
    sizes = [[0, 1000], [1000, 0]]
    copies = iter([0, 0])
    complete = Driver.cuMemcpyDtoHAsync_v2
    with monkeypatch.context() as patch:
        patch.setattr(
            Driver, "cuMemcpyDtoHAsync_v2", lambda *to: next(copies, 700) or complete(*to)
        )
        with pytest.raises(host_memory.HostMemoryError, match="700"):
            group[0].start(1, sizes)
    group[1].start(1, sizes)()
    for rank in group:
        rank.start(2, sizes)()
    assert not run_all(group, random.Random(0)) and not group[0].checked + group[1].checked


@pytest.fixture
def shared_folder(tmp_path: Path, monkeypatch) -> Path:
    """A folder in place of /dev/shm."""
    monkeypatch.setattr(host_memory, "_FOLDER", str(tmp_path))
    return tmp_path


def left_file(folder: Path, name: str, age: float = 3600.0) -> Path:
    """A file that was last written ``age`` seconds ago."""
    path = folder / name
    path.write_bytes(b"\0" * 16)
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_files_of_killed_processes_are_removed(shared_folder: Path) -> None:
    """A process that is killed during set-up cannot remove its file: the next run does."""
    abandoned = left_file(shared_folder, "megatron-taco-killed")
    file, problem = host_memory._create(4096)
    assert problem is None and not abandoned.exists()
    assert Path(file.name).stat().st_size == 4096
    file.close()


def test_files_of_living_processes_stay(shared_folder: Path) -> None:
    """They are locked by the process that has made them."""
    living, _ = host_memory._create(4096)
    then = time.time() - 3600
    os.utime(living.name, (then, then))
    another, _ = host_memory._create(4096)
    assert Path(living.name).exists()
    living.close()
    another.close()


def test_files_of_the_last_minute_and_of_other_programs_stay(shared_folder: Path) -> None:
    young = left_file(shared_folder, "megatron-taco-young", age=1.0)
    foreign = left_file(shared_folder, "nccl-left")
    file, _ = host_memory._create(4096)
    assert young.exists() and foreign.exists()
    file.close()
