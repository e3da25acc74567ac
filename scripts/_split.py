"""Split uncompressed collectives over several communicators, as compressed payloads are.

One communicator does not fill a TCP link, so payloads may travel over several. A benchmark that
compares them with an uncompressed side gives that side as many. For this, torch.distributed's
functions (and the names that megatron-core has for them) split a large tensor into parts, one on
each communicator.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron.compression.communication import Work
from megatron.compression.communication.transport import new_groups
from megatron.compression.communication.work import join
from megatron.compression.patches import symbols

SMALLEST_TENSOR = 2**20
"""Bytes of a tensor that is split."""
SHORTEST_ROW = 128
"""Values in a row that is split."""

Groups = list[dist.ProcessGroup]
"""The communicators of one group of ranks, the group itself first."""
Handle = dist.Work | Work | None
"""What a collective returns."""

_groups: dict[tuple[int, ...], Groups] = {}
"""By ranks: the communicators that ``split_over`` was called for."""
_collecting: list[list[Work]] = []
"""For each open coalescing manager the works that were started in it."""


def split_over(groups: Iterable[dist.ProcessGroup], communicators: int) -> None:
    """Split what goes over these groups from now on. Collective over all ranks of the job."""
    for group in groups:
        # The same ranks may have groups of several names, so that ranks are the key.
        ranks = dist.get_process_group_ranks(group)
        more = new_groups([ranks] * (communicators - 1))
        _groups[tuple(ranks)] = [group, *more]


def install() -> None:
    """Replace the collectives. Nothing changes until ``split_over`` has been called."""
    from megatron.core.distributed import param_and_grad_buffer

    replacements = {
        "all_reduce": split_all_reduce,
        "all_gather_into_tensor": split_all_gather,
        "reduce_scatter_tensor": split_reduce_scatter,
        "all_to_all_single": split_all_to_all,
    }
    for name, replacement in replacements.items():
        symbols.around(dist, name, ("group", "async_op"), replacement, lasting=True)
    # megatron-core has imported two of them under names of its own.
    imported = {
        "dist_all_gather_func": split_all_gather,
        "dist_reduce_scatter_func": split_reduce_scatter,
    }
    reason = "both sides of a comparison use as many communicators"
    for name, replacement in imported.items():
        function = getattr(param_and_grad_buffer, name)
        # Without what is wrapped around it, above or by torch.
        original = getattr(function, "__wrapped__", function)
        symbols.put(param_and_grad_buffer, name, partial(replacement, original), reason)
    name = "_coalescing_manager"
    symbols.around(param_and_grad_buffer, name, (), _collecting_manager, lasting=True)


class _Collected:
    """Stands for torch's coalescing manager: its works are waited for together."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def __enter__(self) -> "_Collected":
        _collecting.append(self.works)
        return self

    def __exit__(self, *_: object) -> None:
        _collecting.pop()

    def wait(self) -> None:
        """Wait for all of them."""
        join(self.works).wait()


def _collecting_manager(original: Callable, group=None, device=None, async_ops=False):
    """Return a manager that collects split works; torch's where the group is not split."""
    if _groups_of(group) is None:
        return original(group, device, async_ops)
    return _Collected()


def _groups_of(group: dist.ProcessGroup | None) -> Groups | None:
    """Return the communicators of a group; None where it is not split."""
    if group is None:
        group = dist.group.WORLD
    return _groups.get(tuple(dist.get_process_group_ranks(group)))


def _groups_for(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, other: torch.Tensor
) -> Groups:
    """Return the communicators to split a message over; none where it goes as a whole.

    Args:
        tensor: the larger side of the message.
        group: its ranks.
        other: the other side.
    """
    # Our own transport splits payloads, which are uint8.
    if tensor.dtype == torch.uint8 or tensor.nbytes < SMALLEST_TENSOR:
        return []
    if not (tensor.is_contiguous() and other.is_contiguous()):
        return []
    return _groups_of(group) or []


def _collect(work: Handle, async_op: bool) -> Handle:
    """Note a work that was started inside of a coalescing manager, and return it."""
    if async_op and _collecting:
        _collecting[-1].append(work if isinstance(work, Work) else Work(work))
    return work


