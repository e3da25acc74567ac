"""Exchanges of bytes through pinned host memory, for the ranks of one host without peer access.

The devices' copy engines move the bytes: a sender copies pieces into a ring that it shares with the
receiver, who copies them out, and each lets its stream wait for the ring's word. So both directions
of a PCIe link are in use at once, and the multiprocessors are free.

The shared memory of W ranks, with one ring for each ordered pair of ranks:

    | words, one a ring | ring 0: slots 0, 1, 2, 3 | ring 1: slots 0, 1, 2, 3 | ...  W (W - 1) rings

The word of a ring says how many pieces of a round of ``SLOTS`` lie in it. Two rounds of six pieces:

    sender      waits for 0; fills slot 0, word = 1; fills slot 1, word = 2; ... slot 3, word = 4
    receiver    waits for 1; empties slot 0; waits for 2; empties slot 1; ... slot 3, word = 0
    sender      waits for 0; fills slot 0, word = 1; fills slot 1, word = 2
    receiver    waits for 1; empties slot 0; waits for 2; empties slot 1, word = 0

Invariants:

- Only one of the two may write the word at a time: the sender from 0 to the round's last piece,
  then the receiver. What the other one waits for stays until it is seen.
- An exchange begins and ends with 0, in slot 0. So it is always the same commands, and a CUDA graph
  can replay them.
- After an exchange that broke off the sender waits for ever and overwrites nothing.
"""

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.compression.communication.objects import gather_objects
from taco_kernels.common import ceil_div
from taco_kernels.common.graph_events import GraphObserver, observe

PIECES = 4
"""Number of pieces that a rank's bytes are divided into: while one is copied out, the next is
copied in."""
LEAST = 1 << 20
"""Least bytes of a piece: each costs a copy and up to two commands on either side."""
SLOTS = 4
"""Pieces from one rank to another that may be under way."""
_LINE = 64
"""Bytes between words: those of different ranks share no cache line."""
_FOLDER = "/dev/shm"
_PREFIX = "megatron-taco-"
"""How names of files in that folder begin."""
_ABANDONED_AFTER = 60.0
"""Seconds after which a file that nobody has locked counts as left behind."""
_UNTIL_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ
_UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_WITHOUT_TIMES = 2  # CU_EVENT_DISABLE_TIMING
_mapped: list[mmap.mmap] = []
"""Memory of this process, for as long as it lives: CUDA knows the addresses, and copies may be
under way."""


class HostMemoryError(RuntimeError):
    """The ranks of a group cannot share pinned memory."""


class DeviceBytes(NamedTuple):
    """Bytes in a device's memory."""

    address: int
    size: int


class Step(NamedTuple):
    """A piece that is copied into a slot of a ring, or out of one."""

    sends: bool
    """Into the ring, of which this rank is the sender; else out of it."""
    peer: int
    """The rank at the other end."""
    offset: int
    """Where the piece begins in the bytes for or from the peer."""
    size: int
    """Bytes of the piece."""
    ring: int
    slot: int
    awaits: int | None
    """The ring's word before the copy: a sender waits for this number, a receiver for it or more.
    None: no wait."""
    sets: int | None
    """The ring's word after the copy; None: as before."""


