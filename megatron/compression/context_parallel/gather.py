"""Attention under context parallelism: every rank gathers the keys and values of the whole sequence.

Megatron distributes a sequence of 2W chunks: rank r holds chunks r and 2W - 1 - r, one after the other. The
keys and values of all ranks are gathered and put in order, and their gradients reduce-scattered: the way of
Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

import torch
import torch.distributed as dist

from megatron.compression.communication.collectives import (
    WithBackward,
    uncompressed_all_gather,
    uncompressed_reduce_scatter,
)
from megatron.compression.communication.site import CommSite


def in_order(gathered: torch.Tensor, world_size: int) -> torch.Tensor:
    """Sequence ``[s, ...]`` from the ranks' parts ``[s, ...]``, one after the other."""
    early, late = gathered.unflatten(0, (world_size, 2, -1)).unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def distributed(sequence: torch.Tensor, world_size: int) -> torch.Tensor:
    """The ranks' parts, one after the other, of a sequence: what ``in_order`` puts in order."""
    chunks = sequence.unflatten(0, (2, world_size, -1))
    return torch.stack([chunks[0], chunks[1].flip(0)], dim=1).flatten(0, 2)


def chunks_of(rank: int, world_size: int) -> tuple[int, int]:
    """Numbers of the two chunks that a rank holds, of 2W."""
    return rank, 2 * world_size - 1 - rank


def gather_sequence(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, site: CommSite | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole sequence, ``[s, b, groups, head_dim]`` each, from this rank's chunks; one
    collective in each direction. Gradients are summed in fp32, uncompressed in their dtype. The site counts
    and decides; None: uncompressed and uncounted."""
    # A token's keys, then its values: blocks of a codec hold one or the other, since their sizes differ.
    parts = [key.flatten(2), value.flatten(2)]
    ranks = group.size()

    def there(part: torch.Tensor) -> torch.Tensor:
        if site is None:
            work = uncompressed_all_gather(part, group)
        else:
            work = site.message("cp.forward", "all_gather", part.nbytes * ranks).start(part)
        return in_order(work.wait(), ranks)

    def back(gradient: torch.Tensor) -> torch.Tensor:
        whole = distributed(gradient, ranks)
        if site is None:
            return uncompressed_reduce_scatter(whole, group).wait()
        return site.message("cp.backward", "reduce_scatter", whole.nbytes).start(whole).wait()

    gathered = WithBackward.apply(torch.cat(parts, dim=-1), there, back)
    keys, values = gathered.split([part.size(-1) for part in parts], dim=-1)
    return keys.unflatten(-1, key.shape[2:]), values.unflatten(-1, value.shape[2:])
