"""The same collectives without a codec, behind the same handles."""

import torch
import torch.distributed as dist

from megatron.compression.collectives.work import CompressedWork


def uncompressed_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> CompressedWork:
    """Start to sum ``x`` over the group in its own dtype; ``x`` is left as it is."""
    total = x.clone(memory_format=torch.contiguous_format)
    return CompressedWork(dist.all_reduce(total, group=group, async_op=True), lambda: total)


def uncompressed_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> CompressedWork:
    """Start to sum ``[W * n, ...]`` over the group in its own dtype and keep this rank's ``[n, ...]``."""
    shard = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    work = dist.reduce_scatter_tensor(shard, x.contiguous(), group=group, async_op=True)
    return CompressedWork(work, lambda: shard)


def uncompressed_all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> CompressedWork:
    """Start to gather ``[n, ...]`` of every rank into ``[W * n, ...]``."""
    full = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    work = dist.all_gather_into_tensor(full, x.contiguous(), group=group, async_op=True)
    return CompressedWork(work, lambda: full)