@functools.lru_cache(maxsize=256)
def steps(rank: int, send_bytes: tuple[int, ...], recv_bytes: tuple[int, ...]) -> tuple[Step, ...]:
    """Return what a rank does in an exchange, in order.

    All ranks take the first pieces before the second ones, nearer peers before farther ones, and
    send before they receive. So each step waits only for earlier steps of other ranks: nobody waits
    for ever, even where all copies share one stream.

    Args:
        rank: this rank.
        send_bytes: bytes for each rank.
        recv_bytes: bytes from each rank.
    """
    world = len(send_bytes)
    steps_by_order = []
    for sends, sizes in ((True, send_bytes), (False, recv_bytes)):
        for distance in range(1, world):
            peer = (rank + distance if sends else rank - distance) % world
            sender = rank if sends else peer
            ring = sender * (world - 1) + distance - 1
            piece = _piece_bytes(sizes[peer], world)
            for number, offset in enumerate(range(0, sizes[peer], piece)):
                size = min(piece, sizes[peer] - offset)
                slot = number % SLOTS
                is_first_of_round = slot == 0
                is_last_of_round = slot == SLOTS - 1 or offset + size == sizes[peer]
                awaits: int | None
                sets: int | None
                if sends:
                    # The sender waits once a round, for an empty ring; then it counts up.
                    awaits = 0 if is_first_of_round else None
                    sets = slot + 1
                else:
                    # The receiver waits for each piece, and empties the ring after the last one.
                    awaits = slot + 1
                    sets = 0 if is_last_of_round else None
                step = Step(sends, peer, offset, size, ring, slot, awaits, sets)
                steps_by_order.append(((number, distance, not sends), step))
    return tuple(step for _, step in sorted(steps_by_order))


def _piece_bytes(size: int, world: int) -> int:
    """Return the bytes of a piece of a message between two ranks.

    Both ends know its size and no other rank's, so it is taken for what all peers get: ``PIECES``
    pieces of that, each whole cache lines.
    """
    lines = ceil_div(size * (world - 1), PIECES * _LINE)
    return min(largest(world), max(LEAST, lines * _LINE))


