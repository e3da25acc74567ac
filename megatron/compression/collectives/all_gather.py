"""All-gather along the first dimension over a codec."""

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
    world_size = transport.world_size
    shape, dtype, shard = (world_size * x.shape[0], *x.shape[1:]), x.dtype, x.numel()
    if world_size == 1 or shard == 0:
        result = x.reshape(shape)
        return completed(result) if async_op else result
    gathered, work = transport.all_gather(codec.encode(x).reshape(-1), async_op=async_op)

    def finish() -> torch.Tensor:
        if codec.chunk_numel(shard) == shard:
            return codec.decode(gathered, shape, dtype)
        return torch.cat([codec.decode(row[None], (shard,), dtype) for row in gathered]).reshape(shape)

    return CompressedWork(work, finish) if async_op else finish()
