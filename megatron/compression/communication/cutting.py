"""Cuts a tensor into one row a rank, as a codec wants it, and puts rows together again."""

import torch
import torch.nn.functional as F

from megatron.compression.codecs import Codec


def cut(x: torch.Tensor, rows: int, codec: Codec) -> torch.Tensor:
    """``[rows, *shape]`` of ``x``'s values in their order, zero padded at the end; a view where nothing is
    padded and ``x`` is contiguous.

    Rows are flat and a multiple of the codec's block long, or, where the codec sees shapes, as many slices of
    the first dimension as the others.
    """
    if codec.sees_shape and x.dim() > 1:
        missing = -x.shape[0] % rows
        if missing:
            x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
        return x.reshape(rows, -1, *x.shape[1:])
    size = -(-x.numel() // (rows * codec.block)) * codec.block
    if x.numel() < rows * size:
        x = F.pad(x.reshape(-1), (0, rows * size - x.numel()))
    return x.reshape(rows, size)


def joined(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The tensor of ``shape`` that ``cut`` made ``rows`` of; a view of them."""
    values = rows if rows.numel() == shape.numel() else rows.reshape(-1)[: shape.numel()]
    return values.reshape(shape)
