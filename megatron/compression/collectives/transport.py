"""How payloads travel: byte exchanges over a process group, each one reported with what it sends."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.compression.communication.ledger import bytes_sent

OnSend = Callable[[str, int], None]
"""Called with (operation, bytes this rank sends) for every call handed to the backend."""


class TorchTransport:
    """Payload exchanges over torch.distributed (NCCL, gloo).

    Payloads are uint8: both backends take it, and gloo refuses the float8 dtypes.

    Args:
        group: the process group.
        on_send: receives the operation's name and its bytes; None when nobody counts.
        more_groups: further process groups of the same ranks; each takes its share of every payload. One
            communicator does not fill some links (TCP).
    """

    overlaps = True
    """Whether a collective under way leaves the device to other work."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_send: OnSend | None = None,
        more_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.group = group
        self.groups = (group, *more_groups)
        self.world_size = group.size()
        self.rank = group.rank()
        self.on_send = on_send

    def fuses(self, codec, async_op: bool = False) -> bool:
        """Whether ``fused_all_reduce`` and its like take this codec's collective; see symmetric.py.

        Args:
            codec: of the collective.
            async_op: whether the caller has something to do meanwhile.
        """
        return False

    def all_to_all(
        self, wires: torch.Tensor, async_op: bool = False
    ) -> tuple[torch.Tensor, dist.Work | None]:
        """Send row r of uint8 ``[W, bytes]`` to rank r.

        Returns:
            uint8 ``[W, bytes]``, row r from rank r, and the work handle when ``async_op``.
        """
        received = torch.empty_like(wires)
        self._report("all_to_all", wires.numel())
        if len(self.groups) == 1:
            return received, dist.all_to_all_single(received, wires, group=self.group, async_op=async_op)
        parts, works = [], []
        for group, part in zip(self.groups, wires.tensor_split(len(self.groups), dim=1), strict=True):
            parts.append(torch.empty_like(part, memory_format=torch.contiguous_format))
            works.append(dist.all_to_all_single(parts[-1], part.contiguous(), group=group, async_op=True))
        return _joined(received, parts, works, async_op)

    def all_gather(self, wire: torch.Tensor, async_op: bool = False) -> tuple[torch.Tensor, dist.Work | None]:
        """Gather uint8 ``[bytes]`` of every rank into uint8 ``[W, bytes]``."""
        gathered = wire.new_empty((self.world_size, wire.numel()))
        self._report("all_gather", gathered.numel())
        if len(self.groups) == 1:
            flat = gathered.view(-1)
            return gathered, dist.all_gather_into_tensor(flat, wire, group=self.group, async_op=async_op)
        parts, works = [], []
        for group, part in zip(self.groups, wire.tensor_split(len(self.groups)), strict=True):
            parts.append(wire.new_empty((self.world_size, part.numel())))
            works.append(dist.all_gather_into_tensor(parts[-1].view(-1), part, group=group, async_op=True))
        return _joined(gathered, parts, works, async_op)

    def _report(self, operation: str, buffer_bytes: int) -> None:
        if self.on_send is not None:
            self.on_send(operation, bytes_sent(operation, buffer_bytes, self.world_size))


class JoinedWork:
    """Parts of a payload under way on several communicators; ``wait`` puts them together."""

    def __init__(self, whole: torch.Tensor, parts: list[torch.Tensor], works: list[dist.Work]) -> None:
        self._whole, self._parts, self._works = whole, parts, works

    def wait(self) -> None:
        """Wait for all parts, as the current stream sees it."""
        for work in self._works:
            work.wait()
        torch.cat(self._parts, dim=1, out=self._whole)
        self._parts, self._works = [], []


def _joined(whole: torch.Tensor, parts: list, works: list, async_op: bool):
    work = JoinedWork(whole, parts, works)
    if async_op:
        return whole, work
    work.wait()
    return whole, None
