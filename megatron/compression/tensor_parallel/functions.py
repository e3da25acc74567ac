"""The autograd functions of tensor-parallel linear layers, whose collectives go through a site.

megatron-core communicates inside its linear's autograd function (all-gather of the input under sequence
parallelism, all-reduce or reduce-scatter of the input gradient), so linear layers are functions of our own.
"""

import torch
from torch.autograd.function import once_differentiable

from megatron.compression.communication.collectives import WithBackward
from megatron.compression.communication.site import CommSite
from megatron.compression.tensor_parallel.overlap import (
    DeferredWeightGradient,
    InputGradientExchange,
    WeightGradient,
    arrival,
    defer,
    placeholder,
)
from megatron.compression.torch_native.weight_gradient import accumulate, dropped_gradient


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, site, sequence_parallel, exchange, gradient):
        ctx.site, ctx.sequence_parallel, ctx.has_bias = site, sequence_parallel, bias is not None
        ctx.exchange, ctx.gradient, ctx.x_shape, ctx.dtype = exchange, gradient, x.shape, x.dtype
        if sequence_parallel:
            # The payload is half of the input or less, and it is what the backward gathers again.
            ctx.message = site.message("tp.forward", "all_gather", x.nbytes * site.group.size())
            payload = ctx.message.encode(x)
            ctx.save_for_backward(payload, weight)
            x = ctx.message.gather(payload, x.shape, x.dtype).wait()
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
            nbytes = ctx.x_shape.numel() * ctx.dtype.itemsize * site.group.size()
            gathered = ctx.message.again("tp.backward", nbytes).gather(saved, ctx.x_shape, ctx.dtype)
        placeholder_of_sum = None
        if ctx.needs_input_grad[0]:
            own = torch.matmul(grad_output, weight)
            operation = "reduce_scatter" if ctx.sequence_parallel else "all_reduce"
            ctx.exchange.work = site.message("tp.backward", operation, own.nbytes).start(own)
            del own
            placeholder_of_sum = placeholder(weight, ctx.x_shape)
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        if ctx.gradient is not None:

            def inputs() -> tuple[torch.Tensor, torch.Tensor]:
                x = saved if gathered is None else gathered.wait()
                return grad_output, x.reshape(-1, x.shape[-1])

            ctx.gradient.provide(inputs)
        grad_bias = grad_output.sum(dim=0) if ctx.has_bias else None
        grad_weight = None if ctx.gradient is None else placeholder(weight)
        return placeholder_of_sum, grad_weight, grad_bias, *(None,) * 4


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: CommSite,
    sequence_parallel: bool,
    deferred: DeferredWeightGradient | None = None,
    fusion: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias``, ``[s, b, h_out / W]``, with this rank's rows of the weight.

    The input gradient is summed over the ranks while weight gradients are computed. With sequence parallelism
    the input is gathered and the gradient scattered along the first dimension; the input's payload is kept
    for the backward instead of the input itself.

    Args:
        x: ``[s, b, h]``, or ``[s / W, b, h]`` with sequence parallelism.
        weight, bias: ``[h_out / W, h]`` and ``[h_out / W]``.
        deferred: the weight gradient of the row-parallel layer that has this layer's output as its input.
        fusion: add the weight gradient to ``weight.main_grad``.
    """
    exchange, gradient = InputGradientExchange(), None
    if torch.is_grad_enabled():
        x = arrival(x, exchange)
        if deferred is not None:
            deferred.prepare(exchange)
        if weight.requires_grad:
            gradient = WeightGradient(exchange, weight, fusion)
            weight = defer(weight, gradient.compute)
    return _ColumnParallelLinear.apply(x, weight, bias, site, sequence_parallel, exchange, gradient)


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, site, sequence_parallel, gradient, fusion):
        ctx.save_for_backward(x, weight)
        ctx.site, ctx.sequence_parallel, ctx.gradient, ctx.fusion = site, sequence_parallel, gradient, fusion
        partial_sum = torch.matmul(x, weight.t())
        operation = "reduce_scatter" if sequence_parallel else "all_reduce"
        work = site.message("tp.forward", operation, partial_sum.nbytes).start(partial_sum)
        del partial_sum
        return work.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad_output = gather(ctx.site, grad_output, "tp.backward")
        grad_input = torch.matmul(grad_output, weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
            if ctx.gradient is not None:
                ctx.gradient.provide(lambda: rows)
                grad_weight = placeholder(weight)
            elif ctx.fusion and hasattr(weight, "main_grad"):
                accumulate(rows[1], rows[0], weight.main_grad)
                grad_weight = dropped_gradient(weight)
            else:
                grad_weight = torch.matmul(rows[0].t(), rows[1])
        return grad_input, grad_weight, *(None,) * 4


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    site: CommSite,
    sequence_parallel: bool,
    deferred: DeferredWeightGradient | None = None,
    fusion: bool = False,
) -> torch.Tensor:
    """``x @ weight.T`` summed over the ranks: ``[s, b, h_out]``, or ``[s / W, b, h_out]`` with sequence
    parallelism.

    Args:
        x: ``[s, b, h_in / W]``.
        weight: ``[h_out, h_in / W]``.
        deferred: this weight's gradient, if the column-parallel layer before this one has prepared it.
        fusion: add the weight gradient to ``weight.main_grad``.
    """
    gradient = None
    if deferred is not None and (prepared := deferred.use()) is not None:
        weight, gradient = prepared
    return _RowParallelLinear.apply(x, weight, site, sequence_parallel, gradient, fusion)


def gather(site: CommSite, x: torch.Tensor, traffic: str) -> torch.Tensor:
    """``[W * n, ...]`` of every rank's ``[n, ...]``."""
    return site.message(traffic, "all_gather", x.nbytes * site.group.size()).start(x).wait()


def gather_columns(x: torch.Tensor, site: CommSite, first: int, count: int) -> torch.Tensor:
    """``[s, b, count * n]``: the ``[s, b, n]`` of ranks ``first`` to ``first + count``, concatenated.

    All ranks' are gathered, and the gradient of all is reduce-scattered; both compressed.
    """
    ranks = site.group.size()

    def columns(x: torch.Tensor) -> torch.Tensor:
        gathered = gather(site, x, "tp.forward").view(ranks, *x.shape)
        return torch.cat(gathered[first : first + count].unbind(), dim=-1)

    def scatter(grad: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(grad.chunk(count, dim=-1))
        full = parts.new_zeros(ranks, *parts.shape[1:])
        full[first : first + count] = parts
        return site.message("tp.backward", "reduce_scatter", full.nbytes).start(full.flatten(0, 1)).wait()

    return WithBackward.apply(x, columns, scatter)
