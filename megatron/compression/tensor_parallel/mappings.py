"""Autograd functions around the compressed collectives.

They mirror megatron-core's tensor_parallel/mappings.py: a reduce in the forward is a copy in the backward, a
reduce-scatter an all-gather, a split an all-gather.
"""

import torch
from torch.autograd.function import once_differentiable

from megatron.compression.communication.site import CommSite


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """Forward: compressed all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx, partial_sum: torch.Tensor, site: CommSite) -> torch.Tensor:
        return site.all_reduce(partial_sum, "tp.forward").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        return grad_output, None


class _ReduceScatterToSequenceParallelRegion(torch.autograd.Function):
    """Forward: compressed reduce-scatter of the first dimension. Backward: compressed all-gather."""

    @staticmethod
    def forward(ctx, partial_sum: torch.Tensor, site: CommSite) -> torch.Tensor:
        ctx.site = site
        return site.reduce_scatter(partial_sum, "tp.forward").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        return ctx.site.all_gather(grad_output, "tp.backward").wait(), None


class _ScatterToSequenceParallelRegion(torch.autograd.Function):
    """Forward: this rank's slice of the first dimension. Backward: compressed all-gather."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, site: CommSite) -> torch.Tensor:
        ctx.site = site
        # A copy: a view would keep the whole sequence's memory for as long as the slice lives.
        return x.chunk(site.group.size())[site.group.rank()].clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        return ctx.site.all_gather(grad_output, "tp.backward").wait(), None


class _GatherColumns(torch.autograd.Function):
    """Forward: compressed all-gather, of which some columns are kept. Backward: compressed reduce-scatter."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, site: CommSite, first: int, count: int) -> torch.Tensor:
        ctx.site, ctx.first, ctx.count = site, first, count
        gathered = site.all_gather(x, "tp.forward").wait().view(site.group.size(), *x.shape)
        return torch.cat(gathered[first : first + count].unbind(), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        parts = torch.stack(grad_output.chunk(ctx.count, dim=-1))
        full = parts.new_zeros(ctx.site.group.size(), *parts.shape[1:])
        full[ctx.first : ctx.first + ctx.count] = parts
        return ctx.site.reduce_scatter(full.flatten(0, 1), "tp.backward").wait(), None, None, None


def reduce_from_tensor_parallel_region(partial_sum: torch.Tensor, site: CommSite) -> torch.Tensor:
    """Sum the ranks' partial sums through the site's codec; the gradient passes unchanged."""
    return _ReduceFromTensorParallelRegion.apply(partial_sum, site)


def reduce_scatter_to_sequence_parallel_region(partial_sum: torch.Tensor, site: CommSite) -> torch.Tensor:
    """Sum ``[s, ...]`` over the ranks, keep ``[s / W, ...]``; the gradient is gathered. Both compressed."""
    return _ReduceScatterToSequenceParallelRegion.apply(partial_sum, site)


def gather_columns(x: torch.Tensor, site: CommSite, first: int, count: int) -> torch.Tensor:
    """``[s, b, n]`` of ranks ``first`` to ``first + count`` side by side, ``[s, b, count * n]``.

    Everybody's is gathered, and the gradient of everybody's is reduce-scattered; both compressed.
    """
    return _GatherColumns.apply(x, site, first, count)


def scatter_to_sequence_parallel_region(x: torch.Tensor, site: CommSite) -> torch.Tensor:
    """Keep this rank's ``[s / W, ...]`` of ``[s, ...]``; the gradient is gathered, compressed."""
    return _ScatterToSequenceParallelRegion.apply(x, site)
