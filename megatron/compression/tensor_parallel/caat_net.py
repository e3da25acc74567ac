"""CAAT-Net: row-parallel layers that synchronise only part of their output (arXiv 2506.19645).

With k = int(p * h) shared channels, W ranks, and rank r's partial sum y_r = x_r A_r and stream z_r:

    z_r[:k] = sum_j y_j[:k] + b[:k]                 shared: all-reduced, equal on all ranks
    z_r[k:] = sqrt(W) * (y_r[k:] + b[k:])           private: one partial sum, at the variance of W of them

Each rank carries its own residual stream from there on, so that the loss is a function of W streams. Every
gradient of a stream is the loss's by that rank's stream alone; the adjoint of the formula is

    dy_r[:k] = sum_j dz_j[:k],    dy_r[k:] = sqrt(W) * dz_r[k:]

Column-parallel layers therefore reduce nothing: their input gradient already is that of their own stream. The
streams begin as copies of one embedding, whose gradient is the sum over the ranks.
"""

import math

import torch

from megatron.compression.collectives import CompressedWork
from megatron.compression.tensor_parallel.site import TensorParallelSite


def _sum_over_ranks(
    tensor: torch.Tensor, site: TensorParallelSite, channel: str
) -> tuple[CompressedWork, int]:
    """Start to sum over the group, with the codec or without; the handle, and how many exchanges it makes."""
    if site.compresses(tensor.nbytes, channel):
        return site.all_reduce(tensor, channel), 2
    return site.all_reduce_uncompressed(tensor, channel)


class _PartialRowParallelLinear(torch.autograd.Function):
    """The two blocks of the weight's rows are two GEMMs: one exchange runs behind the private one.

    Rows of the weight are channels of the output, so the shared channels come out contiguous, as one message.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, site, shared):
        ctx.site, ctx.shared, ctx.has_bias = site, shared, bias is not None
        ctx.save_for_backward(x, weight)
        scale = math.sqrt(site.group.size())
        rows = x.reshape(-1, x.shape[-1])
        partial_sum = torch.matmul(rows, weight[:shared].t())
        exchange, exchanges = _sum_over_ranks(partial_sum, site, "tp.forward")
        output = x.new_empty(rows.shape[0], weight.shape[0])
        private = weight[shared:].t()
        parts = zip(rows.chunk(exchanges), output[:, shared:].chunk(exchanges), strict=True)
        for number, (part, destination) in enumerate(parts):
            if number:
                exchange.advance()
            if bias is None:
                torch.addmm(destination, part, private, beta=0, alpha=scale, out=destination)
            else:
                torch.addmm(bias[shared:], part, private, beta=scale, alpha=scale, out=destination)
        total = exchange.wait()
        if bias is None:
            output[:, :shared] = total
        else:
            torch.add(total, bias[:shared], out=output[:, :shared])
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        site, shared = ctx.site, ctx.shared
        scale = math.sqrt(site.group.size())
        rows = x.reshape(-1, x.shape[-1])
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        shared_gradient = grad_output[:, :shared].clone(memory_format=torch.contiguous_format)
        exchange, exchanges = _sum_over_ranks(shared_gradient, site, "tp.backward")
        private = grad_output[:, shared:]
        grad_input = torch.matmul(private, weight[shared:])
        if exchanges > 1:
            exchange.advance()
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            destination = grad_weight[shared:]
            torch.addmm(destination, private.t(), rows, beta=0, alpha=scale, out=destination)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            # This rank's stream alone: the ranks' are summed once an iteration (caat_net_gradients.py).
            grad_bias = grad_output.sum(dim=0)
            grad_bias[shared:] *= scale
        total = exchange.wait()
        grad_input = torch.addmm(grad_input, total, weight[:shared], beta=scale)
        if grad_weight is not None:
            torch.matmul(total.t(), rows, out=grad_weight[:shared])
        return grad_input.view(x.shape), grad_weight, grad_bias, None, None


class _CopyToStreams(torch.autograd.Function):
    """Forward: identity. Backward: sum over the ranks."""

    @staticmethod
    def forward(ctx, x, site):
        ctx.site = site
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        gradient = grad_output.clone(memory_format=torch.contiguous_format)
        exchange, _ = _sum_over_ranks(gradient, ctx.site, "tp.backward")
        return exchange.wait(), None


def partial_row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: TensorParallelSite,
    shared_channels: int,
) -> torch.Tensor:
    """This rank's stream of a row-parallel linear layer whose first channels alone are summed (see above).

    Without a codec the gradient of the shared channels is summed in fp32 whatever its dtype.

    Args:
        x: ``[s, b, h_in / W]``.
        weight: ``[h_out, h_in / W]``.
        bias: ``[h_out]`` or None; its gradient is that of this rank's stream.
        site: where it communicates.
        shared_channels: k, 1 to ``h_out``.

    Returns:
        ``[s, b, h_out]``, bias included: the private channels are scaled with it.
    """
    return _PartialRowParallelLinear.apply(x, weight, bias, site, shared_channels)


def copy_to_streams(x: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
    """Begin every rank's stream with ``x``, equal on all of them; its gradient is summed over the ranks."""
    return _CopyToStreams.apply(x, site)
