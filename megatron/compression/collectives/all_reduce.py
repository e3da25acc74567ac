"""Two-shot all-reduce over a codec."""

import torch

from megatron.compression.codecs import Codec, hop_codecs
from megatron.compression.collectives.transport import TorchTransport
from megatron.compression.collectives.work import CompressedWork, completed
from taco_kernels import Stream


def all_reduce(
    x: torch.Tensor,
    codec: Codec,
    transport: TorchTransport,
    async_op: bool = False,
    key: int = 0,
    out: torch.Tensor | None = None,
):
    """Sum ``x`` over the ranks of the transport's group.

    Encode one piece a destination, all-to-all, decode + sum + encode the own piece, all-gather, decode. Each
    rank decodes its own piece from the wire like everybody else's, so every rank ends with the same bits, and
    the sum runs in rank order, so the result does not depend on timing. Any world size, any number of values.

    Args:
        x: any shape and stride; bf16, fp16 or fp32. Left as it is.
        codec: what encodes the payload, twice in all; its hops may differ.
        transport: carries the payload.
        async_op: return a handle after the first exchange has been started.
        key: seed of a randomly rounding codec's numbers, the same on every rank. Hop 1 draws from one stream
            a sender, hop 2 from one more; elements are numbered through the whole tensor.
        out: where to put the result: contiguous, of ``x``'s shape and dtype.

    Returns:
        The sum, of ``x``'s shape and dtype; with ``async_op`` a ``CompressedWork`` that gives it.
    """
    world_size, rank = transport.world_size, transport.rank
    if world_size == 1 or x.numel() == 0:
        result = x if out is None else out.copy_(x)
        return completed(result) if async_op else result
    if transport.fuses(codec, async_op):
        handle = transport.fused_all_reduce(x, codec, key, out)
        return handle if async_op else handle.wait()
    shape, dtype = x.shape, x.dtype
    piece = codec.chunk_numel(x.numel(), world_size)
    second = hop_codecs(codec)[1]
    wires = codec.encode(x, world_size, Stream(key, rank))
    received, work = transport.all_to_all(wires, async_op=async_op)

    def sum_own_piece() -> CompressedWork:
        offset = rank * piece
        own = codec.decode_sum_encode(
            received, piece, Stream(key, 0, offset), Stream(key, world_size, offset)
        )
        gathered, work = transport.all_gather(own, async_op=async_op)
        random = Stream(key, world_size)
        return CompressedWork(work, lambda: second.decode(gathered, shape, dtype, random, out))

    handle = CompressedWork(work, sum_own_piece, exchanges=2)
    return handle if async_op else handle.wait()
