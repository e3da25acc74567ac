"""Uncompressed collectives over several communicators: the same number for both sides of a comparison.

One communicator does not fill a TCP link; compressed payloads use as many as
MEGATRON_COMPRESSION_COMMUNICATORS says. Here torch.distributed's functions (and megatron-core's names for
them) split large tensors into as many parts, a part on each communicator.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from megatron.compression import patches
from megatron.compression.communication import Work
from megatron.compression.communication.transport import new_groups
from megatron.compression.communication.work import join

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
        patches.replace(dist, name, ("group", "async_op"), wrap)
    names = {"dist_all_gather_func": split_all_gather, "dist_reduce_scatter_func": split_reduce_scatter}
    for name, wrap in names.items():
        function = getattr(param_and_grad_buffer, name)
        why = "both sides of a comparison use as many communicators"
        patches.put(param_and_grad_buffer, name, wrap(getattr(function, "__wrapped__", function)), why)
    patches.replace(param_and_grad_buffer, "_coalescing_manager", (), _coalescing)


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


def _parted(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """The communicators for a tensor; none where it is not split."""
    # payloads (uint8) are split by our own transport
    if tensor.dtype == torch.uint8 or tensor.nbytes < LEAST_BYTES or not tensor.is_contiguous():
        return []
    return _groups_of(group) or []


def _has_long_rows(tensor: torch.Tensor) -> bool:
    return tensor.dtype != torch.uint8 and tensor.dim() == 2 and tensor.shape[1] >= LEAST_VALUES


def _whole(work: dist.Work | None, async_op: bool) -> dist.Work | None:
    if async_op and _collecting:
        _collecting[-1].append(Work(work))
    return work


def _started(works: list, finish: Callable[[], None], async_op: bool) -> Work | None:
    work = join([Work(one) for one in works]).then(lambda _: finish())
    if not async_op:
        return work.wait()
    if _collecting:
        _collecting[-1].append(work)
    return work


def split_all_reduce(original: Callable) -> Callable:
    """In place, by flat parts."""

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        groups = _parted(tensor, group)
        if not groups:
            return _whole(original(tensor, op, group, async_op), async_op)
        parts = tensor.view(-1).tensor_split(len(groups))
        works = [original(part, op, one, True) for part, one in zip(parts, groups, strict=True)]
        return _started(works, lambda: None, async_op)

    return all_reduce


def split_all_gather(original: Callable) -> Callable:
    """By parts of what each rank sends."""

    def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
        groups = _parted(output_tensor, group) if input_tensor.is_contiguous() else []
        if not groups:
            return _whole(original(output_tensor, input_tensor, group, async_op), async_op)
        rows = output_tensor.view(groups[0].size(), -1)
        columns = rows.tensor_split(len(groups), dim=1)
        parts = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in columns]
        sent = input_tensor.reshape(-1).tensor_split(len(groups))
        works = [original(p.view(-1), s, g, True) for p, s, g in zip(parts, sent, groups, strict=True)]
        return _started(works, lambda: [c.copy_(p) for c, p in zip(columns, parts, strict=True)], async_op)

    return all_gather_into_tensor


def split_reduce_scatter(original: Callable) -> Callable:
    """By parts of what each rank keeps."""

    def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        groups = _parted(input, group) if output.is_contiguous() else []
        if not groups:
            return _whole(original(output, input, op, group, async_op), async_op)
        sent = [c.contiguous() for c in input.view(groups[0].size(), -1).tensor_split(len(groups), dim=1)]
        kept = output.view(-1).tensor_split(len(groups))
        parts = [torch.empty_like(one) for one in kept]  # output may be a part of input
        works = [original(p, s.view(-1), op, g, True) for p, s, g in zip(parts, sent, groups, strict=True)]
        return _started(works, lambda: [k.copy_(p) for k, p in zip(kept, parts, strict=True)], async_op)

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
            groups = _parted(input, group) if output.is_contiguous() else []
        else:
            groups = (_groups_of(group) or []) if _has_long_rows(input) else []
        if not groups:
            return _whole(original(output, input, *sizes, group, async_op), async_op)
        rows = [x.view(groups[0].size(), -1) if equal else x for x in (input, output)]
        sent, kept = (x.tensor_split(len(groups), dim=1) for x in rows)
        sent = [one.contiguous() for one in sent]
        parts = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in kept]
        works = [original(p, s, *sizes, g, True) for p, s, g in zip(parts, sent, groups, strict=True)]
        return _started(works, lambda: [k.copy_(p) for k, p in zip(kept, parts, strict=True)], async_op)

    return all_to_all_single
