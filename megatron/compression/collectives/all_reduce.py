"""Two-shot all-reduce over a codec."""

import torch

from megatron.compression.codecs import Codec
from megatron.compression.collectives.transport import TorchTransport
from megatron.compression.collectives.work import CompressedWork, completed


def all_reduce(x: torch.Tensor, codec: Codec, transport: TorchTransport, async_op: bool = False):
    """Sum ``x`` over the ranks of the transport's group.

    Encode one piece a destination, all-to-all, decode + sum + encode the own piece, all-gather, decode. Each
    rank decodes its own piece from the wire like everybody else's, so every rank ends with the same bits, and
    the sum runs in rank order, so the result does not depend on timing. Any world size, any number of values.

    Args:
        x: any shape and stride; bf16, fp16 or fp32. Left as it is.
        codec: what encodes the payload, twice in all.
        transport: carries the payload.
        async_op: return a handle after the first exchange has been started.

    Returns:
        The sum, of ``x``'s shape and dtype; with ``async_op`` a ``CompressedWork`` that gives it.
    """
    world_size = transport.world_size
    if world_size == 1 or x.numel() == 0:
        return completed(x) if async_op else x
    shape, dtype = x.shape, x.dtype
    piece = codec.chunk_numel(x.numel(), world_size)
    received, work = transport.all_to_all(codec.encode(x, chunks=world_size), async_op=async_op)

    def finish() -> torch.Tensor:
        gathered, _ = transport.all_gather(codec.decode_sum_encode(received, piece))
        return codec.decode(gathered, shape, dtype)

    return CompressedWork(work, finish) if async_op else finish()