def _start_parts(
    start: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], dist.Work],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    groups: Groups,
    async_op: bool,
) -> Handle:
    """Start a collective for each part, on a communicator of its own.

    Args:
        start: starts one: ``start(output, input, group)``, both contiguous.
        outputs: the parts of the result, of any strides.
        inputs: the parts of what is sent, of any strides.
        groups: a communicator for each part.
        async_op: whether to return the work, instead of waiting for it.
    """
    # All copies of inputs are made before anything starts: an output may lie in the memory of an
    # input.
    inputs = [part.contiguous() for part in inputs]
    buffers = []
    for output in outputs:
        if output.is_contiguous():
            buffers.append(output)
        else:
            buffers.append(torch.empty(output.shape, dtype=output.dtype, device=output.device))
    works = []
    for buffer, part, group in zip(buffers, inputs, groups, strict=True):
        works.append(Work(start(buffer, part, group)))

    def finish(_: object) -> None:
        for output, buffer in zip(outputs, buffers, strict=True):
            if buffer is not output:
                output.copy_(buffer)

    work = join(works).then(finish)
    if async_op:
        return _collect(work, async_op)
    return work.wait()


def split_all_reduce(
    original: Callable,
    tensor: torch.Tensor,
    op: dist.ReduceOp = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """All-reduce a tensor in place, by flat parts.

    Args:
        original: torch's function.
        tensor, op, group, async_op: its arguments.
    """
    groups = _groups_for(tensor, group, tensor)
    if not groups:
        return _collect(original(tensor, op, group, async_op), async_op)
    parts = tensor.view(-1).tensor_split(len(groups))

    def start(output: torch.Tensor, _: torch.Tensor, communicator: dist.ProcessGroup) -> dist.Work:
        return original(output, op, communicator, True)

    return _start_parts(start, parts, parts, groups, async_op)


def split_all_gather(
    original: Callable,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Gather the ranks' tensors, by parts of what each rank sends.

    Args:
        original: torch's function.
        output_tensor, input_tensor, group, async_op: its arguments.
    """
    groups = _groups_for(output_tensor, group, input_tensor)
    if not groups:
        return _collect(original(output_tensor, input_tensor, group, async_op), async_op)
    # [ranks, values]: a part of every rank's values is a block of columns.
    outputs = output_tensor.view(groups[0].size(), -1).tensor_split(len(groups), dim=1)
    inputs = input_tensor.reshape(-1).tensor_split(len(groups))

    def start(
        output: torch.Tensor, part: torch.Tensor, communicator: dist.ProcessGroup
    ) -> dist.Work:
        return original(output.view(-1), part, communicator, True)

    return _start_parts(start, outputs, inputs, groups, async_op)


def split_reduce_scatter(
    original: Callable,
    output: torch.Tensor,
    input: torch.Tensor,
    op: dist.ReduceOp = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Reduce-scatter a tensor, by parts of what each rank keeps.

    Args:
        original: torch's function.
        output, input, op, group, async_op: its arguments.
    """
    groups = _groups_for(input, group, output)
    if not groups:
        return _collect(original(output, input, op, group, async_op), async_op)
    inputs = input.view(groups[0].size(), -1).tensor_split(len(groups), dim=1)
    outputs = output.view(-1).tensor_split(len(groups))

    def start(kept: torch.Tensor, part: torch.Tensor, communicator: dist.ProcessGroup) -> dist.Work:
        return original(kept, part.view(-1), op, communicator, True)

    return _start_parts(start, outputs, inputs, groups, async_op)


def split_all_to_all(
    original: Callable,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Send each rank its rows, by parts of what goes to it.

    Where ranks get different numbers of rows, the rows are split. Such a message is split whatever
    its size: the ranks do not know the size of each other's.

    Args:
        original: torch's function.
        output, input, output_split_sizes, input_split_sizes, group, async_op: its arguments.
    """
    sizes = (output_split_sizes, input_split_sizes)
    has_equal_parts = sizes == (None, None)
    has_long_rows = input.dim() == 2 and input.shape[1] >= SHORTEST_ROW
    groups: Groups = []
    if has_equal_parts:
        groups = _groups_for(input, group, output)
    elif has_long_rows and input.dtype != torch.uint8:
        groups = _groups_of(group) or []
    if not groups:
        return _collect(original(output, input, *sizes, group, async_op), async_op)
    if has_equal_parts:
        ranks = groups[0].size()
        input = input.view(ranks, -1)
        output = output.view(ranks, -1)
    inputs = input.tensor_split(len(groups), dim=1)
    outputs = output.tensor_split(len(groups), dim=1)

    def start(
        received: torch.Tensor, part: torch.Tensor, communicator: dist.ProcessGroup
    ) -> dist.Work:
        return original(received, part, *sizes, communicator, True)

    return _start_parts(start, outputs, inputs, groups, async_op)