def largest(world: int) -> int:
    """Return the bytes of a slot among ``world`` ranks: whole pages, and less for more ranks."""
    return max((16 << 20) // world // mmap.PAGESIZE * mmap.PAGESIZE, LEAST)


class CopyQueues(GraphObserver[set[int]]):
    """Two CUDA streams of copies, one a direction, with waits for values in memory.

    The streams keep exchanges in order, in a capture too. A replay runs on other streams: it waits
    for the exchanges before it, and those after it wait for it.

    Args:
        driver: the CUDA driver's functions, called directly: they cost the host a fraction of
            torch's.
        device: number of the device.
        context: its context.
        queues: the stream of copies to the device, and that of copies to host memory.
        to_device: what is added to an address in host memory for the device to find it.
    """

    def __init__(
        self,
        driver: Any,
        device: int,
        context: ctypes.c_void_p,
        queues: tuple[int, int],
        to_device: int,
    ) -> None:
        super().__init__(set)  # a graph's streams with exchanges
        self._driver = driver
        self._device = device
        self._context = context
        self._queues = queues
        self._to_device = to_device
        self._threads = threading.local()
        self.events: list[int] = []
        """Events that nobody waits for, to be used again."""
        self._replayed: int | None = None
        """Stream of the last replay, if no exchange has waited for it."""

    def begin(self) -> None:
        """Let both streams wait for what has been launched, and for a replay on another stream."""
        current = self._current()
        replayed = self._replayed
        self._put_after(current, *self._queues)
        if self.captured is None and replayed is not None:
            self._replayed = None
            if replayed != current:
                self._put_after(replayed, *self._queues)

    def replaying(self, content: set[int]) -> None:
        """Let a graph with exchanges, which is about to be replayed, wait for those before it."""
        current = self._current()
        replayed = self._replayed
        if replayed == current:
            return
        # Exchanges since the last replay have waited for it, so the last of both is enough.
        for earlier in self._queues if replayed is None else (replayed,):
            self._put_after(earlier, current)
        self._replayed = current

    def _put_after(self, earlier: int, *streams: int) -> None:
        """Let streams wait for what another has been given."""
        event = self._recorded(earlier)
        for stream in streams:
            check(self._driver.cuStreamWaitEvent(stream, event, 0))
        self.events.append(event)

    def _current(self) -> int:
        """Return the calling thread's stream, noted in a capture."""
        # A new thread (autograd's) has no context before torch needs one.
        if not hasattr(self._threads, "ready"):
            check(self._driver.cuCtxSetCurrent(self._context))
            self._threads.ready = True
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if self.captured is not None:
            self.captured.add(stream)
        return stream

    def _recorded(self, stream: int) -> int:
        """Return an event of what a stream has been given so far."""
        if not self.events:
            made = ctypes.c_void_p()
            check(self._driver.cuEventCreate(ctypes.byref(made), _WITHOUT_TIMES))
            self.events.append(made.value or 0)
        event = self.events.pop()
        check(self._driver.cuEventRecord(event, stream))
        return event

    def copy(self, step: Step, host: int, device: int, word: int) -> None:
        """Launch a step of an exchange.

        Args:
            step: which way, how much, and what it waits for.
            host: address of the ring's slot.
            device: address of the piece in the device's memory.
            word: address of the ring's word, in host memory.
        """
        driver = self._driver
        queue = self._queues[step.sends]
        word += self._to_device
        if step.awaits is not None:
            condition = _UNTIL_EQUAL if step.sends else _UNTIL_GREATER_OR_EQUAL
            check(driver.cuStreamWaitValue32_v2(queue, word, step.awaits, condition))
        if step.sends:
            check(driver.cuMemcpyDtoHAsync_v2(host, device, step.size, queue))
        else:
            check(driver.cuMemcpyHtoDAsync_v2(device, host, step.size, queue))
        if step.sets is not None:
            check(driver.cuStreamWriteValue32_v2(queue, word, step.sets, 0))

    def copy_local(self, target: int, source: int, size: int) -> None:
        """Copy what stays on the device.

        Args:
            target: address that is copied to.
            source: address that is copied from.
            size: bytes.
        """
        check(self._driver.cuMemcpyDtoDAsync_v2(target, source, size, self._queues[False]))

    def end(self, tensors: Any) -> "_UnderWay":
        """Return a handle whose ``wait`` lets later work wait for both streams; it keeps
        ``tensors``."""
        events = [self._recorded(queue) for queue in self._queues]
        return _UnderWay(self, events, self.captured, tensors)

    def let_wait(self, events: list[int], captured: set[int] | None) -> None:
        """Let the current stream wait for events, which are free then.

        Args:
            events: of the end of an exchange.
            captured: of the capture in which they were recorded; None: in none.
        """
        current = self._current()
        # A capture need not wait for others: the device was idle when it began, and its replays
        # wait.
        if captured is self.captured:
            for event in events:
                check(self._driver.cuStreamWaitEvent(current, event, 0))
        self.events += events
        events.clear()


class CopyEngines(CopyQueues):
    """The copy engines of this process' device, with memory that is registered for them.

    Args:
        pinned: address of the memory that is registered and copied through.
        size: its bytes.

    Raises:
        HostMemoryError: the driver does not know such waits, or cannot register the memory.
    """

    def __init__(self, pinned: int, size: int) -> None:
        torch.cuda.synchronize()  # this thread has the device's context from here on
        driver = _load_driver()
        context = ctypes.c_void_p()
        check(driver.cuCtxGetCurrent(ctypes.byref(context)))
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        to_device, to_host = (stream.cuda_stream for stream in self._streams)
        # Not by cudaHostRegister, whose failure torch would find after its next kernel.
        if error := driver.cuMemHostRegister_v2(pinned, size, _PORTABLE_AND_MAPPED):
            raise HostMemoryError(f"cuMemHostRegister failed with error {error}")
        self._pinned = pinned
        mapped = ctypes.c_uint64()
        try:
            check(driver.cuMemHostGetDevicePointer_v2(ctypes.byref(mapped), pinned, 0))
            # Where the device has no such waits, this says so.
            for queue in (to_device, to_host):
                check(driver.cuStreamWaitValue32_v2(queue, mapped, 0, _UNTIL_EQUAL))
        except HostMemoryError:
            driver.cuMemHostUnregister(pinned)
            raise
        device = torch.cuda.current_device()
        super().__init__(driver, device, context, (to_device, to_host), mapped.value - pinned)
        observe(self)

    def close(self) -> None:
        """Unregister the memory."""
        self._driver.cuMemHostUnregister(self._pinned)


def _load_driver() -> ctypes.CDLL:
    """Return the CUDA driver, whose functions know the types of their arguments."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p
    address = ctypes.c_uint64
    number = ctypes.c_uint32
    for name, *arguments in (
        ("cuCtxGetCurrent", ctypes.POINTER(handle)),
        ("cuCtxSetCurrent", handle),
        ("cuMemHostRegister_v2", handle, ctypes.c_size_t, number),
        ("cuMemHostUnregister", handle),
        ("cuMemcpyDtoHAsync_v2", handle, address, ctypes.c_size_t, handle),
        ("cuMemcpyHtoDAsync_v2", address, handle, ctypes.c_size_t, handle),
        ("cuMemcpyDtoDAsync_v2", address, address, ctypes.c_size_t, handle),
        ("cuStreamWaitValue32_v2", handle, address, number, number),
        ("cuStreamWriteValue32_v2", handle, address, number, number),
        ("cuMemHostGetDevicePointer_v2", ctypes.POINTER(address), handle, number),
        ("cuEventCreate", ctypes.POINTER(handle), number),
        ("cuEventRecord", handle, handle),
        ("cuStreamWaitEvent", handle, handle, number),
    ):
        if not hasattr(driver, name):
            raise HostMemoryError(f"the driver has no {name}")
        getattr(driver, name).argtypes = arguments
    return driver


def check(error: int) -> None:
    """Raise HostMemoryError where a call of the driver has returned an error."""
    if error:
        raise HostMemoryError(f"a call of the CUDA driver failed with error {error}")


class _UnderWay:
    """The copies of one exchange.

    Args:
        engines: have launched them.
        events: of their ends.
        captured: of the capture that they are in; None: in none.
        tensors: what is copied from and into, kept until somebody waits.
    """

    def __init__(
        self, engines: CopyQueues, events: list[int], captured: set[int] | None, tensors: Any
    ) -> None:
        self._engines = engines
        self._events = events
        self._captured = captured
        self._tensors = tensors

    def wait(self) -> None:
        """Let the current stream wait."""
        self._engines.let_wait(self._events, self._captured)
        # What is allocated in their place is used on this stream, after the events.
        self._tensors = None

    def __del__(self) -> None:
        # Where nobody has waited: memory that is copied into must not be another tensor's.
        if self._events:
            with contextlib.suppress(HostMemoryError):  # at the process's end
                self.wait()


class Rings:
    """The rings of a host's ranks, in memory that they share, and their exchanges.

    Args:
        rank: this rank.
        world: number of ranks.
        base: address of the memory; 0: it is not there yet.
        streams: copies, as ``CopyQueues`` does.
    """

    def __init__(self, rank: int, world: int, base: int = 0, streams: Any = None) -> None:
        self.rank = rank
        self.world = world
        self._base = base
        self._streams = streams
        self._pairs = world * (world - 1)
        self._rings = ceil_div(self._pairs * _LINE, mmap.PAGESIZE) * mmap.PAGESIZE
        """Where the first ring begins, behind the words."""
        self._slot = largest(world)

    @property
    def size(self) -> int:
        """Bytes of the memory."""
        return self._rings + self._pairs * SLOTS * self._slot

    def exchange(
        self, sends: Sequence[DeviceBytes], receives: Sequence[DeviceBytes], tensors: Any
    ) -> Any:
        """Start an exchange between all ranks.

        Args:
            sends: the bytes for each rank, in this device's memory; they must not change before the
                end.
            receives: where the bytes from each rank go.
            tensors: what both are parts of, kept until the end.

        Returns: a handle whose ``wait`` lets later work wait for the exchange.
        """
        streams = self._streams
        rank = self.rank
        streams.begin()
        if sends[rank].size:
            streams.copy_local(receives[rank].address, sends[rank].address, sends[rank].size)
        send_bytes = tuple(part.size for part in sends)
        recv_bytes = tuple(part.size for part in receives)
        for step in steps(rank, send_bytes, recv_bytes):
            host = self._base + self._rings + (step.ring * SLOTS + step.slot) * self._slot
            device = (sends if step.sends else receives)[step.peer].address + step.offset
            streams.copy(step, host, device, self._base + step.ring * _LINE)
        return streams.end(tensors)


class HostMemory(Rings):
    """Memory that the ranks of a group share, and their exchanges through it.

    All ranks make the same exchanges in the same order. The memory is 64 MiB at 2 ranks, 192 at 4,
    448 at 8, until the process ends. If a rank dies the others' streams wait, until the launcher or
    a watchdog ends them. Construction is collective.

    Args:
        group: ranks of one host.
        streams: makes what copies, of the memory's address and size.

    Raises:
        HostMemoryError: on every rank, where one cannot share the memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, streams: Callable[[int, int], Any] = CopyEngines
    ) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group
        size = self.size
        file = problem = None
        if self.rank == 0:
            file, problem = _create(size)
        try:
            paths = self._agreed(None if file is None else file.name, problem)
            self._agreed(None, self._map(paths[0], size, streams))
        except BaseException:
            if self._streams is not None:
                self._streams.close()  # else other memory may come to lie at pinned addresses
            raise
        finally:
            # All have mapped it, or one never will: the name is not needed any more.
            if file is not None:
                os.unlink(file.name)
                file.close()
        _mapped.append(self._memory)

    def _map(self, path: str, size: int, streams: Callable[[int, int], CopyEngines]) -> str | None:
        """Map a file and make the streams; return the reason why it cannot be done, or None."""
        try:
            with open(path, "r+b") as file:
                # Touched first by the sender: near to its device, on a host of several sockets.
                sent = (self.world - 1) * SLOTS * self._slot
                os.posix_fallocate(file.fileno(), self._rings + self.rank * sent, sent)
                self._memory = mmap.mmap(file.fileno(), size)
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._streams = streams(self._base, size)
        except Exception as error:
            # Of any kind: the other ranks wait to be told. Other containers of a host have other
            # folders.
            return str(error) or repr(error)
        return None

    def _agreed(self, value: str | None, problem: str | None) -> list:
        """Return every rank's value. Collective; HostMemoryError on all if one has a problem."""
        answers = gather_objects((value, problem), self.group)
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise HostMemoryError(f"rank {rank}: {problem}")
        return [value for value, _ in answers]


