"""The same collectives without a codec, behind the same handles."""

import torch
import torch.distributed as dist

from megatron.compression.communication.work import Work


def uncompressed_all_reduce(
    x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None
) -> Work:
    """Start to sum ``x`` over the group in its own dtype, into ``out`` if given; ``x`` is left as it is."""
    total = x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)
    return Work(dist.all_reduce(total, group=group, async_op=True), lambda: total)


def fp32_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """Start to sum ``x`` over the group in fp32, at the traffic of an all-reduce in its own dtype.

    Two-shot: the addends travel as they are, an owner adds them up in fp32 and rounds the sum once,
    and that travels. The sum runs in rank order on every device, as the compressed collectives' does.

    Args:
        x: contiguous; left as it is.
        group: any number of ranks; where it does not divide ``x`` the last piece is padded.
    """
    world_size = group.size()
    piece = -(-x.numel() // world_size)
    pieces = x.view(-1)
    if pieces.numel() < world_size * piece:
        pieces = torch.cat([pieces, pieces.new_zeros(world_size * piece - pieces.numel())])
    received = torch.empty_like(pieces)
    work = dist.all_to_all_single(received, pieces, group=group, async_op=True)

    def sum_own_piece() -> Work:
        own = sum_in_order(received.view(world_size, piece)).to(x.dtype)
        gathered = own.new_empty(world_size * piece)
        work = dist.all_gather_into_tensor(gathered, own, group=group, async_op=True)
        return Work(work, lambda: gathered[: x.numel()].view(x.shape))

    return Work(work, sum_own_piece, exchanges=2)


def sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    """The fp32 sum of ``[W, n]`` over its rows, one after the other.

    ``torch.sum`` adds in an order that depends on the device, the shape and the number of rows.
    """
    total = rows[0].float() if rows.dtype != torch.float32 else rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def uncompressed_reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None
) -> Work:
    """Start to sum ``[W * n, ...]`` over the group in its own dtype and keep this rank's ``[n, ...]``."""
    shard = x.new_empty((x.shape[0] // group.size(), *x.shape[1:])) if out is None else out
    work = dist.reduce_scatter_tensor(shard, x.contiguous(), group=group, async_op=True)
    return Work(work, lambda: shard)


def uncompressed_all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None
) -> Work:
    """Start to gather ``[n, ...]`` of every rank into ``[W * n, ...]``, in ``out`` if given."""
    full = x.new_empty((x.shape[0] * group.size(), *x.shape[1:])) if out is None else out
    work = dist.all_gather_into_tensor(full, x.contiguous(), group=group, async_op=True)
    return Work(work, lambda: full)
