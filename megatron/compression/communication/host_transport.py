"""Payloads through pinned host memory, for the ranks of one host without peer access."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.compression.communication.host_memory import HostMemory
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
        rows = rows.contiguous()
        received = rows.new_empty((sum(came), rows.shape[1]))
        self._report("all_to_all", rows.nbytes)
        sent, got = (list(whole.split(list(sizes))) for whole, sizes in ((rows, to), (received, came)))
        return received, self._exchange(sent, got)

    def all_gather(self, payload: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """As over torch.distributed."""
        gathered = payload.new_empty((self.world_size, payload.numel()))
        self._report("all_gather", gathered.numel())
        return gathered, self._exchange([payload.contiguous()] * self.world_size, list(gathered))

    def _exchange(self, sent: list[torch.Tensor], got: list[torch.Tensor]) -> Any:
        return self.memory.exchange([_bytes(part) for part in sent], [_bytes(part) for part in got])


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1).view(torch.uint8)
