"""The collectives, over a codec or without one; each starts communication and returns its ``Work``.

Over a codec every rank, the owner too, decodes the same payload, so all ranks end with the same bits; sums
run in fp32 in the order of the ranks, so a result does not depend on timing. In exchanges of rows (tokens)
each row is a payload of its own; ``why_not_rows`` says which codecs cannot.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.compression.codecs import Codec
from megatron.compression.communication.overflow import encode, sum_and_encode
from megatron.compression.communication.transport import Rows, TorchTransport
from megatron.compression.communication.work import Work


class _Pieces(NamedTuple):
    """How a tensor is divided into one piece a rank: what depends on its shape alone."""

    codec: Codec
    first: Codec
    second: Codec
    missing: int
    """Values after the last one, or slices of the first dimension, that are zeros."""
    rows: tuple[int, ...]
    """``[W, *shape]``: pieces are flat and a multiple of the codec's block long, or, where the codec sees
    shapes, as many slices of the first dimension as the others."""
    shape: torch.Size


_known: dict[tuple[int, torch.Size, int], _Pieces] = {}
_MOST = 4096


def _pieces(x: Tensor, codec: Codec, ranks: int) -> _Pieces:
    # By the codec's identity: to hash a dataclass takes as long as the rest. What is kept holds it.
    key = id(codec), x.shape, ranks
    found = _known.get(key)
    if found is not None:
        return found
    first, second = codec.hops
    if codec.sees_shape and x.dim() > 1:
        missing = -x.shape[0] % ranks
        shape = torch.Size(((x.shape[0] + missing) // ranks, *x.shape[1:]))
    else:
        shape = torch.Size((-(-x.numel() // (ranks * codec.block)) * codec.block,))
        missing = ranks * shape[0] - x.numel()
    if len(_known) >= _MOST:
        _known.clear()
    found = _known[key] = _Pieces(codec, first, second, missing, (ranks, *shape), shape)
    return found


def _padded(x: Tensor, pieces: _Pieces) -> Tensor:
    if len(pieces.rows) > 2:
        return torch.cat([x, x.new_zeros(pieces.missing, *x.shape[1:])])
    return F.pad(x.reshape(-1), (0, pieces.missing))


def cut(x: Tensor, ranks: int, codec: Codec) -> Tensor:
    """``[ranks, *shape]`` of ``x``'s values in their order, as an all-reduce encodes them."""
    pieces = _pieces(x, codec, ranks)
    return (_padded(x, pieces) if pieces.missing else x).reshape(pieces.rows)


def joined(rows: Tensor, shape: torch.Size) -> Tensor:
    """The tensor of ``shape`` that ``cut`` made ``rows`` of; a view of them."""
    return rows.reshape(-1)[: shape.numel()].view(shape)


def all_reduce(
    x: Tensor, codec: Codec, transport: TorchTransport, out: Tensor | None = None
) -> Work:
    """Start to sum ``x`` (any strides; bf16, fp16, fp32) over the ranks, in two exchanges: encode one piece a
    destination (the codec's first hop), all-to-all, decode + sum + encode the own piece (its second),
    all-gather, decode. Between two ranks one exchange (``Codec.one_exchange``) sends the same bytes: each
    sends all that it has, and the sum is not encoded again. ``wait`` gives the sum, of ``x``'s shape and
    dtype, in a contiguous ``out`` if given.
    """
    ranks = transport.world_size
    if ranks == 1 or x.numel() == 0:
        return Work.completed(x if out is None else out.copy_(x))
    if transport.fuses(codec):
        return transport.fused_all_reduce(x, codec, out)
    if ranks == 2 and codec.one_exchange and (x.dim() > 1 or not codec.sees_shape):
        return sum_of_two(x, codec.hops[0], transport, out)
    pieces = _pieces(x, codec, ranks)
    first, second, shape, dtype = pieces.first, pieces.second, pieces.shape, x.dtype
    rows = (_padded(x, pieces) if pieces.missing else x).reshape(pieces.rows)
    if first.lossless:
        first, payloads = encode(first, rows, transport)
    else:
        payloads = first.encode(rows)
    received, pending = transport.all_to_all(payloads)

    def sum_own_piece() -> Work:
        if second.lossless:
            last, own = sum_and_encode(
                first, received.unsqueeze(1), shape, dtype, second, transport
            )
        else:
            last, own = second, first.decode_sum_encode(received.unsqueeze(1), shape, second)
        gathered, pending = transport.all_gather(own)

        def decode() -> Tensor:
            if not pieces.missing:
                if out is None:
                    return last.decode(gathered, shape, dtype).reshape(x.shape)
                return last.decode_into(gathered, shape, dtype, out.view(pieces.rows)).reshape(
                    x.shape
                )
            total = joined(last.decode(gathered, shape, dtype), x.shape)
            return total if out is None else out.copy_(total)

        return Work(pending, decode)

    return Work(pending, sum_own_piece, exchanges=2)


