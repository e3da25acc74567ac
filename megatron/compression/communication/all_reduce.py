"""Two-shot all-reduce over a codec."""

import torch

from megatron.compression.codecs import Codec
from megatron.compression.communication.cutting import cut, joined
from megatron.compression.communication.overflow import encode, sum_and_encode
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work


def all_reduce(
    x: torch.Tensor, codec: Codec, transport: TorchTransport, out: torch.Tensor | None = None
) -> Work:
    """Start to sum ``x`` over the ranks of the transport's group.

    Encode one piece a destination, all-to-all, decode + sum + encode the own piece, all-gather, decode. Each
    rank decodes its own piece from the payload like everybody else's, so every rank ends with the same bits,
    and the sum runs in rank order, so the result does not depend on timing. Any world size, any number of
    values.

    Args:
        x: any shape and stride; bf16, fp16 or fp32. Left as it is.
        codec: its first hop encodes the pieces, its second the sums.
        out: where to put the result: contiguous, of ``x``'s shape and dtype.
    Returns: ``wait`` gives the sum, of ``x``'s shape and dtype.
    """
    if transport.world_size == 1 or x.numel() == 0:
        return Work.completed(x if out is None else out.copy_(x))
    if transport.fuses(codec):
        return transport.fused_all_reduce(x, codec, out)
    first, second = codec.hops
    shape, dtype = x.shape, x.dtype
    pieces = cut(x, transport.world_size, codec)
    piece = pieces.shape[1:]

    first, payloads = encode(first, pieces, transport)
    received, pending = transport.all_to_all(payloads)

    def sum_own_piece() -> Work:
        last, own = sum_and_encode(first, received[:, None], piece, dtype, second, transport)
        gathered, pending = transport.all_gather(own[0])

        def decode() -> torch.Tensor:
            if out is not None and out.numel() == len(gathered) * piece.numel():
                return joined(last.decode(gathered, piece, dtype, out.view(len(gathered), *piece)), shape)
            total = joined(last.decode(gathered, piece, dtype), shape)
            return total if out is None else out.copy_(total)

        return Work(pending, decode)

    return Work(pending, sum_own_piece, exchanges=2)
