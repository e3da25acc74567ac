"""Byte exchanges between the GPUs of a host by their copy engines, for what runs behind a GEMM.

A collective's kernel takes multiprocessors from the GEMM that it should run behind; a copy between devices
does not. Each rank puts its payload where its peers can read it, all meet at a barrier (a kernel of a few
threads), and each copies what is meant for it. There are two places, used in turn: who passes the barrier of
an exchange has finished the copies of the one before it, so that one's place is free again and one barrier an
exchange is enough. A second one, behind the copies, would also keep back the GEMM: with
CUDA_DEVICE_MAX_CONNECTIONS=1 operations of all streams start in the order in which the host issued them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from taco_kernels.symmetric_memory.order import queue_behind_others, timeout_of

PLACES = 2
SMALLEST_PLACE = 1 << 20


class PeerMemory(Protocol):
    """Memory of which every rank has a part that all can read."""

    parts: Sequence[torch.Tensor]
    """uint8 ``[bytes]`` of every rank."""

    def barrier(self) -> None:
        """Meet the other ranks, on the current stream: what they wrote before it can be read after it."""


class SymmetricMemory:
    """``PeerMemory`` by torch's symmetric memory. Construction is collective and waits for the device.

    Args:
        group: ranks on one host with peer access.
        nbytes: of each rank's part.
        timeout: seconds that a barrier waits for a peer before it traps.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, timeout: float) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symm_mem.rendezvous(self._memory, group)
        self._timeout_ms = int(1000 * timeout)
        self.parts = [self._handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]

    def barrier(self) -> None:
        """See ``PeerMemory``."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)


class Exchange:
    """An exchange under way. ``wait`` before the result is read, and before the handle is dropped."""

    def __init__(self, payload: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self._payload, self._event = payload, event

    def wait(self) -> None:
        """Let the current stream wait for the copies."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._payload = self._event = None  # the payload's memory may serve others from here on


class CopyExchanges:
    """All-to-alls and all-gathers of bytes for one process group.

    All ranks make the same calls in the same order.
    Not for calls that a CUDA graph captures: the two places take turns, which a replay would not know of.
    Memory: two places of the largest payload's size, rounded up to a power of two.

    Args:
        group: ranks on one host with peer access.
        timeout: seconds that a kernel waits for a peer before it traps; the group's own unless given.
        memory: makes the memory for a number of bytes, collectively; symmetric memory unless given.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float | None = None,
        memory: Callable[[int], PeerMemory] | None = None,
    ) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        if memory is None:
            seconds = timeout_of(group) if timeout is None else timeout
            memory = functools.partial(SymmetricMemory, group, timeout=seconds)
        self._make = memory
        self._memory: PeerMemory | None = None
        self._place_bytes = 0
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None

    def all_to_all(self, wires: torch.Tensor) -> tuple[torch.Tensor, Exchange]:
        """Start sending row r of uint8 ``[W, bytes]`` to rank r; uint8 ``[W, bytes]``, row r from rank r.

        Raises:
            RuntimeError: the call is being captured.
        """
        nbytes = wires.shape[1]
        rows = slice(self.rank * nbytes, (self.rank + 1) * nbytes)
        return self._exchange(wires, wires[self.rank], rows)

    def all_gather(self, wire: torch.Tensor) -> tuple[torch.Tensor, Exchange]:
        """Start gathering uint8 ``[bytes]`` of every rank; uint8 ``[W, bytes]``. Raises as ``all_to_all``."""
        return self._exchange(wire, wire, slice(0, wire.numel()))

    def _exchange(self, payload: torch.Tensor, own: torch.Tensor, wanted: slice):
        """Offer ``payload``; take the bytes ``wanted`` of every other rank's, and ``own``."""
        if payload.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("exchanges by copy engines cannot be captured in a CUDA graph")
        self._reserve(payload)
        received = payload.new_empty((self.world_size, own.numel()))
        first = self._turn * self._place_bytes
        self._turn = (self._turn + 1) % PLACES
        with self._on_side_stream(payload):
            part = self._memory.parts[self.rank]
            part[first : first + payload.numel()].copy_(payload.reshape(-1))
            self._memory.barrier()
            for step in range(1, self.world_size):  # everybody reads from another
                peer = (self.rank + step) % self.world_size
                offered = self._memory.parts[peer][first + wanted.start : first + wanted.stop]
                received[peer].copy_(offered)
            received[self.rank].copy_(own)
            event = None
            if payload.is_cuda:
                event = torch.cuda.Event()
                event.record()
        return received, Exchange(payload, event)

    def _on_side_stream(self, payload: torch.Tensor):
        """The stream of the copies, after what the current stream has been given so far."""
        if not payload.is_cuda:
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(payload.device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        queue_behind_others(self._stream)
        return torch.cuda.stream(self._stream)

    def _reserve(self, payload: torch.Tensor) -> None:
        """Make room for a payload. Ranks agree without a word, as their payloads have one size."""
        if payload.numel() <= self._place_bytes:
            return
        if payload.is_cuda:  # peers may still read what is given up
            torch.cuda.synchronize()
        self._place_bytes = max(SMALLEST_PLACE, 1 << (payload.numel() - 1).bit_length())
        kept, self._memory = self._memory, self._make(PLACES * self._place_bytes)
        self._memory.barrier()
        if payload.is_cuda:
            torch.cuda.synchronize()
        del kept  # every rank has passed the barrier, so none reads it
