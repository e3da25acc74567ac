"""Payloads through pinned host memory, for the ranks of one host without peer access."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from megatron.compression.communication.host_memory import HostMemory, Part
from megatron.compression.communication.transport import OnSend, TorchTransport


class HostTransport(TorchTransport):
    """Exchanges by copy engines, which leave the multiprocessors alone; see ``HostMemory``.

    Args:
        memory: the group's.
        on_send: as for ``TorchTransport``; bytes are those of the same exchange over torch.distributed.
    """

    def __init__(self, memory: HostMemory, on_send: OnSend | None = None) -> None:
        super().__init__(memory.group, on_send)
        self.memory = memory

    def all_to_all_rows(
        self, rows: torch.Tensor, to: Sequence[int] | None, came: Sequence[int] | None
    ) -> tuple[torch.Tensor, Any]:
        """As over torch.distributed."""
        even = [len(rows) // self.world_size] * self.world_size
        to, came = to or even, came or even
        if sum(to) != len(rows) or not len(to) == len(came) == self.world_size:
            raise ValueError(f"splits {to} and {came} of {len(rows)} rows, {self.world_size} ranks")
        rows = rows.contiguous()
        received = rows.new_empty((sum(came), rows.shape[1]))
        self._report("all_to_all", rows.nbytes)
        sends, receives = _parts(rows, to), _parts(received, came)
        return received, self.memory.exchange(sends, receives, (rows, received))

    def all_gather(self, payload: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """As over torch.distributed."""
        payload = payload.contiguous()
        gathered = payload.new_empty((self.world_size, payload.numel()))
        self._report("all_gather", gathered.numel())
        size, address = payload.nbytes, gathered.data_ptr()
        into = [Part(address + rank * size, size) for rank in range(self.world_size)]
        own = [Part(payload.data_ptr(), size)] * self.world_size
        return gathered, self.memory.exchange(own, into, (payload, gathered))


def _parts(rows: torch.Tensor, counts: Sequence[int]) -> list[Part]:
    """Where each rank's rows lie."""
    address, size = rows.data_ptr(), rows.shape[1] * rows.itemsize
    ends = accumulate(counts, initial=0)
    return [Part(address + end * size, count * size) for end, count in zip(ends, counts, strict=False)]
