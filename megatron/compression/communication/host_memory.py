"""Exchanges of bytes through pinned host memory, for the ranks of one host without peer access.

The devices' copy engines move the bytes: a sender copies pieces into a ring that it shares with the receiver,
who copies them out, and each lets its stream wait for the ring's word. So both directions of a PCIe link
are in use at once, and the multiprocessors are free.

The word says how many pieces of a round of ``SLOTS`` lie in the ring. The sender waits for 0 and counts up; a
receiver waits for each piece and sets 0 after the last. So only one of them may write at a time, and what the
other waits for stays until it is seen. An exchange begins and ends with 0, in slot 0: it is always the same
commands, which a CUDA graph can replay. After one that broke off the sender waits and overwrites nothing.
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

from megatron.compression.communication.objects import gather_objects
from taco_kernels.common.graph_events import GraphObserver, observe

PIECES = 4
"""Of what a rank sends in one exchange: while one is copied out, the next is copied in."""
LEAST = 1 << 20
"""Bytes of a piece."""
SLOTS = 4
"""Pieces from one rank to another that may be under way."""
_LINE = 64
"""Bytes between words: those of different ranks share no cache line."""
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
    """A piece that is copied into a slot of a ring (``sends``) or out of one.

    Before, the ring's word must be ``awaits`` (a receiver: or more); it becomes ``says``. None: neither.
    """

    sends: bool
    peer: int
    offset: int
    """Into the peer's bytes."""
    size: int
    ring: int
    slot: int
    awaits: int | None
    says: int | None


