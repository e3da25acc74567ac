"""All-gather along the first dimension over a codec."""

import torch

from megatron.compression.codecs import Codec
from megatron.compression.communication.overflow import encode
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work


def all_gather(
    x: torch.Tensor, codec: Codec, transport: TorchTransport, out: torch.Tensor | None = None
) -> Work:
    """Start to concatenate every rank's ``x`` along the first dimension; one quantisation.

    The own slice is decoded from its payload too, so that all ranks hold the same bits.

    Args:
        x: ``[n, ...]``, the same shape on every rank; bf16, fp16 or fp32.
        codec: its second hop encodes.
        out: where to put the result, contiguous.
    Returns: ``wait`` gives ``[W * n, ...]`` of ``x``'s dtype.
    """
    if transport.world_size == 1 or x.numel() == 0:
        full = x.reshape(transport.world_size * x.shape[0], *x.shape[1:])
        return Work.completed(full if out is None else out.copy_(full))
    codec, payload = encode_slice(x, codec, transport)
    return all_gather_encoded(payload, x.shape, x.dtype, codec, transport, out)


def encode_slice(x: torch.Tensor, codec: Codec, transport: TorchTransport) -> tuple[Codec, torch.Tensor]:
    """What ``all_gather_encoded`` takes of this rank's tensor: the codec and uint8 ``[1, bytes]``."""
    return encode(codec.hops[1], x[None], transport)


def all_gather_encoded(
    payload: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    codec: Codec,
    transport: TorchTransport,
    out: torch.Tensor | None = None,
) -> Work:
    """Start to all-gather a tensor that is already encoded.

    Args:
        codec, payload: ``encode_slice`` of this rank's tensor.
        shape, dtype: of this rank's tensor, not empty.
        out: where to put the result, contiguous ``[W * n, ...]``.
    """
    if transport.fuses(codec):
        return transport.fused_all_gather(payload, shape, dtype, codec, out)
    gathered, pending = transport.all_gather(payload[0])

    def decode() -> torch.Tensor:
        into = None if out is None else out.view(-1, *shape)
        return codec.decode(gathered, shape, dtype, into).flatten(0, 1)

    return Work(pending, decode)
