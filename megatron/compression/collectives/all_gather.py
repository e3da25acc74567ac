"""All-gather along the first dimension over a codec."""

from collections.abc import Sequence

import torch

from megatron.compression.codecs import Codec, hop_codecs
from megatron.compression.collectives.transport import TorchTransport
from megatron.compression.collectives.work import CompressedWork, completed
from taco_kernels import Stream


def all_gather(
    x: torch.Tensor, codec: Codec, transport: TorchTransport, async_op: bool = False, key: int = 0
):
    """Concatenate every rank's ``x`` along the first dimension; one quantisation.

    The own slice is decoded from the wire too, so that all ranks hold the same bits.

    Args:
        x: ``[n, ...]``, the same shape on every rank; bf16, fp16 or fp32.
        codec: what encodes the payload: its second hop.
        transport: carries the payload.
        async_op: return a handle after the exchange has been started.
        key: seed of a randomly rounding codec's numbers; elements are numbered through all ranks' slices.

    Returns:
        ``[W * n, ...]`` of ``x``'s dtype, or with ``async_op`` a ``CompressedWork``.
    """
    if transport.world_size == 1 or x.numel() == 0:
        result = x.reshape(transport.world_size * x.shape[0], *x.shape[1:])
        return completed(result) if async_op else result
    wire = encode_slice(x, codec, transport, key)
    return all_gather_encoded(wire, x.shape, x.dtype, codec, transport, async_op, key)


def encode_slice(x: torch.Tensor, codec: Codec, transport: TorchTransport, key: int = 0) -> torch.Tensor:
    """This rank's payload for ``all_gather_encoded``: uint8 ``[1, bytes]``."""
    codec = hop_codecs(codec)[1]
    return codec.encode(x, 1, Stream(key, 0, transport.rank * codec.chunk_numel(x.numel())))


def all_gather_encoded(
    wire: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    codec: Codec,
    transport: TorchTransport,
    async_op: bool = False,
    key: int = 0,
):
    """All-gather a tensor that is already encoded.

    Args:
        wire: uint8 ``[1, bytes]``, ``encode_slice`` of this rank's tensor.
        shape, dtype: of this rank's tensor, not empty.
        codec, transport, async_op, key: as in ``all_gather``.
    """
    codec = hop_codecs(codec)[1]
    if transport.fuses(codec, async_op):
        handle = transport.fused_all_gather(wire, shape, dtype, codec, key)
        return handle if async_op else handle.wait()
    shard = torch.Size(shape).numel()
    full_shape = (transport.world_size * shape[0], *shape[1:])
    gathered, work = transport.all_gather(wire.reshape(-1), async_op=async_op)

    def finish() -> torch.Tensor:
        piece = codec.chunk_numel(shard)
        if piece == shard:
            return codec.decode(gathered, full_shape, dtype, Stream(key, 0))
        slices = [
            codec.decode(row[None], (shard,), dtype, Stream(key, 0, rank * piece))
            for rank, row in enumerate(gathered)
        ]
        return torch.cat(slices).reshape(full_shape)

    return CompressedWork(work, finish) if async_op else finish()
