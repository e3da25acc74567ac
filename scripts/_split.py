"""Uncompressed collectives over as many communicators as compressed payloads have: torch.distributed's
functions (and megatron-core's names for them) split large tensors into parts, one on each communicator."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from megatron.compression.communication import Work
from megatron.compression.communication.transport import new_groups
from megatron.compression.communication.work import join
from megatron.compression.patches import symbols

LEAST_BYTES = 2**20
"""Of a tensor that is split."""
LEAST_VALUES = 128
"""Of a row that is split."""

_groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
_collecting: list[list[Work]] = []


def split_over(groups: Iterable[dist.ProcessGroup], communicators: int) -> None:
    """Split what goes over these groups from now on. Collective over all ranks of the job."""
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        _groups[tuple(ranks)] = [group, *new_groups([ranks] * (communicators - 1))]


def install() -> None:
    """Replace the collectives; nothing changes until ``split_over`` has been called."""
    from megatron.core.distributed import param_and_grad_buffer

    for name, wrap in (
        ("all_reduce", split_all_reduce),
        ("all_gather_into_tensor", split_all_gather),
        ("reduce_scatter_tensor", split_reduce_scatter),
        ("all_to_all_single", split_all_to_all),
    ):
        symbols.replace(dist, name, ("group", "async_op"), wrap, lasting=True)
    names = {
        "dist_all_gather_func": split_all_gather,
        "dist_reduce_scatter_func": split_reduce_scatter,
    }
    for name, wrap in names.items():
        function = getattr(param_and_grad_buffer, name)
        why = "both sides of a comparison use as many communicators"
        symbols.put(
            param_and_grad_buffer, name, wrap(getattr(function, "__wrapped__", function)), why
        )
    symbols.replace(param_and_grad_buffer, "_coalescing_manager", (), _coalescing, lasting=True)


class _Collected:
    """In the place of torch's manager: works that are waited for together."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def __enter__(self) -> "_Collected":
        _collecting.append(self.works)
        return self

    def __exit__(self, *_: object) -> None:
        _collecting.pop()

    def wait(self) -> None:
        """For all of them."""
        join(self.works).wait()


def _coalescing(original: Callable) -> Callable:
    def manager(group=None, device=None, async_ops=False):
        if _groups_of(group) is None:
            return original(group, device, async_ops)
        return _Collected()

    return manager


def _groups_of(group: dist.ProcessGroup | None) -> list[dist.ProcessGroup] | None:
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return _groups.get(tuple(ranks))


def _parted(tensor: torch.Tensor, group: dist.ProcessGroup | None, other: torch.Tensor) -> list:
    """The communicators for a tensor; none where it is not split."""
    # payloads (uint8) are split by our own transport
    if tensor.dtype == torch.uint8 or tensor.nbytes < LEAST_BYTES:
        return []
    contiguous = tensor.is_contiguous() and other.is_contiguous()
    return (_groups_of(group) or []) if contiguous else []


def _collected(work: dist.Work | Work | None, async_op: bool) -> dist.Work | Work | None:
    if async_op and _collecting:
        _collecting[-1].append(work if isinstance(work, Work) else Work(work))
    return work


def _started(
    start: Callable, came: Sequence, sent: Sequence, groups: list, async_op: bool
) -> Work | None:
    """``start(received, part, communicator)`` for every part; ``came`` and ``sent`` have any strides."""
    sent = [
        part.contiguous() for part in sent
    ]  # all of them first: what comes may lie in what is sent
    parts = [
        to if to.is_contiguous() else torch.empty(to.shape, dtype=to.dtype, device=to.device)
        for to in came
    ]
    works = [Work(start(*one)) for one in zip(parts, sent, groups, strict=True)]

    def finish(_: object) -> None:
        for to, part in zip(came, parts, strict=True):
            if part is not to:
                to.copy_(part)

    work = join(works).then(finish)
    return _collected(work, async_op) if async_op else work.wait()


def split_all_reduce(original: Callable) -> Callable:
    """In place, by flat parts."""

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not (groups := _parted(tensor, group, tensor)):
            return _collected(original(tensor, op, group, async_op), async_op)
        parts = tensor.view(-1).tensor_split(len(groups))
        return _started(
            lambda part, _, one: original(part, op, one, True), parts, parts, groups, async_op
        )

    return all_reduce


def split_all_gather(original: Callable) -> Callable:
    """By parts of what each rank sends."""

    def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
        if not (groups := _parted(output_tensor, group, input_tensor)):
            return _collected(original(output_tensor, input_tensor, group, async_op), async_op)
        columns = output_tensor.view(groups[0].size(), -1).tensor_split(len(groups), dim=1)
        sent = input_tensor.reshape(-1).tensor_split(len(groups))
        start = lambda came, part, one: original(came.view(-1), part, one, True)  # noqa: E731
        return _started(start, columns, sent, groups, async_op)

    return all_gather_into_tensor


def split_reduce_scatter(original: Callable) -> Callable:
    """By parts of what each rank keeps."""

    def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not (groups := _parted(input, group, output)):
            return _collected(original(output, input, op, group, async_op), async_op)
        columns = input.view(groups[0].size(), -1).tensor_split(len(groups), dim=1)
        kept = output.view(-1).tensor_split(len(groups))
        start = lambda came, part, one: original(came, part.view(-1), op, one, True)  # noqa: E731
        return _started(start, kept, columns, groups, async_op)

    return reduce_scatter_tensor


def split_all_to_all(original: Callable) -> Callable:
    """By parts of what goes to each rank; where ranks get different numbers of rows, by parts of a row.

    Such a message is split whatever its size, which the ranks do not know of each other's.
    """

    def all_to_all_single(
        output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        sizes = output_split_sizes, input_split_sizes
        equal = all(one is None for one in sizes)
        if equal:
            groups = _parted(input, group, output)
        else:
            long_rows = (
                input.dtype != torch.uint8 and input.dim() == 2 and input.shape[1] >= LEAST_VALUES
            )
            groups = (_groups_of(group) or []) if long_rows else []
        if not groups:
            return _collected(original(output, input, *sizes, group, async_op), async_op)
        rows = [x.view(groups[0].size(), -1) if equal else x for x in (input, output)]
        sent, kept = (x.tensor_split(len(groups), dim=1) for x in rows)
        start = lambda came, part, one: original(came, part, *sizes, one, True)  # noqa: E731
        return _started(start, kept, sent, groups, async_op)

    return all_to_all_single
