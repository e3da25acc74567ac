"""What megatron-core's flex dispatcher calls of DeepEP, for CPU ranks: every rank gathers all
tokens and takes those of its own experts."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import token_dispatcher


def install() -> None:
    """Let a model be built, and run, with the flex dispatcher over deepep."""
    token_dispatcher.fused_dispatch = _dispatch
    token_dispatcher.fused_combine = _combine
    token_dispatcher.set_deepep_num_sms = lambda number: None


def _dispatch(
    x: torch.Tensor,
    indices: torch.Tensor,
    probs: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    **_: object,
):
    """Return the tokens of this rank's experts.

    Args:
        x: ``[n, h]``, as many on each rank.
        indices: ``[n, k]``, each token's experts.
        probs: ``[n, k]``, what their outputs are multiplied by.
        num_experts: of all ranks.
        group: the ranks.

    Returns:
        Tokens ``[m, h]``; for each its experts, counted from this rank's first and -1 for those of
        other ranks, and their probabilities ``[m, k]``; tokens by expert; what ``_combine`` needs.
    """
    tokens = gather_from_sequence_parallel_region(x, group=group)
    all_probs = gather_from_sequence_parallel_region(probs, group=group)
    all_indices = gather_from_sequence_parallel_region(indices, group=group)
    experts_here = num_experts // group.size()
    local = all_indices - group.rank() * experts_here
    local = torch.where((local >= 0) & (local < experts_here), local, -1)
    rows = (local >= 0).any(dim=1).nonzero().squeeze(1)
    counts = torch.stack([(local == expert).sum() for expert in range(experts_here)])
    return tokens[rows], local[rows], all_probs[rows], counts, (rows, len(tokens))


def _combine(x: torch.Tensor, group: dist.ProcessGroup, handle: tuple, **_: object):
    """Return ``[n, h]``, for each of this rank's tokens the sum of its experts' outputs, and
    None."""
    rows, total = handle
    outputs = x.new_zeros((total, x.shape[1])).index_copy(0, rows, x)
    return reduce_scatter_to_sequence_parallel_region(outputs, group=group), None
