"""How payloads travel: byte exchanges over a process group, each one reported with what it sends."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.communication.ledger import bytes_sent
from megatron.compression.communication.work import Work, join

OnSend = Callable[[str, int], None]
"""Called with (operation, bytes this rank sends) for every call handed to the backend."""


class TorchTransport:
    """Payload exchanges over torch.distributed (NCCL, gloo).

    Payloads are uint8: both backends take it, and gloo refuses the float8 dtypes.

    Args:
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
        self.on_send = on_send

    def fuses(self, codec: Codec) -> bool:
        """Whether the transport does this codec's collectives in whole, by the three methods below."""
        return False

    fused_all_reduce: Callable[..., Work]
    fused_reduce_scatter: Callable[..., Work]
    fused_all_gather: Callable[..., Work]

    def all_to_all(self, payloads: torch.Tensor) -> tuple[torch.Tensor, Work | dist.Work]:
        """Start to send row r of uint8 ``[W, bytes]`` to rank r.

        Returns: uint8 ``[W, bytes]``, row r from rank r once the handle has been waited for.
        """
        received = torch.empty_like(payloads)
        self._report("all_to_all", payloads.numel())
        if len(self.groups) == 1:
            return received, dist.all_to_all_single(received, payloads, group=self.group, async_op=True)
        parts, works = [], []
        for group, part in zip(self.groups, payloads.tensor_split(len(self.groups), dim=1), strict=True):
            parts.append(torch.empty_like(part, memory_format=torch.contiguous_format))
            works.append(dist.all_to_all_single(parts[-1], part.contiguous(), group=group, async_op=True))
        return received, shared_between(received, parts, works)

    def all_to_all_rows(
        self, rows: torch.Tensor, to: Sequence[int] | None, came: Sequence[int] | None
    ) -> tuple[torch.Tensor, Work | dist.Work]:
        """Start to send ``[n, size]`` of any dtype, the first ``to[0]`` rows to rank 0 and so on.

        Args:
            to, came: rows for each rank and from each; None: the same number for all.
        Returns: ``[sum(came), size]``, in the order of the senders once the handle has been waited for.
        """
        received = rows.new_empty((len(rows) if came is None else sum(came), rows.shape[1]))
        self._report("all_to_all", rows.nbytes)
        if len(self.groups) == 1:
            return received, _send_rows(received, rows, to, came, self.group)
        parts, works = [], []
        for group, part in zip(self.groups, rows.tensor_split(len(self.groups), dim=1), strict=True):
            parts.append(rows.new_empty((len(received), part.shape[1])))
            works.append(_send_rows(parts[-1], part, to, came, group))
        return received, shared_between(received, parts, works)

    def all_gather(self, payload: torch.Tensor) -> tuple[torch.Tensor, Work | dist.Work]:
        """Start to gather uint8 ``[bytes]`` of every rank into uint8 ``[W, bytes]``."""
        gathered = payload.new_empty((self.world_size, payload.numel()))
        self._report("all_gather", gathered.numel())
        if len(self.groups) == 1:
            flat = gathered.view(-1)
            return gathered, dist.all_gather_into_tensor(flat, payload, group=self.group, async_op=True)
        parts, works = [], []
        for group, part in zip(self.groups, payload.tensor_split(len(self.groups)), strict=True):
            parts.append(payload.new_empty((self.world_size, part.numel())))
            works.append(dist.all_gather_into_tensor(parts[-1].view(-1), part, group=group, async_op=True))
        return gathered, shared_between(gathered, parts, works)

    def _report(self, operation: str, buffer_bytes: int) -> None:
        if self.on_send is not None:
            self.on_send(operation, bytes_sent(operation, buffer_bytes, self.world_size))


def _send_rows(
    received: torch.Tensor,
    rows: torch.Tensor,
    to: Sequence[int] | None,
    came: Sequence[int] | None,
    group: dist.ProcessGroup,
) -> dist.Work:
    sizes = {"output_split_sizes": came, "input_split_sizes": to}
    return dist.all_to_all_single(received, rows.contiguous(), **sizes, group=group, async_op=True)


def shared_between(whole: torch.Tensor, parts: list[torch.Tensor], works: list[dist.Work]) -> Work:
    """Parts ``[W, some bytes]`` of ``whole [W, bytes]`` that are under way on several communicators."""
    return join([Work(work) for work in works]).then(lambda _: torch.cat(parts, dim=1, out=whole))
