"""Attention under context parallelism: every rank gathers the keys and values of the whole sequence.

As Megatron deals a sequence of 2W chunks, rank r holds chunks r and 2W - 1 - r, one behind the other, so that
causal attention costs all ranks the same. Queries stay where they are; the keys and values of all ranks are
gathered and put in order, and their gradients reduce-scattered: the way of Llama 3 (arXiv
2407.21783, section 3.3.2). Grouped queries make keys and values small beside the rest. Uncompressed.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.compression.communication.uncompressed import (
    uncompressed_all_gather,
    uncompressed_reduce_scatter,
)

OnExchange = Callable[[str, str, int, int], None]
"""Called with (channel, operation, bytes of the whole buffer, ranks) for every collective."""


def in_order(gathered: torch.Tensor, world_size: int) -> torch.Tensor:
    """Sequence ``[s, ...]`` from the ranks' parts ``[s, ...]``, one behind the other."""
    early, late = gathered.unflatten(0, (world_size, 2, -1)).unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def dealt(sequence: torch.Tensor, world_size: int) -> torch.Tensor:
    """The ranks' parts, one behind the other, of a sequence: what ``in_order`` puts in order."""
    chunks = sequence.unflatten(0, (2, world_size, -1))
    return torch.stack([chunks[0], chunks[1].flip(0)], dim=1).flatten(0, 2)


def chunks_of(rank: int, world_size: int) -> tuple[int, int]:
    """Numbers of the two chunks that a rank holds, of 2W."""
    return rank, 2 * world_size - 1 - rank


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group, on_exchange):
        ctx.group, ctx.on_exchange, ctx.world_size = group, on_exchange, group.size()
        gathered = uncompressed_all_gather(part, group).wait()
        if on_exchange is not None:
            on_exchange("cp.forward", "all_gather", gathered.nbytes, ctx.world_size)
        return in_order(gathered, ctx.world_size)

    @staticmethod
    def backward(ctx, gradient):
        parts = dealt(gradient, ctx.world_size)
        if ctx.on_exchange is not None:
            ctx.on_exchange("cp.backward", "reduce_scatter", parts.nbytes, ctx.world_size)
        return uncompressed_reduce_scatter(parts, ctx.group).wait(), None, None


def gather_sequence(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, on_exchange: OnExchange | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole sequence, in its order; one collective in each direction.

    Args:
        key, value: ``[s / W, b, groups, head_dim]``, this rank's chunks; head_dim may differ.
    Returns: ``[s, b, groups, head_dim]`` each. Gradients are summed over the ranks in the tensors' dtype.
    """
    widths = [key.size(-1), value.size(-1)]
    return _Gather.apply(torch.cat([key, value], dim=-1), group, on_exchange).split(widths, dim=-1)


def causal_tail(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """bool ``[rows, columns]``, True where the last ``rows`` positions of ``columns`` may look."""
    positions = torch.arange(columns, device=device)
    return positions <= positions[columns - rows :, None]
