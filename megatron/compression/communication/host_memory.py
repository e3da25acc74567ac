"""Exchanges of bytes through pinned host memory, for the ranks of one host without peer access.

NCCL moves such bytes with kernels. Here the devices' copy engines do: a sender copies pieces into a ring that
it shares with the receiver, who copies them out, and each lets its stream wait for the other's counter. So
both directions of a PCIe link are in use at once, and no multiprocessor is taken from computation.
"""

import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

PIECES = 4
"""Of what a rank sends in one exchange: while one is copied out, the next is copied in."""
LEAST, MOST = 1 << 20, 4 << 20
"""Bytes of a piece."""
SLOTS = 4
"""Pieces from one rank to another that may be under way."""
_LINE = 64
"""Bytes between counters: those of different ranks share no cache line."""
_FOLDER = "/dev/shm"


class HostMemoryError(RuntimeError):
    """The ranks of a group cannot share pinned memory."""


class Step(NamedTuple):
    """A piece on its way into a ring, or out of one."""

    sends: bool
    peer: int
    offset: int
    """Into the peer's bytes."""
    size: int


@functools.lru_cache(maxsize=256)
def steps(rank: int, to: tuple[int, ...], came: tuple[int, ...]) -> tuple[Step, ...]:
    """What a rank does in an exchange, in order.

    Each step waits only for steps that come earlier on the ranks that take them, whatever the sizes are, so
    that nobody waits for ever, even if all steps of a rank run one after the other.

    Args:
        to, came: bytes for each rank and from each; a rank's own are left out.
    """
    world, result = len(to), []
    for sends, sizes in ((True, to), (False, came)):
        for distance in range(1, world):
            peer = (rank + distance if sends else rank - distance) % world
            piece = _piece(sizes[peer], world)
            for number, offset in enumerate(range(0, sizes[peer], piece)):
                step = Step(sends, peer, offset, min(piece, sizes[peer] - offset))
                result.append(((number, distance, not sends), step))
    return tuple(step for _, step in sorted(result))


