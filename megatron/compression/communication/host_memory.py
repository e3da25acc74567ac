"""Exchanges of bytes through pinned host memory, for the ranks of one host without peer access.

The devices' copy engines move the bytes: a sender copies pieces into a ring that it shares with the receiver,
who copies them out, and each lets its stream wait for the other's counter. So both directions of a PCIe link
are in use at once, and the multiprocessors are free.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PIECES = 4
"""Of what a rank sends in one exchange: while one is copied out, the next is copied in."""
LEAST = 1 << 20
"""Bytes of a piece."""
SLOTS = 4
"""Pieces from one rank to another that may be under way."""
_LINE = 64
"""Bytes between counters: those of different ranks share no cache line."""
_FOLDER = "/dev/shm"
_mapped: list[mmap.mmap] = []
"""For as long as the process lives: CUDA knows the addresses, and copies may be under way."""


class HostMemoryError(RuntimeError):
    """The ranks of a group cannot share pinned memory."""


class DeviceBytes(NamedTuple):
    """Bytes in a device's memory."""

    address: int
    size: int


class Step(NamedTuple):
    """A piece that is copied into a ring (``sends``) or out of one."""

    sends: bool
    peer: int
    offset: int
    """Into the peer's bytes."""
    size: int
    number: int
    """Among the pieces for this peer, or from it."""
    pieces: int


