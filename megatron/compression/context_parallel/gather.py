"""Attention under context parallelism: every rank gathers the keys and values of the whole
sequence.

Megatron distributes a sequence of 2W chunks: rank r holds chunks r and 2W - 1 - r, one after the
other. The keys and values of all ranks are gathered and put in order, and their gradients
reduce-scattered: the way of Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

import torch
import torch.distributed as dist

from megatron.compression.communication.collectives import (
    WithBackward,
    uncompressed_all_gather,
    uncompressed_reduce_scatter,
)
from megatron.compression.communication.site import CommSite


class SharesSequence:
    """An attention whose ranks share a sequence: it gathers keys and values by
    ``gather_sequence``."""

    context_group: dist.ProcessGroup | None = None
    """The ranks that share a sequence; None: one rank has all of it."""
    context_site: CommSite | None = None
    """Counts and compresses what they gather; context_parallel/hooks.py sets it."""


def in_order(gathered: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return a sequence ``[s, ...]`` of the ranks' parts, ``[s, ...]`` one after the other."""
    # Each rank's part is an early and a late chunk; late ones come in reverse order of the ranks.
    early, late = gathered.unflatten(0, (world_size, 2, -1)).unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def distributed(sequence: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the ranks' parts of a sequence, one after the other: what ``in_order`` puts in
    order."""
    chunks = sequence.unflatten(0, (2, world_size, -1))
    return torch.stack([chunks[0], chunks[1].flip(0)], dim=1).flatten(0, 2)


def chunks_of(rank: int, world_size: int) -> tuple[int, int]:
    """Return the numbers of the two chunks, of 2W, that a rank holds."""
    return rank, 2 * world_size - 1 - rank


def gather_sequence(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, site: CommSite | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys and values of the whole sequence, in one collective in each direction.

    With a codec gradients are summed in fp32, without one in their own dtype.

    Args:
        key: of this rank's chunks, ``[s / W, b, groups, head_dim]``.
        value: likewise; its head_dim may be another.
        group: the ranks that share the sequence.
        site: counts and decides; None: uncompressed and uncounted.

    Returns: keys and values ``[s, b, groups, head_dim]``, in the order of the sequence.
    """
    # A token's keys, then its values: blocks of a codec hold one or the other, since their sizes
    # differ.
    local = [key.flatten(2), value.flatten(2)]
    ranks = group.size()

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        if site is None:
            work = uncompressed_all_gather(tensor, group)
        else:
            work = site.message("cp.forward", "all_gather", tensor.nbytes * ranks).start(tensor)
        return in_order(work.wait(), ranks)

    def scatter(gradient: torch.Tensor) -> torch.Tensor:
        gradient = distributed(gradient, ranks)
        if site is None:
            return uncompressed_reduce_scatter(gradient, group).wait()
        message = site.message("cp.backward", "reduce_scatter", gradient.nbytes)
        return message.start(gradient).wait()

    # One message for both: half as many launches.
    gathered = WithBackward.apply(torch.cat(local, dim=-1), gather, scatter)
    keys, values = gathered.split([tensor.size(-1) for tensor in local], dim=-1)
    return keys.unflatten(-1, key.shape[2:]), values.unflatten(-1, value.shape[2:])