def sum_of_two(
    x: Tensor, codec: Codec, transport: TorchTransport, out: Tensor | None, scale: float = 1.0
) -> Work:
    """``all_reduce`` between two ranks in one exchange; ``wait`` gives ``scale`` times the sum, in a
    contiguous ``out`` if given, which may be ``x``."""
    into, shape, dtype = None if out is None else out[None], x.shape, x.dtype
    if codec.lossless:
        codec, payload = encode(codec, x[None], transport)
    else:
        payload = codec.encode(x[None])
    both, pending = transport.all_gather(payload)
    return Work(pending, lambda: codec.decode_sum(both.unsqueeze(1), shape, dtype, scale, into)[0])


def reduce_scatter(
    x: Tensor, codec: Codec, transport: TorchTransport, out: Tensor | None = None
) -> Work:
    """Start to sum ``x [W * n, ...]`` over the ranks and keep this rank's slice; the first hop encodes.
    ``wait`` gives ``[n, ...]`` of ``x``'s dtype, in a contiguous ``out`` if given."""
    ranks = transport.world_size
    if x.shape[0] % ranks:
        raise ValueError(
            f"reduce_scatter: the first dimension of {tuple(x.shape)} must divide by the group's {ranks} "
            "ranks"
        )
    shape = torch.Size((x.shape[0] // ranks, *x.shape[1:]))
    if ranks == 1 or x.numel() == 0:
        return Work.completed(x.reshape(shape) if out is None else out.copy_(x.reshape(shape)))
    codec = codec.hops[0]
    if transport.fuses(codec):
        return transport.fused_reduce_scatter(x, codec, out)
    dtype = x.dtype
    codec, payloads = encode(codec, x.reshape(ranks, *shape), transport)
    received, pending = transport.all_to_all(payloads)

    def decode() -> Tensor:
        into = None if out is None else out[None]
        return codec.decode_sum(received.unsqueeze(1), shape, dtype, out=into)[0]

    return Work(pending, decode)


def all_gather(
    x: Tensor, codec: Codec, transport: TorchTransport, out: Tensor | None = None
) -> Work:
    """Start to concatenate every rank's ``x [n, ...]``; the second hop encodes. ``wait`` gives
    ``[W * n, ...]`` of ``x``'s dtype, in a contiguous ``out`` if given."""
    if transport.world_size == 1 or x.numel() == 0:
        full = x.reshape(transport.world_size * x.shape[0], *x.shape[1:])
        return Work.completed(full if out is None else out.copy_(full))
    codec, payload = encode(codec.hops[1], x[None], transport)
    return all_gather_encoded(payload, x.shape, x.dtype, codec, transport, out)


def all_gather_encoded(
    payload: Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    codec: Codec,
    transport: TorchTransport,
    out: Tensor | None = None,
) -> Work:
    """Start to all-gather a tensor of ``shape`` and ``dtype`` that ``codec`` has encoded as uint8
    ``[1, bytes]``, into a contiguous ``out [W * n, ...]`` if given."""
    if transport.fuses(codec):
        return transport.fused_all_gather(payload, shape, dtype, codec, out)
    gathered, pending = transport.all_gather(payload)

    def decode() -> Tensor:
        into = None if out is None else out.view(-1, *shape)
        return codec.decode_into(gathered, shape, dtype, into).flatten(0, 1)

    return Work(pending, decode)


def uncompressed_all_reduce(x: Tensor, group: dist.ProcessGroup, out: Tensor | None = None) -> Work:
    """Start to sum ``x`` over the group in its own dtype, into ``out`` if given, which may be ``x``."""
    total = x.clone(memory_format=torch.contiguous_format) if out is None else out
    if out is not None and out is not x:
        out.copy_(x)
    return Work(dist.all_reduce(total, group=group, async_op=True), lambda: total)


def uncompressed_reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, out: Tensor | None = None
) -> Work:
    """Start to sum ``[W * n, ...]`` over the group in its own dtype and keep this rank's ``[n, ...]``."""
    shard = x.new_empty((x.shape[0] // group.size(), *x.shape[1:])) if out is None else out
    work = dist.reduce_scatter_tensor(shard, x.contiguous(), group=group, async_op=True)
    return Work(work, lambda: shard)


def uncompressed_all_gather(x: Tensor, group: dist.ProcessGroup, out: Tensor | None = None) -> Work:
    """Start to gather ``[n, ...]`` of every rank into ``[W * n, ...]``, in ``out`` if given."""
    full = x.new_empty((x.shape[0] * group.size(), *x.shape[1:])) if out is None else out
    work = dist.all_gather_into_tensor(full, x.contiguous(), group=group, async_op=True)
    return Work(work, lambda: full)


def fp32_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Work:
    """Start to sum ``x`` (contiguous; left as it is) over the group in fp32, at the traffic of an all-reduce
    in its own dtype: an owner adds up a piece in fp32 and rounds the sum once, which is gathered."""
    ranks = group.size()
    piece = -(-x.numel() // ranks)
    pieces = F.pad(x.view(-1), (0, ranks * piece - x.numel()))
    received = torch.empty_like(pieces)
    work = dist.all_to_all_single(received, pieces, group=group, async_op=True)

    def sum_own_piece() -> Work:
        own = sum_in_order(received.view(ranks, piece)).to(x.dtype)
        gathered = own.new_empty(ranks * piece)
        work = dist.all_gather_into_tensor(gathered, own, group=group, async_op=True)
        return Work(work, lambda: gathered[: x.numel()].view(x.shape))

    return Work(work, sum_own_piece, exchanges=2)


def sum_in_order(rows: Tensor) -> Tensor:
    """The fp32 sum of ``[W, n]`` over its rows, one after the other. (``torch.sum`` adds in an order that
    depends on the device, the shape and the number of rows.)"""
    total = rows[0].float() if rows.dtype != torch.float32 else rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def all_to_all_rows(
    x: Tensor, codec: Codec | None, transport: TorchTransport, to: Rows, came: Rows
) -> Work:
    """Start to send ``x [n, values]``, the first ``to[0]`` rows to rank 0 and so on; uncompressed without a
    codec. ``wait`` gives ``[sum(came), values]`` of ``x``'s dtype, in the order of the senders."""
    received, pending = transport.all_to_all(encode_rows(x, codec), to, came)
    return Work(pending, lambda: decode_rows(received, x, codec, x.dtype))


def all_gather_rows(
    x: Tensor, codec: Codec | None, transport: TorchTransport, sizes: Sequence[int]
) -> Work:
    """Start to gather ``[sizes[r], values]`` of every rank r; ``wait`` gives ``[sum(sizes), values]``."""
    ranks = transport.world_size
    # An all-gather of unequal parts is one broadcast a rank on NCCL, and refused by gloo.
    payload = encode_rows(x, codec).repeat(ranks, 1)
    received, pending = transport.all_to_all(payload, [len(x)] * ranks, sizes)
    return Work(pending, lambda: decode_rows(received, x, codec, x.dtype))


def reduce_scatter_rows(
    x: Tensor, codec: Codec | None, transport: TorchTransport, sizes: Sequence[int]
) -> Work:
    """Start to sum ``[sum(sizes), values]`` over the ranks, in fp32 in their order, rounded once; ``wait``
    gives this rank's ``sizes[rank]`` rows."""
    ranks, own = transport.world_size, sizes[transport.group.rank()]
    received, pending = transport.all_to_all(encode_rows(x, codec), sizes, [own] * ranks)

    def finish() -> Tensor:
        addends = decode_rows(received, x, codec, torch.float32)
        return sum_in_order(addends.view(ranks, own, *x.shape[1:])).to(x.dtype)

    return Work(pending, finish)


def encode_rows(x: Tensor, codec: Codec | None) -> Tensor:
    """uint8 ``[n, bytes]`` of ``x [n, values]``, which may have no rows; ``x`` itself without a codec."""
    if codec is None:
        return x.reshape(len(x), x.shape[1:].numel())
    if not len(x):
        return x.new_empty((0, codec.payload_bytes(x.shape[1:])), dtype=torch.uint8)
    return codec.encode(x)


def decode_rows(payloads: Tensor, like: Tensor, codec: Codec | None, dtype: torch.dtype) -> Tensor:
    """``[n, values]`` of uint8 ``[n, bytes]``, which may have no rows; values a row as ``like`` has."""
    shape = like.shape[1:]
    if codec is None:
        return payloads.view(len(payloads), *shape).to(dtype)
    if not len(payloads):
        return like.new_empty((0, *shape), dtype=dtype)
    return codec.decode(payloads, shape, dtype)


def why_not_rows(codec: Codec, values: int) -> str | None:
    """Why a codec cannot send tokens of ``values`` each one by one, each with its own scales, or None."""
    another = "but each token goes its own way: choose another codec, such as int8"
    if codec.lossless:
        return f"codes whole messages, which may overflow, {another}"
    if codec.sees_shape:
        return f"looks at all tokens of a message, {another}"
    if values % codec.block:
        fix = "choose another codec"
        with contextlib.suppress(
            TypeError, ValueError
        ):  # no setting of that name, or not that value
            fix = f"use {dataclasses.replace(cast(Any, codec), group=math.gcd(values, codec.block)).name}"
        return (
            f"encodes {codec.block} values together, which do not divide a token's {values}: {fix}"
        )
    return None


class WithBackward(torch.autograd.Function):
    """``there`` in the forward, ``back`` for the gradient: most of them communicate."""

    @staticmethod
    def forward(
        ctx, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        return ctx.back(grad_output), None, None
