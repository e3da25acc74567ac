"""Column-parallel linear with compressed communication.

megatron-core communicates inside its linear's autograd function (all-gather of the input under sequence
parallelism, all-reduce or reduce-scatter of the input gradient), so this is a function of our own.
"""

import torch
from torch.autograd.function import once_differentiable

from megatron.compression.communication import Work
from megatron.compression.communication.site import CommSite, Packed
from megatron.compression.tensor_parallel.overlap import (
    Handover,
    InputGradientExchange,
    WeightGradient,
    arrival,
    defer,
    placeholder,
)
from megatron.compression.tensor_parallel.turns import Entry


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, site, sequence_parallel, exchange, gradient, entry):
        ctx.beside = gathered = None
        if entry is not None:
            ctx.beside, gathered, entry.gathered = entry.adjoint.beside, entry.gathered, None
        ctx.site, ctx.sequence_parallel, ctx.has_bias = site, sequence_parallel, bias is not None
        ctx.exchange, ctx.gradient, ctx.x_shape = exchange, gradient, x.shape
        if sequence_parallel:
            # The payload is half of the input or less, and it is what the backward gathers again.
            packed, gathered = gathered or start_gather(x, site)
            ctx.save_for_backward(packed.payload, weight)
            ctx.packed = packed._replace(payload=None)
            x = gathered.wait()
        else:
            ctx.save_for_backward(x, weight)
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        saved, weight = ctx.saved_tensors
        site, gathered = ctx.site, None
        if ctx.sequence_parallel and ctx.gradient is not None:
            gathered = site.gather(ctx.packed._replace(payload=saved), "tp.backward")
        placeholder_of_sum = None
        if ctx.beside is not None:
            ctx.beside.ahead()
        if ctx.needs_input_grad[0]:
            start = site.reduce_scatter if ctx.sequence_parallel else site.all_reduce
            ctx.exchange.work = start(torch.matmul(grad_output, weight), "tp.backward")
            placeholder_of_sum = placeholder(weight, ctx.x_shape)
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        if ctx.gradient is not None:

            def inputs() -> tuple[torch.Tensor, torch.Tensor]:
                x = saved if gathered is None else gathered.wait()
                return grad_output, x.reshape(-1, x.shape[-1])

            ctx.gradient.provide(inputs)
        grad_bias = grad_output.sum(dim=0) if ctx.has_bias else None
        grad_weight = None if ctx.gradient is None else placeholder(weight)
        return placeholder_of_sum, grad_weight, grad_bias, *(None,) * 5


def start_gather(x: torch.Tensor, site: CommSite) -> tuple[Packed, Work]:
    """Begin to gather an input ``[s / W, b, h]``: what this rank sends of it, and its handle."""
    packed = site.pack(x, "tp.forward")
    return packed, site.gather(packed, "tp.forward")


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: CommSite,
    sequence_parallel: bool,
    handover: Handover | None = None,
    fusion: bool = False,
    entry: Entry | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias`` with this rank's rows of the weight.

    The input gradient is summed over the ranks through the site's codec while weight gradients are computed:
    this layer's and, with ``handover``, that of the row-parallel layer that follows. With sequence
    parallelism the input is gathered and the gradient scattered along the first dimension; the input's
    payload is kept for the backward instead of the input itself.

    Args:
        x: ``[s, b, h]``, or ``[s / W, b, h]`` with sequence parallelism.
        weight: ``[h_out / W, h]``; no gradient is made for a frozen one.
        bias: ``[h_out / W]`` or None.
        sequence_parallel: whether ``x`` is a slice of the sequence.
        handover: shared with the row-parallel layer that takes this layer's output.
        fusion: add the weight gradient to ``weight.main_grad``.
        entry: where ``x`` comes from, if blocks take turns: it takes the input gradient's sum.
    Returns: ``[s, b, h_out / W]``.
    """
    exchange, gradient = InputGradientExchange() if entry is None else entry.adjoint.exchange, None
    if torch.is_grad_enabled():
        if entry is None:
            x = arrival(x, exchange)
        if handover is not None:
            handover.make(exchange)
        if weight.requires_grad:
            gradient = WeightGradient(exchange, weight, fusion)
            weight = defer(weight, gradient)
    output = _ColumnParallelLinear.apply(x, weight, bias, site, sequence_parallel, exchange, gradient, entry)
    if entry is not None:
        entry.behind()
    return output