@functools.lru_cache(maxsize=256)
def steps(rank: int, to: tuple[int, ...], came: tuple[int, ...]) -> tuple[Step, ...]:
    """What a rank does in an exchange, in order: each step waits only for earlier steps of other ranks,
    whatever the sizes, so that nobody waits for ever.

    Args:
        to, came: bytes for each rank and from each; a rank's own are left out.
    """
    world, result = len(to), []
    for sends, sizes in ((True, to), (False, came)):
        for distance in range(1, world):
            peer = (rank + distance if sends else rank - distance) % world
            # Known to both ends, who know what passes between them and no more.
            wanted = -(-sizes[peer] * (world - 1) // (PIECES * _LINE)) * _LINE
            piece = min(largest(world), max(LEAST, wanted))
            offsets = range(0, sizes[peer], piece)
            for number, offset in enumerate(offsets):
                step = Step(sends, peer, offset, min(piece, sizes[peer] - offset), number, len(offsets))
                result.append(((number, distance, not sends), step))
    return tuple(step for _, step in sorted(result))


def largest(world: int) -> int:
    """Bytes of a slot: whole pages, whatever the number of ranks."""
    return max((16 << 20) // world // mmap.PAGESIZE * mmap.PAGESIZE, LEAST)


def awaited(count: int, step: Step) -> int:
    """How many pieces the receiver must have emptied before a step sends piece ``count`` of a ring.

    Looked at once for ``SLOTS`` pieces.
    """
    if step.number % SLOTS:
        return 0
    return min(count + SLOTS, count - step.number + step.pieces) - SLOTS


def tells(step: Step) -> bool:
    """Whether a receiver says after a step how many pieces it has emptied."""
    return step.number % SLOTS == SLOTS - 1 or step.number == step.pieces - 1


class CopyEngines:
    """Two CUDA streams of copies, with waits for values in memory; the driver's own functions cost
    a fraction of torch's.

    Raises: HostMemoryError: the driver does not know such waits.
    """

    def __init__(self, pinned: int, size: int) -> None:
        torch.cuda.synchronize()  # this thread has the device's context from here on
        self._device = torch.cuda.current_device()
        self._driver = driver = ctypes.CDLL("libcuda.so.1")
        handle, address, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
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
        self._context, self._threads = handle(), threading.local()
        check(driver.cuCtxGetCurrent(ctypes.byref(self._context)))
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        self._up, self._down = (stream.cuda_stream for stream in self._streams)
        self.events: list[int] = []
        """Those that nobody waits for."""
        # Not by cudaHostRegister, whose failure torch would find after its next kernel.
        if failed := driver.cuMemHostRegister_v2(pinned, size, 3):  # portable and mapped
            raise HostMemoryError(f"cuMemHostRegister failed with error {failed}")
        self._pinned, mapped = pinned, address()
        try:
            check(driver.cuMemHostGetDevicePointer_v2(ctypes.byref(mapped), pinned, 0))
            self._to_device = mapped.value - pinned
            for sends in (True, False):  # where the device has no such waits, this says so
                self.await_counter(sends, pinned, 0)
        except HostMemoryError:
            self.close()
            raise

    def close(self) -> None:
        """Unregister the memory, which has not been used."""
        self._driver.cuMemHostUnregister(self._pinned)

    def begin(self) -> None:
        """Let both streams wait for what has been launched."""
        if torch._C._cuda_isCurrentStreamCapturing():
            raise HostMemoryError(
                "an exchange through host memory cannot be part of a CUDA graph: its replays would count on; "
                "use --compression-transport collective"
            )
        event = self._recorded(self._current())
        for stream in (self._up, self._down):
            check(self._driver.cuStreamWaitEvent(stream, event, 0))
        self.events.append(event)

    def _current(self) -> int:
        """The calling thread's stream. A new thread (autograd's) has no context before torch needs one."""
        if not hasattr(self._threads, "ready"):
            check(self._driver.cuCtxSetCurrent(self._context))
            self._threads.ready = True
        return torch._C._cuda_getCurrentRawStream(self._device)

    def _recorded(self, stream: int) -> int:
        if not self.events:
            made = ctypes.c_void_p()
            check(self._driver.cuEventCreate(ctypes.byref(made), 2))  # without times
            self.events.append(made.value or 0)
        event = self.events.pop()
        check(self._driver.cuEventRecord(event, stream))
        return event

    def copy(self, sends: bool, host: int, device: int, size: int) -> None:
        """Copy ``size`` bytes between two addresses, to host memory (``sends``) or from it."""
        if sends:
            check(self._driver.cuMemcpyDtoHAsync_v2(host, device, size, self._down))
        else:
            check(self._driver.cuMemcpyHtoDAsync_v2(device, host, size, self._up))

    def copy_own(self, to: int, source: int, size: int) -> None:
        """Copy what stays on the device."""
        check(self._driver.cuMemcpyDtoDAsync_v2(to, source, size, self._up))

    def await_counter(self, sends: bool, counter: int, value: int) -> None:
        """Let a queue wait until the counter at an address is ``value`` or more."""
        stream = self._down if sends else self._up  # 0: until it is at least the value, modulo 2^32
        check(self._driver.cuStreamWaitValue32_v2(stream, counter + self._to_device, value & 0xFFFFFFFF, 0))

    def set_counter(self, sends: bool, counter: int, value: int) -> None:
        """Set a counter after the copies before it."""
        stream = self._down if sends else self._up
        check(self._driver.cuStreamWriteValue32_v2(stream, counter + self._to_device, value & 0xFFFFFFFF, 0))

    def end(self, kept: Any) -> "_UnderWay":
        """A handle whose ``wait`` lets later work wait for both streams; it keeps ``kept``."""
        return _UnderWay(self, [self._recorded(self._down), self._recorded(self._up)], kept)

    def let_wait(self, events: list[int]) -> None:
        """Let the current stream wait for events, which are free then."""
        current = self._current()
        while events:
            check(self._driver.cuStreamWaitEvent(current, events[-1], 0))
            self.events.append(events.pop())


def check(failed: int) -> None:
    """Raise HostMemoryError where a call of the driver has failed."""
    if failed:
        raise HostMemoryError(f"a call of the CUDA driver failed with error {failed}")


class _UnderWay:
    """The copies of one exchange."""

    def __init__(self, engines: CopyEngines, events: list[int], kept: Any) -> None:
        self._engines, self._events, self._kept = engines, events, kept

    def wait(self) -> None:
        """Let the current stream wait."""
        self._engines.let_wait(self._events)
        self._kept = None  # what is allocated in its place is used after the events

    def __del__(self) -> None:
        if self._events:  # nobody has waited, but memory that is copied into must not be another's
            with contextlib.suppress(HostMemoryError):  # at the process's end
                self.wait()


class HostMemory:
    """Memory that the ranks of a group share, and their exchanges through it. Construction is collective.

    Between any two ranks it has ``SLOTS`` pieces each way: 64 MiB at 2 ranks, 192 at 4, 448 at 8, until the
    process ends. All ranks make the same exchanges in the same order. If a rank dies the others' streams
    wait, until the launcher or NCCL's watchdog ends them.

    Raises: HostMemoryError: the same on every rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, streams: Callable[[int, int], CopyEngines] = CopyEngines
    ) -> None:
        self.group, self.rank, self.world = group, group.rank(), group.size()
        pairs = self.world * (self.world - 1)
        self._rings = -(-2 * pairs * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slot = largest(self.world)
        size = self._rings + pairs * SLOTS * self._slot
        self._streams: Any = None
        path, problem = _create(size) if self.rank == 0 else (None, None)
        try:
            self._told(None, self._map(self._told(path, problem)[0], size, streams))
        except BaseException:
            if self._streams is not None:
                self._streams.close()  # else other memory may come to lie at pinned addresses
            raise
        finally:
            if path is not None:
                os.unlink(path)
        _mapped.append(self._memory)
        self._sent, self._got = [0] * self.world, [0] * self.world

    def _map(self, path: str, size: int, streams: Callable[[int, int], CopyEngines]) -> str | None:
        """Map a file and make the streams; why it cannot be done, or None."""
        try:
            with open(path, "r+b") as file:
                own = (self.world - 1) * SLOTS * self._slot  # touched first by the sender: near to its device
                os.posix_fallocate(file.fileno(), self._rings + self.rank * own, own)
                self._memory = mmap.mmap(file.fileno(), size)
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._streams = streams(self._base, size)
        except Exception as error:  # of any kind: the other ranks wait to be told
            return str(error) or repr(error)  # other containers of a host have other folders
        return None

    def _told(self, word: str | None, problem: str | None) -> list:
        """Every rank's word, or HostMemoryError on all if one has a problem. Collective."""
        views: list = [None] * self.world
        dist.all_gather_object(views, (word, problem), group=self.group)
        for rank, (_, problem) in enumerate(views):
            if problem:
                raise HostMemoryError(f"rank {rank}: {problem}")
        return [word for word, _ in views]

    def exchange(self, sends: Sequence[DeviceBytes], receives: Sequence[DeviceBytes], kept: Any) -> Any:
        """Start to send ``sends[r]`` to rank r and to fill ``receives[r]`` from it, parts of ``kept``.

        Returns: a handle, whose ``wait`` lets later work wait for it. What is sent must not change before.
        """
        streams, rank = self._streams, self.rank
        streams.begin()
        if sends[rank].size:
            streams.copy_own(receives[rank].address, sends[rank].address, sends[rank].size)
        sizes = (tuple(part.size for part in parts) for parts in (sends, receives))
        for step in steps(rank, *sizes):
            sender, receiver = (rank, step.peer) if step.sends else (step.peer, rank)
            pair = sender * (self.world - 1) + receiver - (receiver > sender)
            counts, parts = (self._sent, sends) if step.sends else (self._got, receives)
            count = counts[step.peer]
            full = self._base + 2 * pair * _LINE
            empty = full + _LINE
            slot = self._base + self._rings + (pair * SLOTS + count % SLOTS) * self._slot
            if not step.sends:
                streams.await_counter(False, full, count + 1)
            elif step.number % SLOTS == 0:
                streams.await_counter(True, empty, awaited(count, step))
            streams.copy(step.sends, slot, parts[step.peer].address + step.offset, step.size)
            counts[step.peer] = count + 1
            if step.sends:
                streams.set_counter(True, full, count + 1)
            elif tells(step):
                streams.set_counter(False, empty, count + 1)
        return streams.end(kept)


def _create(size: int) -> tuple[str | None, str | None]:
    """A new file of zeros and its path, or the reason why there is none."""
    wanted = f"{-(-size >> 20)} MiB of {_FOLDER}"
    try:
        room = os.statvfs(_FOLDER)
        free = room.f_bavail * room.f_frsize
        if room.f_blocks and free < 2 * size:  # no blocks: without a limit
            return None, (
                f"{wanted} and as many for NCCL and data loaders are needed, {free >> 20} are free; give a "
                "container more (--shm-size)"
            )
        number, path = tempfile.mkstemp(prefix="megatron-taco-", dir=_FOLDER)
    except OSError as error:
        return None, str(error)
    try:
        os.ftruncate(number, size)
    finally:
        os.close(number)
    return path, None
