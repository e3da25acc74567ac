"""Exchanges of tokens: each row is a payload of its own, and ranks may send and get any number of them.

Rows that travel alone can be cut at any place, so one codec call encodes all of a rank's rows, whoever gets
them, and the backend moves them by splits in rows. The codec must serve a row: no ``sees_shape``, not
``lossless``, whole groups (``why_not_rows``).
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from megatron.compression.codecs import Codec
from megatron.compression.communication.collectives import sum_in_order
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work

Sizes = Sequence[int] | None
"""Rows for each rank of the group, or from each; None: the same number."""


def all_to_all_rows(
    x: torch.Tensor, codec: Codec | None, transport: TorchTransport, to: Sizes, came: Sizes
) -> Work:
    """Start to send ``x [n, values]``, the first ``to[0]`` rows to rank 0 and so on; one quantisation.

    Args:
        codec: None sends the rows as they are.
        came: rows from each rank.
    Returns: ``wait`` gives ``[sum(came), values]`` of ``x``'s dtype, in the order of the senders.
    """
    received, pending = transport.all_to_all_rows(encode_rows(x, codec), to, came)
    return Work(pending, lambda: decode_rows(received, x, codec, x.dtype))


def all_gather_rows(
    x: torch.Tensor, codec: Codec | None, transport: TorchTransport, sizes: Sequence[int]
) -> Work:
    """Start to gather ``[sizes[r], values]`` of every rank r; ``wait`` gives ``[sum(sizes), values]``."""
    ranks = transport.world_size
    # An all-gather of unequal parts is one broadcast a rank on NCCL, and refused by gloo.
    payload = encode_rows(x, codec).repeat(ranks, 1)
    received, pending = transport.all_to_all_rows(payload, [len(x)] * ranks, sizes)
    return Work(pending, lambda: decode_rows(received, x, codec, x.dtype))


def reduce_scatter_rows(
    x: torch.Tensor, codec: Codec | None, transport: TorchTransport, sizes: Sequence[int]
) -> Work:
    """Start to sum ``[sum(sizes), values]`` over the ranks; ``wait`` gives this rank's ``sizes[rank]`` rows.

    Summed in fp32 in the order of the ranks and rounded once.
    """
    ranks, own = transport.world_size, sizes[transport.group.rank()]
    received, pending = transport.all_to_all_rows(encode_rows(x, codec), sizes, [own] * ranks)

    def finish() -> torch.Tensor:
        addends = decode_rows(received, x, codec, torch.float32)
        return sum_in_order(addends.view(ranks, own, *x.shape[1:])).to(x.dtype)

    return Work(pending, finish)


def encode_rows(x: torch.Tensor, codec: Codec | None) -> torch.Tensor:
    """uint8 ``[n, bytes]`` of ``x [n, values]``, which may have no rows; ``x`` itself without a codec."""
    if codec is None:
        return x.reshape(len(x), x.shape[1:].numel())
    if not len(x):
        return x.new_empty((0, codec.payload_bytes(x.shape[1:])), dtype=torch.uint8)
    return codec.encode(x)


def decode_rows(
    payloads: torch.Tensor, like: torch.Tensor, codec: Codec | None, dtype: torch.dtype
) -> torch.Tensor:
    """``[n, values]`` of uint8 ``[n, bytes]``, which may have no rows; values a row as ``like`` has."""
    shape = like.shape[1:]
    if codec is None:
        return payloads.view(len(payloads), *shape).to(dtype)
    if not len(payloads):
        return like.new_empty((0, *shape), dtype=dtype)
    return codec.decode(payloads, shape, dtype)


def why_not_rows(codec: Codec, values: int) -> str | None:
    """Why a codec cannot send tokens one by one, each with its own scales, or None.

    Args:
        values: of a token.
    """
    if codec.lossless:
        return (
            "codes whole messages, which may overflow, but each token goes its own way: choose another "
            "codec, such as int8"
        )
    if codec.sees_shape:
        return (
            "looks at all tokens of a message, but each goes its own way: choose another codec, such as int8"
        )
    if values % codec.block:
        together = f"encodes {codec.block} values together, which do not divide a token's {values}"
        return f"{together}: {_fitting(codec, values)}"
    return None


def _fitting(codec: Codec, values: int) -> str:
    """The same codec with the largest group that divides a token."""
    group = math.gcd(values, codec.block)
    with contextlib.suppress(TypeError, ValueError):  # no setting of that name, or not that value
        return f"use {dataclasses.replace(cast(Any, codec), group=group).name}"
    return "choose another codec"
