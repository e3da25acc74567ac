"""Compressed collectives in the forward, and what their gradients need in the backward.

As in megatron-core's tensor_parallel/mappings.py: a reduce in the forward is a copy in the backward, a
reduce-scatter an all-gather, a split an all-gather.
"""

import torch

from megatron.compression.communication.autograd import WithBackward
from megatron.compression.communication.site import CommSite


def reduce_from_tensor_parallel_region(partial_sum: torch.Tensor, site: CommSite) -> torch.Tensor:
    """Sum the ranks' partial sums through the site's codec; the gradient passes unchanged."""
    return WithBackward.apply(
        partial_sum, lambda x: site.all_reduce(x, "tp.forward").wait(), lambda grad: grad
    )


def reduce_scatter_to_sequence_parallel_region(partial_sum: torch.Tensor, site: CommSite) -> torch.Tensor:
    """Sum ``[s, ...]`` over the ranks, keep ``[s / W, ...]``; the gradient is gathered. Both compressed."""
    return WithBackward.apply(
        partial_sum,
        lambda x: site.reduce_scatter(x, "tp.forward").wait(),
        lambda grad: site.all_gather(grad, "tp.backward").wait(),
    )


def scatter_to_sequence_parallel_region(x: torch.Tensor, site: CommSite) -> torch.Tensor:
    """Keep this rank's ``[s / W, ...]`` of ``[s, ...]``; the gradient is gathered, compressed."""

    def own_slice(x: torch.Tensor) -> torch.Tensor:
        # A copy: a view would keep the whole sequence's memory for as long as the slice lives.
        return x.chunk(site.group.size())[site.group.rank()].clone(memory_format=torch.contiguous_format)

    return WithBackward.apply(x, own_slice, lambda grad: site.all_gather(grad, "tp.backward").wait())


def gather_columns(x: torch.Tensor, site: CommSite, first: int, count: int) -> torch.Tensor:
    """``[s, b, n]`` of ranks ``first`` to ``first + count`` side by side, ``[s, b, count * n]``.

    Everybody's is gathered, and the gradient of everybody's is reduce-scattered; both compressed.
    """
    ranks = site.group.size()

    def gather(x: torch.Tensor) -> torch.Tensor:
        gathered = site.all_gather(x, "tp.forward").wait().view(ranks, *x.shape)
        return torch.cat(gathered[first : first + count].unbind(), dim=-1)

    def scatter(grad: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(grad.chunk(count, dim=-1))
        full = parts.new_zeros(ranks, *parts.shape[1:])
        full[first : first + count] = parts
        return site.reduce_scatter(full.flatten(0, 1), "tp.backward").wait()

    return WithBackward.apply(x, gather, scatter)