@functools.lru_cache(maxsize=256)
def steps(rank: int, to: tuple[int, ...], came: tuple[int, ...]) -> tuple[Step, ...]:
    """What a rank does in an exchange of ``to`` and ``came`` bytes for each rank and from each, in order.
    Each step waits only for earlier steps of other ranks: nobody waits for ever, even on one stream."""
    world, result = len(to), []
    for sends, sizes in ((True, to), (False, came)):
        for distance in range(1, world):
            peer = (rank + distance if sends else rank - distance) % world
            ring = (rank if sends else peer) * (world - 1) + distance - 1
            # Known to both ends, who know what passes between them and no more.
            wanted = -(-sizes[peer] * (world - 1) // (PIECES * _LINE)) * _LINE
            piece = min(largest(world), max(LEAST, wanted))
            for number, offset in enumerate(range(0, sizes[peer], piece)):
                size, slot = min(piece, sizes[peer] - offset), number % SLOTS
                first, last = slot == 0, slot == SLOTS - 1 or offset + size == sizes[peer]
                awaits, says = (
                    (0 if first else None, slot + 1) if sends else (slot + 1, 0 if last else None)
                )
                step = Step(sends, peer, offset, size, ring, slot, awaits, says)
                result.append(((number, distance, not sends), step))
    return tuple(step for _, step in sorted(result))


def largest(world: int) -> int:
    """Bytes of a slot: whole pages, whatever the number of ranks."""
    return max((16 << 20) // world // mmap.PAGESIZE * mmap.PAGESIZE, LEAST)


class CopyEngines(GraphObserver[set[int]]):
    """Two CUDA streams of copies, with waits for values in memory; the driver's functions cost a fraction of
    torch's. They keep exchanges in order, in a capture too. A replay runs on other streams: it waits for the
    exchanges before it, and those after it wait for it.

    Raises: HostMemoryError: the driver does not know such waits.
    """

    def __init__(self, pinned: int, size: int) -> None:
        super().__init__(set)  # a graph's streams with exchanges
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
        self._queues = tuple(
            stream.cuda_stream for stream in self._streams
        )  # to the device, to host memory
        self.events: list[int] = []  # that nobody waits for
        self._replayed: int | None = (
            None  # stream of the last replay, if no exchange has waited for it
        )
        # Not by cudaHostRegister, whose failure torch would find after its next kernel.
        if failed := driver.cuMemHostRegister_v2(pinned, size, 3):  # portable and mapped
            raise HostMemoryError(f"cuMemHostRegister failed with error {failed}")
        self._pinned, mapped = pinned, address()
        try:
            check(driver.cuMemHostGetDevicePointer_v2(ctypes.byref(mapped), pinned, 0))
            self._to_device = mapped.value - pinned
            for queue in self._queues:  # where the device has no such waits, this says so
                check(driver.cuStreamWaitValue32_v2(queue, mapped, 0, 1))
        except HostMemoryError:
            self.close()
            raise
        observe(self)

    def close(self) -> None:
        """Unregister the memory."""
        self._driver.cuMemHostUnregister(self._pinned)

    def begin(self) -> None:
        """Let both streams wait for what has been launched, and for a replay on another stream."""
        current, replayed = self._current(), self._replayed
        self._put_after(current, *self._queues)
        if self.captured is None and replayed is not None:
            self._replayed = None
            if replayed != current:
                self._put_after(replayed, *self._queues)

    def replaying(self, content: set[int]) -> None:
        current, replayed = self._current(), self._replayed
        if replayed != current:
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
        """The calling thread's stream. A new thread (autograd's) has no context before torch needs one."""
        if not hasattr(self._threads, "ready"):
            check(self._driver.cuCtxSetCurrent(self._context))
            self._threads.ready = True
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if self.captured is not None:
            self.captured.add(stream)
        return stream

    def _recorded(self, stream: int) -> int:
        if not self.events:
            made = ctypes.c_void_p()
            check(self._driver.cuEventCreate(ctypes.byref(made), 2))  # without times
            self.events.append(made.value or 0)
        event = self.events.pop()
        check(self._driver.cuEventRecord(event, stream))
        return event

    def copy(self, step: Step, host: int, device: int, word: int) -> None:
        """Copy between two addresses as a step says, whose ring has its word at a third."""
        driver, queue, word = self._driver, self._queues[step.sends], word + self._to_device
        if step.awaits is not None:  # 1: until the word is equal, 0: until it is not less
            check(driver.cuStreamWaitValue32_v2(queue, word, step.awaits, int(step.sends)))
        if step.sends:
            check(driver.cuMemcpyDtoHAsync_v2(host, device, step.size, queue))
        else:
            check(driver.cuMemcpyHtoDAsync_v2(device, host, step.size, queue))
        if step.says is not None:  # after the copy
            check(driver.cuStreamWriteValue32_v2(queue, word, step.says, 0))

    def copy_own(self, to: int, source: int, size: int) -> None:
        """Copy what stays on the device."""
        check(self._driver.cuMemcpyDtoDAsync_v2(to, source, size, self._queues[False]))

    def end(self, kept: Any) -> "_UnderWay":
        """A handle whose ``wait`` lets later work wait for both streams; it keeps ``kept``."""
        return _UnderWay(
            self, [self._recorded(queue) for queue in self._queues], self.captured, kept
        )

    def let_wait(self, events: list[int], captured: set[int] | None) -> None:
        """Let the current stream wait for events of a capture (None: of none), which are free then. A capture
        need not wait for others: the device was idle when it began, and its replays wait."""
        current = self._current()
        for event in events if captured is self.captured else ():
            check(self._driver.cuStreamWaitEvent(current, event, 0))
        self.events += events
        events.clear()


def check(failed: int) -> None:
    """Raise HostMemoryError where a call of the driver has failed."""
    if failed:
        raise HostMemoryError(f"a call of the CUDA driver failed with error {failed}")


class _UnderWay:
    """The copies of one exchange."""

    def __init__(
        self, engines: CopyEngines, events: list[int], captured: set[int] | None, kept: Any
    ) -> None:
        self._engines, self._events, self._captured, self._kept = engines, events, captured, kept

    def wait(self) -> None:
        """Let the current stream wait."""
        self._engines.let_wait(self._events, self._captured)
        self._kept = None  # what is allocated in its place is used after the events

    def __del__(self) -> None:
        if self._events:  # nobody has waited, but memory that is copied into must not be another's
            with contextlib.suppress(HostMemoryError):  # at the process's end
                self.wait()


class HostMemory:
    """Memory that the ranks of a group share, and their exchanges through it, the same in the same order on
    all. It is 64 MiB at 2 ranks, 192 at 4, 448 at 8, until the process ends. If a rank dies the others'
    streams wait, until the launcher or a watchdog ends them. Construction is collective, and raises
    HostMemoryError on every rank."""

    def __init__(
        self, group: dist.ProcessGroup, streams: Callable[[int, int], Any] = CopyEngines
    ) -> None:
        self.group, self.rank, self.world = group, group.rank(), group.size()
        pairs = self.world * (self.world - 1)
        self._rings = -(-pairs * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE
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

    def _map(self, path: str, size: int, streams: Callable[[int, int], CopyEngines]) -> str | None:
        """Map a file and make the streams; why it cannot be done, or None."""
        try:
            with open(path, "r+b") as file:
                own = (
                    (self.world - 1) * SLOTS * self._slot
                )  # touched first by the sender: near to its device
                os.posix_fallocate(file.fileno(), self._rings + self.rank * own, own)
                self._memory = mmap.mmap(file.fileno(), size)
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._streams = streams(self._base, size)
        except Exception as error:  # of any kind: the other ranks wait to be told
            return str(error) or repr(error)  # other containers of a host have other folders
        return None

    def _told(self, word: str | None, problem: str | None) -> list:
        """Every rank's word, or HostMemoryError on all if one has a problem. Collective."""
        views = gather_objects((word, problem), self.group)
        for rank, (_, problem) in enumerate(views):
            if problem:
                raise HostMemoryError(f"rank {rank}: {problem}")
        return [word for word, _ in views]

    def exchange(
        self, sends: Sequence[DeviceBytes], receives: Sequence[DeviceBytes], kept: Any
    ) -> Any:
        """Start to send ``sends[r]`` to rank r and to fill ``receives[r]`` from it, parts of ``kept``; a
        handle, whose ``wait`` lets later work wait for it. What is sent must not change before."""
        streams, own = self._streams, self.rank
        streams.begin()
        if sends[own].size:
            streams.copy_own(receives[own].address, sends[own].address, sends[own].size)
        sizes = (tuple(part.size for part in parts) for parts in (sends, receives))
        for step in steps(own, *sizes):
            host = self._base + self._rings + (step.ring * SLOTS + step.slot) * self._slot
            device = (sends if step.sends else receives)[step.peer].address + step.offset
            streams.copy(step, host, device, self._base + step.ring * _LINE)
        return streams.end(kept)


def _create(size: int) -> tuple[str | None, str | None]:
    """A new file of zeros and its path, or the reason why there is none."""
    try:
        room = os.statvfs(_FOLDER)
        free = room.f_bavail * room.f_frsize
        if room.f_blocks and free < 2 * size:  # no blocks: without a limit
            return None, (
                f"{-(-size >> 20)} MiB of {_FOLDER} and as many for NCCL and data loaders are needed, "
                f"{free >> 20} are free; give a container more (--shm-size)"
            )
        with tempfile.NamedTemporaryFile(
            prefix="megatron-taco-", dir=_FOLDER, delete=False
        ) as file:
            file.truncate(size)
    except OSError as error:
        return None, str(error)
    return file.name, None
