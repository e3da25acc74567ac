"""The collectives, over a codec or without one; each starts communication and returns its ``Work``.

Over a codec every rank, the owner too, decodes the same payload, so all ranks end with the same
bits. Sums run in fp32 in the order of the ranks, so a result does not depend on timing. In
exchanges of rows (tokens) each row is a payload of its own; ``why_not_rows`` says which codecs
cannot.

A payload is uint8 ``[1, bytes]``, or ``[W, bytes]`` with one row a destination. W is the number of
ranks. A collective has up to two exchanges, hops, each with a codec of its own (``Codec.hops``).

Lossless codecs go through ``overflow.encode``, which may give another codec back: where values did
not fit into their payload, all ranks send them as they are instead, and decode accordingly.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.compression.codecs import Codec
from megatron.compression.communication.overflow import encode, sum_and_encode
from megatron.compression.communication.transport import RowCounts, TorchTransport
from megatron.compression.communication.work import Work
from taco_kernels.common import ceil_div


class _Pieces(NamedTuple):
    """How an all-reduce divides a tensor into one piece a rank: what depends on its shape alone.

    10 values, 2 ranks, blocks of 4:    | 0 1 2 3 4 5 6 7 | 8 9 - - - - - - |    6 missing
    """

    codec: Codec
    first: Codec
    second: Codec
    missing: int
    """Values after the last one, or slices of the first dimension, that are zeros."""
    rows: tuple[int, ...]
    """``[W, *shape]``: pieces are flat and a multiple of the codec's block long, or, where the
    codec sees shapes, as many slices of the first dimension as the others."""
    shape: torch.Size


_pieces_by_shape: dict[tuple[int, torch.Size, int], _Pieces] = {}
"""By the codec's identity, the tensor's shape and the number of ranks."""
_MOST_SHAPES = 4096


def _pieces(x: Tensor, codec: Codec, ranks: int) -> _Pieces:
    # Not by the codec itself: to hash a dataclass takes the host as long as all else here.
    # ``_Pieces`` holds the codec, so that no other one gets its identity.
    key = id(codec), x.shape, ranks
    pieces = _pieces_by_shape.get(key)
    if pieces is not None:
        return pieces
    first, second = codec.hops
    if codec.sees_shape and x.dim() > 1:
        missing = -x.shape[0] % ranks
        shape = torch.Size(((x.shape[0] + missing) // ranks, *x.shape[1:]))
    else:
        shape = torch.Size((ceil_div(x.numel(), ranks * codec.block) * codec.block,))
        missing = ranks * shape[0] - x.numel()
    if len(_pieces_by_shape) >= _MOST_SHAPES:
        _pieces_by_shape.clear()  # shapes that change in every iteration
    pieces = _Pieces(codec, first, second, missing, (ranks, *shape), shape)
    _pieces_by_shape[key] = pieces
    return pieces


def _padded(x: Tensor, pieces: _Pieces) -> Tensor:
    """Return ``x`` with the missing zeros, flat or along its first dimension."""
    if len(pieces.rows) > 2:
        return torch.cat([x, x.new_zeros(pieces.missing, *x.shape[1:])])
    return F.pad(x.reshape(-1), (0, pieces.missing))


def cut(x: Tensor, ranks: int, codec: Codec) -> Tensor:
    """Return ``[ranks, *shape]`` of a tensor's values in their order, as an all-reduce encodes
    them.

    Args:
        x: any tensor; zeros follow its last value.
        ranks: number of pieces.
        codec: pieces are whole blocks of its, or whole tokens where it sees shapes.
    """
    pieces = _pieces(x, codec, ranks)
    return (_padded(x, pieces) if pieces.missing else x).reshape(pieces.rows)


def joined(rows: Tensor, shape: torch.Size) -> Tensor:
    """Return the tensor of ``shape`` that ``cut`` made ``rows`` of; a view of them."""
    return rows.reshape(-1)[: shape.numel()].view(shape)


def all_reduce(
    x: Tensor, codec: Codec, transport: TorchTransport, out: Tensor | None = None
) -> Work:
    """Start to sum a tensor over the ranks.

    In two exchanges: each rank owns one piece of the sum.

        encode one piece a destination (the codec's first hop)
        all-to-all
        decode, sum, encode the sum (its second hop)
        all-gather
        decode

    Between two ranks one exchange (``Codec.one_exchange``) sends as many bytes as these two: each
    sends the other all that it has, and the sum is not encoded again.

    Args:
        x: this rank's addend, of any strides; bf16, fp16 or fp32. It must not change before
            ``wait`` returns.
        codec: encodes addends and sums.
        transport: carries the payloads.
        out: contiguous tensor for the sum, which may be ``x``; None: a new one.

    Returns: work whose ``wait`` gives the sum, of ``x``'s shape and dtype.
    """
    ranks = transport.world_size
    if ranks == 1 or x.numel() == 0:
        return Work.completed(x if out is None else out.copy_(x))
    if transport.fuses(codec):
        # One kernel encodes, exchanges, sums and decodes, on the current stream.
        return transport.fused_all_reduce(x, codec, out)
    # In one exchange the tensor is not cut into pieces. A codec that looks at tokens and channels
    # (``sees_shape``) then needs a tensor that has both.
    if ranks == 2 and codec.one_exchange and (x.dim() > 1 or not codec.sees_shape):
        return sum_of_two(x, codec.hops[0], transport, out)
    pieces = _pieces(x, codec, ranks)
    rows = (_padded(x, pieces) if pieces.missing else x).reshape(pieces.rows)
    first = pieces.first
    if first.lossless:
        first, payloads = encode(first, rows, transport)
    else:
        payloads = first.encode(rows)
    received, pending = transport.all_to_all(payloads)
    # A partial, not a closure over x: its memory may be reused as soon as x is encoded.
    finish = partial(_sum_and_gather, received, first, pieces, x.shape, x.dtype, transport, out)
    return Work(pending, finish, exchanges=2)


def _sum_and_gather(
    received: Tensor,
    first: Codec,
    pieces: _Pieces,
    shape: torch.Size,
    dtype: torch.dtype,
    transport: TorchTransport,
    out: Tensor | None,
) -> Work:
    """Sum this rank's piece, and start the second exchange of an all-reduce.

    ``all_reduce`` hands it to its ``Work``, which calls it when the first exchange has ended.

    Args:
        received: payloads ``[W, bytes]`` of this rank's piece, one from every rank.
        first: the codec that decodes them.
        pieces: how the tensor is divided into one piece a rank.
        shape: the whole tensor's.
        dtype: the whole tensor's.
        transport: carries the payload of the sum.
        out: where the sum of the whole tensor goes; None: a new tensor.
    """
    second = pieces.second
    # [W, 1, bytes]: W addends of one row each, which the codec sums over the first dimension.
    addends = received.unsqueeze(1)
    if second.lossless:
        second, payload = sum_and_encode(first, addends, pieces.shape, dtype, second, transport)
    else:
        payload = first.decode_sum_encode(addends, pieces.shape, second)
    gathered, pending = transport.all_gather(payload)
    return Work(pending, partial(_joined_sum, gathered, second, pieces, shape, dtype, out))


def _joined_sum(
    gathered: Tensor,
    second: Codec,
    pieces: _Pieces,
    shape: torch.Size,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """Decode the sums of all pieces; arguments as of ``_sum_and_gather``, ``second`` decodes."""
    if pieces.missing:
        total = joined(second.decode(gathered, pieces.shape, dtype), shape)
        return total if out is None else out.copy_(total)
    if out is None:
        return second.decode(gathered, pieces.shape, dtype).reshape(shape)
    # Without zeros behind the values the pieces are decoded where they belong.
    rows = out.view(pieces.rows)
    return second.decode_into(gathered, pieces.shape, dtype, rows).reshape(shape)


def sum_of_two(
    x: Tensor, codec: Codec, transport: TorchTransport, out: Tensor | None, scale: float = 1.0
) -> Work:
    """Start to sum a tensor over two ranks, in one exchange.

    Args:
        x: this rank's addend.
        codec: one hop; encodes the addends.
        transport: carries the payloads.
        out: contiguous tensor for the sum, which may be ``x``; None: a new one.
        scale: the sum is multiplied by this.

    Returns: work whose ``wait`` gives ``scale`` times the sum.
    """
    into = None if out is None else out[None]
    shape = x.shape
    dtype = x.dtype
    if codec.lossless:
        codec, payload = encode(codec, x[None], transport)
        both, pending = transport.all_gather(payload)
    elif transport.in_place:
        # Encoded where the gather puts this rank's payload, so that nothing copies it there.
        both = x.new_empty((2, codec.payload_bytes(shape)), dtype=torch.uint8)
        payload = codec.encode_into(x[None], both.narrow(0, transport.group.rank(), 1))
        both, pending = transport.all_gather(payload, both)
    else:
        both, pending = transport.all_gather(codec.encode(x[None]))
    # Each rank gets both payloads, its own too: both sum the same two decoded tensors.
    return Work(pending, lambda: codec.decode_sum(both.unsqueeze(1), shape, dtype, scale, into)[0])


def reduce_scatter(
    x: Tensor, codec: Codec, transport: TorchTransport, out: Tensor | None = None
) -> Work:
    """Start to sum a tensor over the ranks and keep this rank's slice.

    Args:
        x: this rank's addend ``[W * n, ...]``.
        codec: its first hop encodes one slice a destination.
        transport: carries the payloads.
        out: contiguous ``[n, ...]`` for the result; None: a new tensor.

    Returns: work whose ``wait`` gives ``[n, ...]`` of ``x``'s dtype.

    Raises:
        ValueError: the first dimension does not divide by W.
    """
    ranks = transport.world_size
    if x.shape[0] % ranks:
        raise ValueError(
            f"reduce_scatter: the first dimension of {tuple(x.shape)} must divide by the group's "
            f"{ranks} ranks"
        )
    shape = torch.Size((x.shape[0] // ranks, *x.shape[1:]))
    if ranks == 1 or x.numel() == 0:
        return Work.completed(x.reshape(shape) if out is None else out.copy_(x.reshape(shape)))
    # The sum is not encoded again: the second hop has nothing to do.
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
    """Start to concatenate every rank's tensor.

    Args:
        x: this rank's ``[n, ...]``.
        codec: its second hop encodes.
        transport: carries the payloads.
        out: contiguous ``[W * n, ...]`` for the result; None: a new tensor.

    Returns: work whose ``wait`` gives ``[W * n, ...]`` of ``x``'s dtype.
    """
    if transport.world_size == 1 or x.numel() == 0:
        # Without values the shape alone is gathered.
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
    """Start to concatenate every rank's tensor, which is encoded already.

    Args:
        payload: this rank's, uint8 ``[1, bytes]``.
        shape: ``[n, ...]`` of the encoded tensor.
        dtype: its type.
        codec: has encoded it.
        transport: carries the payloads.
        out: contiguous ``[W * n, ...]`` for the result; None: a new tensor.

    Returns: work whose ``wait`` gives ``[W * n, ...]``.
    """
    if transport.fuses(codec):
        return transport.fused_all_gather(payload, shape, dtype, codec, out)
    gathered, pending = transport.all_gather(payload)

    def decode() -> Tensor:
        into = None if out is None else out.view(-1, *shape)
        return codec.decode_into(gathered, shape, dtype, into).flatten(0, 1)

    return Work(pending, decode)


def uncompressed_all_reduce(x: Tensor, group: dist.ProcessGroup, out: Tensor | None = None) -> Work:
    """Start to sum a tensor over the group in its own dtype.

    Args:
        x: this rank's addend.
        group: the ranks.
        out: contiguous tensor for the sum, which may be ``x``; None: a new one.
    """
    # torch sums in place.
    total = out
    if total is None:
        total = x.clone(memory_format=torch.contiguous_format)
    elif total is not x:
        total.copy_(x)
    return Work(dist.all_reduce(total, group=group, async_op=True), lambda: total)


def uncompressed_reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, out: Tensor | None = None
) -> Work:
    """Start to sum a tensor over the group in its own dtype and keep this rank's slice.

    Args:
        x: this rank's addend ``[W * n, ...]``.
        group: the ranks.
        out: contiguous ``[n, ...]`` for the result; None: a new tensor.
    """
    # torch's collectives take contiguous tensors, and leave their input as it is.
    if out is None:
        out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    work = dist.reduce_scatter_tensor(out, x.contiguous(), group=group, async_op=True)
    return Work(work, lambda: out)


def uncompressed_all_gather(x: Tensor, group: dist.ProcessGroup, out: Tensor | None = None) -> Work:
    """Start to concatenate every rank's tensor.

    Args:
        x: this rank's ``[n, ...]``.
        group: the ranks.
        out: contiguous ``[W * n, ...]`` for the result; None: a new tensor.
    """
    if out is None:
        out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    work = dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=True)
    return Work(work, lambda: out)


def fp32_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Work:
    """Start to sum a contiguous tensor over the group in fp32; it is left as it is.

    The traffic is that of an all-reduce in its own dtype: each rank adds up one piece in fp32 and
    rounds the sum once, and the sums are gathered.
    """
    ranks = group.size()
    piece = ceil_div(x.numel(), ranks)
    # Equal pieces, zeros behind the last value.
    pieces = F.pad(x.view(-1), (0, ranks * piece - x.numel()))
    received = torch.empty_like(pieces)
    work = dist.all_to_all_single(received, pieces, group=group, async_op=True)

    def sum_local_piece() -> Work:
        total = sum_in_order(received.view(ranks, piece)).to(x.dtype)
        gathered = total.new_empty(ranks * piece)
        work = dist.all_gather_into_tensor(gathered, total, group=group, async_op=True)
        return Work(work, lambda: gathered[: x.numel()].view(x.shape))

    return Work(work, sum_local_piece, exchanges=2)


def sum_in_order(rows: Tensor) -> Tensor:
    """Return the fp32 sum of ``[W, n]`` over its rows, one after the other.

    ``torch.sum`` adds in an order that depends on the device, the shape and the number of rows.
    """
    total = rows[0].to(torch.float32, copy=True)
    # One addition a rank, in place: no [W, n] fp32 copy is made.
    for row in rows[1:]:
        total += row
    return total


def all_to_all_rows(
    x: Tensor,
    codec: Codec | None,
    transport: TorchTransport,
    send_counts: RowCounts,
    recv_counts: RowCounts,
) -> Work:
    """Start to send rows to each rank.

    Args:
        x: ``[n, values]``, rows for rank 0 first.
        codec: encodes each row; None: uncompressed.
        transport: carries them.
        send_counts: rows for each rank; None: the same number.
        recv_counts: rows from each rank; None: the same number.

    Returns: work whose ``wait`` gives ``[sum(recv_counts), values]``, in the order of the senders.
    """
    received, pending = transport.all_to_all(encode_rows(x, codec), send_counts, recv_counts)
    return Work(pending, lambda: decode_rows(received, x, codec, x.dtype))


def all_gather_rows(
    x: Tensor, codec: Codec | None, transport: TorchTransport, sizes: Sequence[int]
) -> Work:
    """Start to concatenate rows of all ranks.

    Args:
        x: this rank's ``[sizes[rank], values]``.
        codec: encodes each row; None: uncompressed.
        transport: carries them.
        sizes: rows of each rank.

    Returns: work whose ``wait`` gives ``[sum(sizes), values]``.
    """
    ranks = transport.world_size
    # An all-gather of unequal parts is one broadcast a rank on NCCL, and refused by gloo.
    payload = encode_rows(x, codec).repeat(ranks, 1)
    received, pending = transport.all_to_all(payload, [len(x)] * ranks, sizes)
    return Work(pending, lambda: decode_rows(received, x, codec, x.dtype))


def reduce_scatter_rows(
    x: Tensor, codec: Codec | None, transport: TorchTransport, sizes: Sequence[int]
) -> Work:
    """Start to sum rows over the ranks, in fp32 in their order, rounded once, and keep this rank's.

    Args:
        x: this rank's addend ``[sum(sizes), values]``.
        codec: encodes each row; None: uncompressed.
        transport: carries them.
        sizes: rows that each rank keeps.

    Returns: work whose ``wait`` gives ``[sizes[rank], values]``.
    """
    ranks = transport.world_size
    local_rows = sizes[transport.group.rank()]
    received, pending = transport.all_to_all(encode_rows(x, codec), sizes, [local_rows] * ranks)

    def finish() -> Tensor:
        addends = decode_rows(received, x, codec, torch.float32)
        return sum_in_order(addends.view(ranks, local_rows, *x.shape[1:])).to(x.dtype)

    return Work(pending, finish)


def encode_rows(x: Tensor, codec: Codec | None) -> Tensor:
    """Return uint8 ``[n, bytes]`` of ``x [n, values]``, which may have no rows; without a codec
    ``x``."""
    if codec is None:
        return x.reshape(len(x), x.shape[1:].numel())
    if not len(x):
        return x.new_empty((0, codec.payload_bytes(x.shape[1:])), dtype=torch.uint8)
    return codec.encode(x)


def decode_rows(payloads: Tensor, like: Tensor, codec: Codec | None, dtype: torch.dtype) -> Tensor:
    """Return ``[n, values]`` of payloads, which may have no rows.

    Args:
        payloads: uint8 ``[n, bytes]``; without a codec the values.
        like: has as many values a row.
        codec: has encoded them; None: nothing has.
        dtype: of the result.
    """
    shape = like.shape[1:]
    if codec is None:
        return payloads.view(len(payloads), *shape).to(dtype)
    if not len(payloads):
        return like.new_empty((0, *shape), dtype=dtype)
    return codec.decode(payloads, shape, dtype)


def why_not_rows(codec: Codec, values: int) -> str | None:
    """Return why a codec cannot send tokens of ``values`` one by one, each with its own scales, or
    None."""
    another = "but each token goes its own way: choose another codec, such as int8"
    if codec.lossless:
        return f"codes whole messages, which may overflow, {another}"
    if codec.sees_shape:
        return f"looks at all tokens of a message, {another}"
    if values % codec.block:
        fix = "choose another codec"
        # Where it has no setting of that name, or not that value, there is no better advice.
        with contextlib.suppress(TypeError, ValueError):
            smaller = dataclasses.replace(cast(Any, codec), group=math.gcd(values, codec.block))
            fix = f"use {smaller.name}"
        return (
            f"encodes {codec.block} values together, which do not divide a token's {values}: {fix}"
        )
    return None


class WithBackward(torch.autograd.Function):
    """A function and what makes the gradient of its input: most of them communicate.

    y = WithBackward.apply(x, function, gradient_function)
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        gradient_function: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.gradient_function = gradient_function
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        return ctx.gradient_function(grad_output), None, None