def _create(size: int) -> tuple[IO[bytes] | None, str | None]:
    """Make a new file of zeros, and remove those that killed processes have left.

    Returns:
        The file, locked for as long as it is open, and None; or None and the reason why there is
        none.
    """
    try:
        _remove_abandoned_files()
        room = os.statvfs(_FOLDER)
        free = room.f_bavail * room.f_frsize
        if room.f_blocks and free < 2 * size:  # no blocks: without a limit
            return None, (
                f"{ceil_div(size, 1 << 20)} MiB of {_FOLDER} and as many for NCCL and data loaders "
                f"are needed, {free >> 20} are free; give a container more (--shm-size)"
            )
        file = tempfile.NamedTemporaryFile(prefix=_PREFIX, dir=_FOLDER, delete=False)
        # The lock says that its process lives and still needs the name.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(size)
    except OSError as error:
        return None, str(error)
    return file, None


def _remove_abandoned_files() -> None:
    """Remove files of shared memory that earlier runs of this user have left in ``_FOLDER``.

    A run removes its file's name as soon as all ranks have mapped it, so only a run that is killed
    before that leaves one, and with it tens of MiB of the host's memory. A living run holds a lock
    on its file. One that is younger than ``_ABANDONED_AFTER`` may just have been made, and not be
    locked yet.
    """
    for path in Path(_FOLDER).glob(f"{_PREFIX}*"):
        try:
            status = path.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _ABANDONED_AFTER:
                continue
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except OSError:
            continue  # locked, or removed by another process meanwhile
