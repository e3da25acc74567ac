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
        return self.all_to_all_rows(payloads, None, None)

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
        sizes = {"output_split_sizes": came, "input_split_sizes": to}

        def start(received: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
            return dist.all_to_all_single(received, rows.contiguous(), **sizes, group=group, async_op=True)

        return received, self._start(start, received, rows)

    def all_gather(self, payload: torch.Tensor) -> tuple[torch.Tensor, Work | dist.Work]:
        """Start to gather uint8 ``[bytes]`` of every rank into uint8 ``[W, bytes]``."""
        gathered = payload.new_empty((self.world_size, payload.numel()))
        self._report("all_gather", gathered.numel())

        def start(gathered: torch.Tensor, payload: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
            return dist.all_gather_into_tensor(gathered.view(-1), payload, group=group, async_op=True)

        return gathered, self._start(start, gathered, payload)

    def any_rank(self, flag: torch.Tensor) -> bool:
        """Whether ``flag``, uint8 ``[]``, is set on any rank of the group. Counted; the host waits for it."""
        found = flag.to(torch.int32)[None]
        self._report("all_reduce", found.nbytes)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def _start(
        self, start: Callable[..., dist.Work], whole: torch.Tensor, x: torch.Tensor
    ) -> Work | dist.Work:
        """``start(whole, x, group)``, or the same for a share of the last dimension on each communicator."""
        if len(self.groups) == 1:
            return start(whole, x, self.group)
        parts, works = [], []
        for group, share in zip(self.groups, x.tensor_split(len(self.groups), dim=-1), strict=True):
            parts.append(whole.new_empty((len(whole), share.shape[-1])))
            works.append(start(parts[-1], share, group))
        return shared_between(whole, parts, works)

    def _report(self, operation: str, buffer_bytes: int) -> None:
        if self.on_send is not None:
            self.on_send(operation, bytes_sent(operation, buffer_bytes, self.world_size))


def shared_between(whole: torch.Tensor, parts: list[torch.Tensor], works: list[dist.Work]) -> Work:
    """Parts ``[W, some bytes]`` of ``whole [W, bytes]`` that are under way on several communicators."""
    return join([Work(work) for work in works]).then(lambda _: torch.cat(parts, dim=1, out=whole))