def _piece(size: int, world: int) -> int:
    """Bytes of a piece; known to both ends, who know what passes between them and no more."""
    return min(MOST, max(LEAST, -(-size * (world - 1) // PIECES)))


class Streams(Protocol):
    """Two queues of copies and waits: what goes to host memory, and what comes from it. See
    ``CopyEngines``."""

    def begin(self) -> None:
        """Let both queues wait for what has been launched."""

    def copy(self, sends: bool, host: int, device: int, size: int) -> None:
        """Copy ``size`` bytes between two addresses."""

    def await_counter(self, sends: bool, counter: int, value: int) -> None:
        """Let a queue wait until the counter at an address is ``value`` or more."""

    def set_counter(self, sends: bool, counter: int, value: int) -> None:
        """Set a counter behind the copies before it."""

    def end(self, kept: Any) -> Any:
        """A handle whose ``wait`` lets later work wait for both queues; ``kept`` is kept alive until then."""


class CopyEngines:
    """Two CUDA streams of copies, with waits for values in memory.

    Raises: HostMemoryError: the driver does not know such waits.
    """

    def __init__(self, pinned: int, size: int) -> None:
        failed = int(torch.cuda.cudart().cudaHostRegister(pinned, size, 3))  # portable and mapped
        if failed:
            raise HostMemoryError(f"cudaHostRegister failed with error {failed}")
        self._driver = driver = ctypes.CDLL("libcuda.so.1")
        pointer, number = ctypes.c_uint64, ctypes.c_uint32
        driver.cuMemcpyDtoHAsync_v2.argtypes = [pointer, pointer, ctypes.c_size_t, pointer]
        driver.cuMemcpyHtoDAsync_v2.argtypes = [pointer, pointer, ctypes.c_size_t, pointer]
        for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
            if not hasattr(driver, name):
                raise HostMemoryError(f"the driver has no {name}")
            getattr(driver, name).argtypes = [pointer, pointer, number, number]
        mapped = pointer()
        self._check(driver.cuMemHostGetDevicePointer_v2(ctypes.byref(mapped), ctypes.c_void_p(pinned), 0))
        self._to_device = mapped.value - pinned
        self._streams = {sends: torch.cuda.Stream() for sends in (True, False)}
        self._raw = {sends: stream.cuda_stream for sends, stream in self._streams.items()}

    @staticmethod
    def _check(failed: int) -> None:
        if failed:
            raise HostMemoryError(f"a call of the CUDA driver failed with error {failed}")

    def begin(self) -> None:
        event = torch.cuda.current_stream().record_event()
        for stream in self._streams.values():
            stream.wait_event(event)

    def copy(self, sends: bool, host: int, device: int, size: int) -> None:
        if sends:
            self._check(self._driver.cuMemcpyDtoHAsync_v2(host, device, size, self._raw[sends]))
        else:
            self._check(self._driver.cuMemcpyHtoDAsync_v2(device, host, size, self._raw[sends]))

    def await_counter(self, sends: bool, counter: int, value: int) -> None:
        address = counter + self._to_device  # 0: until it is at least the value, in wrapping arithmetic
        self._check(self._driver.cuStreamWaitValue32_v2(self._raw[sends], address, value & 0xFFFFFFFF, 0))

    def set_counter(self, sends: bool, counter: int, value: int) -> None:
        address = counter + self._to_device
        self._check(self._driver.cuStreamWriteValue32_v2(self._raw[sends], address, value & 0xFFFFFFFF, 0))

    def end(self, kept: Any) -> "_UnderWay":
        return _UnderWay([stream.record_event() for stream in self._streams.values()], kept)


class _UnderWay:
    """The copies of one exchange."""

    def __init__(self, events: list[torch.cuda.Event], kept: Any) -> None:
        self._events, self._kept = events, kept

    def wait(self) -> None:
        """Let the current stream wait."""
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)
        self._events, self._kept = [], None  # what is allocated in their place is used behind the events


class HostMemory:
    """Memory that the ranks of a group share, and their exchanges through it. Construction is collective.

    It has ``SLOTS`` pieces of up to 4 MiB from each rank to each other: 32 MiB at 2 ranks, 192 at 4. As with
    NCCL, all ranks make the same exchanges in the same order. A rank that is gone leaves the others' streams
    waiting, until the launcher or NCCL's watchdog ends them.

    Args:
        group: ranks of one host.
        streams: made of the memory's address and size.

    Raises:
        HostMemoryError: the same on every rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, streams: Callable[[int, int], Streams] = CopyEngines
    ) -> None:
        self.group, self.rank, self.world = group, group.rank(), group.size()
        pairs = self.world * (self.world - 1)
        self._rings = -(-2 * pairs * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._rings + pairs * SLOTS * MOST
        path, problem = None, None
        if self.rank == 0:
            path, problem = _create(size)
        path = self._told(path, problem)[0]
        try:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), size)
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._streams = streams(self._base, size)
        except (OSError, HostMemoryError) as error:  # other containers of a host have other folders
            problem = str(error)
        try:
            self._told(None, problem)
        finally:
            if self.rank == 0:
                os.unlink(path)
        self._sent, self._got = [0] * self.world, [0] * self.world

    def _told(self, word: str | None, problem: str | None) -> list:
        """Every rank's word, or HostMemoryError on all if one has a problem. Collective."""
        views: list = [None] * self.world
        dist.all_gather_object(views, (word, problem), group=self.group)
        for rank, (_, problem) in enumerate(views):
            if problem:
                raise HostMemoryError(f"rank {rank}: {problem}")
        return [word for word, _ in views]

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Any:
        """Start to send ``sends[r]`` to rank r and to fill ``receives[r]`` from it: contiguous uint8.

        Returns: a handle, whose ``wait`` lets later work wait for it. What is sent must not change before.
        """
        streams, rank = self._streams, self.rank
        receives[rank].copy_(sends[rank])
        streams.begin()
        sizes = (tuple(part.numel() for part in parts) for parts in (sends, receives))
        for step in steps(rank, *sizes):
            parts, counts = (sends, self._sent) if step.sends else (receives, self._got)
            pair = self._pair(rank, step.peer) if step.sends else self._pair(step.peer, rank)
            count, full, empty = counts[step.peer], self._base + 2 * pair * _LINE, 0
            empty = full + _LINE
            host = self._base + self._rings + (pair * SLOTS + count % SLOTS) * MOST
            if step.sends:
                streams.await_counter(True, empty, count - SLOTS + 1)
            else:
                streams.await_counter(False, full, count + 1)
            streams.copy(step.sends, host, parts[step.peer].data_ptr() + step.offset, step.size)
            streams.set_counter(step.sends, full if step.sends else empty, count + 1)
            counts[step.peer] = count + 1
        return streams.end((sends, receives))

    def _pair(self, sender: int, receiver: int) -> int:
        return sender * (self.world - 1) + receiver - (receiver > sender)


def _create(size: int) -> tuple[str | None, str | None]:
    """A new file of zeros and its path, or the reason why there is none."""
    try:
        number, path = tempfile.mkstemp(prefix="megatron-taco-", dir=_FOLDER)
    except OSError as error:
        return None, str(error)
    try:
        os.posix_fallocate(number, 0, size)  # else a full folder would be found by a signal
    except OSError as error:
        os.unlink(path)
        return None, f"{size >> 20} MiB of {_FOLDER}: {error.strerror}; give a container more (--shm-size)"
    finally:
        os.close(number)
    return path, None
