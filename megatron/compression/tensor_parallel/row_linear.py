"""Row-parallel linear with compressed communication."""

import torch
from torch.autograd.function import once_differentiable

from megatron.compression.communication.site import CommSite
from megatron.compression.tensor_parallel.overlap import Handover, placeholder
from megatron.compression.tensor_parallel.turns import Entry, empty
from megatron.compression.torch_native.weight_gradient import accumulate, dropped_gradient, has_main_grad


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, site, sequence_parallel, gradient, fusion, entry):
        ctx.save_for_backward(x, weight)
        ctx.site, ctx.sequence_parallel, ctx.gradient, ctx.fusion = site, sequence_parallel, gradient, fusion
        start = site.reduce_scatter if sequence_parallel else site.all_reduce
        work = start(torch.matmul(x, weight.t()), "tp.forward")
        ctx.adjoint = None if entry is None else entry.adjoint
        if entry is None:
            return work.wait()
        entry.started = work
        entry.adjoint.site = site if sequence_parallel and any(ctx.needs_input_grad) else None
        ranks = site.group.size() if sequence_parallel else 1
        return empty(x, x.dtype, (x.shape[0] // ranks, *x.shape[1:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            begun = None
            if ctx.adjoint is not None:
                begun, ctx.adjoint.gathered = ctx.adjoint.gathered, None
            grad_output = (begun or ctx.site.all_gather(grad_output, "tp.backward")).wait()
        grad_input = torch.matmul(grad_output, weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
            if ctx.gradient is not None:
                ctx.gradient.provide(lambda: rows)
                grad_weight = placeholder(weight)
            elif has_main_grad(weight, ctx.fusion):
                accumulate(rows[1], rows[0], weight.main_grad)
                grad_weight = dropped_gradient(weight)
            else:
                grad_weight = torch.matmul(rows[0].t(), rows[1])
        return grad_input, grad_weight, *(None,) * 5


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    site: CommSite,
    sequence_parallel: bool,
    handover: Handover | None = None,
    fusion: bool = False,
    entry: Entry | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` summed over the ranks.

    Args:
        x: ``[s, b, h_in / W]``.
        weight: ``[h_out, h_in / W]``.
        sequence_parallel: reduce-scatter along the sequence instead of all-reduce.
        handover: shared with the column-parallel layer before this one, whose exchange the weight gradient
            then runs behind.
        fusion: add the weight gradient to ``weight.main_grad``.
        entry: of the block that this layer ends, if blocks take turns: gets the sum, which is left under way.
    Returns: ``[s, b, h_out]``, or ``[s / W, b, h_out]`` with sequence parallelism; without values where
    ``entry`` has them.
    """
    made = handover.take() if handover is not None else None
    gradient = None
    if made is not None:
        weight, gradient = made
    return _RowParallelLinear.apply(x, weight, site, sequence_parallel, gradient, fusion, entry)
