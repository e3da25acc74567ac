"""Reduce-scatter along the first dimension over a codec."""

import torch

from megatron.compression.codecs import Codec, hop_codecs
from megatron.compression.collectives.transport import TorchTransport
from megatron.compression.collectives.work import CompressedWork, completed
from taco_kernels import Stream


def reduce_scatter(
    x: torch.Tensor,
    codec: Codec,
    transport: TorchTransport,
    async_op: bool = False,
    key: int = 0,
    out: torch.Tensor | None = None,
):
    """Sum ``x`` over the group and keep this rank's slice of the first dimension; one quantisation.

    Args:
        x: ``[W * n, ...]``, bf16, fp16 or fp32.
        codec: what encodes the payload: its first hop.
        transport: carries the payload.
        async_op: return a handle after the exchange has been started.
        key: seed of a randomly rounding codec's numbers, as in ``all_reduce``'s first hop.
        out: where to put the result, contiguous.

    Returns:
        ``[n, ...]`` of ``x``'s dtype, or with ``async_op`` a ``CompressedWork``.

    Raises:
        ValueError: the first dimension does not divide by the world size.
    """
    codec = hop_codecs(codec)[0]
    world_size, rank = transport.world_size, transport.rank
    if x.shape[0] % world_size:
        raise ValueError(
            f"reduce_scatter: the first dimension of {tuple(x.shape)} must divide by the group's "
            f"{world_size} ranks"
        )
    shape = (x.shape[0] // world_size, *x.shape[1:])
    if world_size == 1 or x.numel() == 0:
        result = x.reshape(shape) if out is None else out.copy_(x.reshape(shape))
        return completed(result) if async_op else result
    if transport.fuses(codec, async_op):
        handle = transport.fused_reduce_scatter(x, codec, key, out)
        return handle if async_op else handle.wait()
    dtype = x.dtype
    shard = x.numel() // world_size
    piece = codec.chunk_numel(shard)
    if piece == shard:
        wires = codec.encode(x, world_size, Stream(key, rank))
    else:  # pieces would straddle the shards' borders: pad each shard by itself
        parts = enumerate(x.reshape(world_size, shard))
        wires = torch.cat([codec.encode(part, 1, Stream(key, rank, w * piece)) for w, part in parts])
    received, work = transport.all_to_all(wires, async_op=async_op)

    def finish() -> torch.Tensor:
        return codec.decode_sum(received, shape, dtype, Stream(key, 0, rank * piece), out)

    return CompressedWork(work, finish) if async_op else finish()
