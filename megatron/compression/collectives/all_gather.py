"""All-gather along the first dimension over a codec."""

from collections.abc import Sequence

import torch

from megatron.compression.codecs import Codec
from megatron.compression.collectives.transport import TorchTransport
from megatron.compression.collectives.work import CompressedWork, completed


def all_gather(x: torch.Tensor, codec: Codec, transport: TorchTransport, async_op: bool = False):
    """Concatenate every rank's ``x`` along the first dimension; one quantisation.

    The own slice is decoded from the wire too, so that all ranks hold the same bits.

    Args:
        x: ``[n, ...]``, the same shape on every rank; bf16, fp16 or fp32.
        codec: what encodes the payload.
        transport: carries the payload.
        async_op: return a handle after the exchange has been started.

    Returns:
        ``[W * n, ...]`` of ``x``'s dtype, or with ``async_op`` a ``CompressedWork``.
    """
    if transport.world_size == 1 or x.numel() == 0:
        result = x.reshape(transport.world_size * x.shape[0], *x.shape[1:])
        return completed(result) if async_op else result
    return all_gather_encoded(codec.encode(x), x.shape, x.dtype, codec, transport, async_op)


def all_gather_encoded(
    wire: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    codec: Codec,
    transport: TorchTransport,
    async_op: bool = False,
):
    """All-gather a tensor that is already encoded.

    Args:
        wire: uint8 ``[1, bytes]``, ``codec.encode`` of this rank's tensor.
        shape, dtype: of this rank's tensor, not empty.
        codec, transport, async_op: as in ``all_gather``.
    """
    shard = torch.Size(shape).numel()
    full_shape = (transport.world_size * shape[0], *shape[1:])
    gathered, work = transport.all_gather(wire.reshape(-1), async_op=async_op)

    def finish() -> torch.Tensor:
        if codec.chunk_numel(shard) == shard:
            return codec.decode(gathered, full_shape, dtype)
        return torch.cat([codec.decode(row[None], (shard,), dtype) for row in gathered]).reshape(full_shape)

    return CompressedWork(work, finish) if async_op else finish()
