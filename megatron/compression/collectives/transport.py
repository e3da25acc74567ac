"""How payloads travel: byte exchanges over a process group, each one reported with what it sends."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.compression.telemetry import bytes_sent

OnSend = Callable[[str, int], None]
"""Called with (operation, bytes this rank sends) for every call handed to the backend."""


class TorchTransport:
    """Payload exchanges over torch.distributed (NCCL, gloo).

    Payloads are uint8: both backends take it, and gloo refuses the float8 dtypes.

    Args:
        group: the process group.
        on_send: receives the operation's name and its bytes; None when nobody counts.
    """

    def __init__(self, group: dist.ProcessGroup, on_send: OnSend | None = None) -> None:
        self.group = group
        self.world_size = group.size()
        self.rank = group.rank()
        self.on_send = on_send

    def fuses(self, codec) -> bool:
        """Whether ``fused_all_reduce`` and its like exist and take this codec; see symmetric.py."""
        return False

    def all_to_all(
        self, wires: torch.Tensor, async_op: bool = False
    ) -> tuple[torch.Tensor, dist.Work | None]:
        """Send row r of uint8 ``[W, bytes]`` to rank r.

        Returns:
            uint8 ``[W, bytes]``, row r from rank r, and the work handle when ``async_op``.
        """
        received = torch.empty_like(wires)
        work = dist.all_to_all_single(received, wires, group=self.group, async_op=async_op)
        self._report("all_to_all", wires.numel())
        return received, work

    def all_gather(self, wire: torch.Tensor, async_op: bool = False) -> tuple[torch.Tensor, dist.Work | None]:
        """Gather uint8 ``[bytes]`` of every rank into uint8 ``[W, bytes]``."""
        gathered = wire.new_empty((self.world_size, wire.numel()))
        work = dist.all_gather_into_tensor(gathered.view(-1), wire, group=self.group, async_op=async_op)
        self._report("all_gather", gathered.numel())
        return gathered, work

    def _report(self, operation: str, buffer_bytes: int) -> None:
        if self.on_send is not None:
            self.on_send(operation, bytes_sent(operation, buffer_bytes, self.world_size))
