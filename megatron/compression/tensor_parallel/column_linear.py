"""Column-parallel linear with compressed communication, as one autograd function.

megatron-core communicates inside its linear's autograd function (all-gather of the input under sequence
parallelism, all-reduce or reduce-scatter of the input gradient), so this is a function of our own.
"""

import torch

from megatron.compression.tensor_parallel.site import TensorParallelSite


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, site, sequence_parallel):
        ctx.site, ctx.sequence_parallel, ctx.has_bias = site, sequence_parallel, bias is not None
        ctx.x_shape = x.shape
        if sequence_parallel:
            # The payload is half of the input or less, and it is what the backward gathers again.
            packed = site.pack(x, "tp.forward")
            gathered = site.gather(packed, "tp.forward")
            ctx.save_for_backward(packed.payload, weight)
            ctx.packed = packed._replace(payload=None)
            x = gathered.wait()
        else:
            ctx.save_for_backward(x, weight)
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad_output):
        saved, weight = ctx.saved_tensors
        site, needs_weight_gradient = ctx.site, ctx.needs_input_grad[1]
        gathered = None
        if ctx.sequence_parallel and needs_weight_gradient:
            gathered = site.gather(ctx.packed._replace(payload=saved), "tp.backward")
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = torch.matmul(grad_output, weight)
        if ctx.sequence_parallel:
            world_size = site.group.size()
            grad_input = grad_input.view(ctx.x_shape[0] * world_size, *ctx.x_shape[1:])
            exchange = site.reduce_scatter(grad_input, "tp.backward")
        else:
            exchange = site.all_reduce(grad_input.view(ctx.x_shape), "tp.backward")
        # Each exchange runs behind one half of the weight gradient's GEMM.
        grad_weight = grad_bias = None
        if needs_weight_gradient:
            x = gathered.wait() if ctx.sequence_parallel else saved
            x = x.reshape(-1, x.shape[-1])
            grad_weight = torch.empty_like(weight)
            halves = zip(grad_output.t().chunk(2), grad_weight.chunk(2), strict=True)
            for rows, destination in halves:
                torch.matmul(rows, x, out=destination)
                exchange.advance()
        if ctx.has_bias:
            grad_bias = grad_output.sum(dim=0)
        return exchange.wait(), grad_weight, grad_bias, None, None


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: TensorParallelSite,
    sequence_parallel: bool,
) -> torch.Tensor:
    """``x @ weight.T + bias`` with this rank's rows of the weight.

    The input gradient is summed over the ranks through the site's codec while the weight's is computed.
    With sequence parallelism the input is gathered and the gradient scattered along the first dimension; the
    input's payload is kept for the backward instead of the input itself.

    Args:
        x: ``[s, b, h]``, or ``[s / W, b, h]`` with sequence parallelism.
        weight: ``[h_out / W, h]``; no gradient is made for a frozen one.
        bias: ``[h_out / W]`` or None.
        site: where it communicates.
        sequence_parallel: whether ``x`` is a slice of the sequence.

    Returns:
        ``[s, b, h_out / W]``.
    """
    return _ColumnParallelLinear.apply(x, weight, bias, site, sequence_parallel)
