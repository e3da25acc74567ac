"""Autograd functions around the compressed collectives.

They mirror megatron-core's tensor_parallel/mappings.py: a reduce in the forward is a copy in the backward, a
reduce-scatter an all-gather, a split an all-gather.
"""

import torch

from megatron.compression.tensor_parallel.site import TensorParallelSite


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """Forward: compressed all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx, partial_sum: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
        return site.all_reduce(partial_sum, "tp.forward").wait()

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        return grad_output, None


class _ReduceScatterToSequenceParallelRegion(torch.autograd.Function):
    """Forward: compressed reduce-scatter of the first dimension. Backward: compressed all-gather."""

    @staticmethod
    def forward(ctx, partial_sum: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
        ctx.site = site
        return site.reduce_scatter(partial_sum, "tp.forward").wait()

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        return ctx.site.all_gather(grad_output, "tp.backward").wait(), None


class _ScatterToSequenceParallelRegion(torch.autograd.Function):
    """Forward: this rank's slice of the first dimension. Backward: compressed all-gather."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
        ctx.site = site
        return x.chunk(site.group.size())[site.group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        return ctx.site.all_gather(grad_output, "tp.backward").wait(), None


def reduce_from_tensor_parallel_region(partial_sum: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
    """Sum the ranks' partial sums through the site's codec; the gradient passes unchanged."""
    return _ReduceFromTensorParallelRegion.apply(partial_sum, site)


def reduce_scatter_to_sequence_parallel_region(
    partial_sum: torch.Tensor, site: TensorParallelSite
) -> torch.Tensor:
    """Sum ``[s, ...]`` over the ranks, keep ``[s / W, ...]``; the gradient is gathered. Both compressed."""
    return _ReduceScatterToSequenceParallelRegion.apply(partial_sum, site)


def scatter_to_sequence_parallel_region(x: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
    """Keep this rank's ``[s / W, ...]`` of ``[s, ...]``; the gradient is gathered, compressed."""
    return _ScatterToSequenceParallelRegion.apply(x, site)
