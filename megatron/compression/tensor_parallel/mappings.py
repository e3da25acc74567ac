"""Autograd functions around the compressed all-reduce.

They mirror megatron-core's tensor_parallel/mappings.py: a reduce in the forward is a copy in the backward,
and the other way round.
"""

import torch

from megatron.compression.tensor_parallel.site import TensorParallelSite


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """Forward: compressed all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx, partial_sum: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
        return site.compressed_all_reduce(partial_sum, "tp.forward")

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        return grad_output, None


class _CopyToTensorParallelRegion(torch.autograd.Function):
    """Forward: identity. Backward: compressed all-reduce."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
        ctx.site = site
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        return ctx.site.compressed_all_reduce(grad_output, "tp.backward"), None


def reduce_from_tensor_parallel_region(partial_sum: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
    """Sum the ranks' partial sums through the site's codec; the gradient passes unchanged."""
    return _ReduceFromTensorParallelRegion.apply(partial_sum, site)


def copy_to_tensor_parallel_region(x: torch.Tensor, site: TensorParallelSite) -> torch.Tensor:
    """Pass ``x`` on; its gradient is summed over the ranks through the site's codec."""
    return _CopyToTensorParallelRegion.apply(x, site)
