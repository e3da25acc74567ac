"""Reduce-scatter along the first dimension over a codec."""

import torch

from megatron.compression.codecs import Codec
from megatron.compression.communication.overflow import encode
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work


def reduce_scatter(
    x: torch.Tensor, codec: Codec, transport: TorchTransport, out: torch.Tensor | None = None
) -> Work:
    """Start to sum ``x`` over the group and keep this rank's slice of the first dimension; one quantisation.

    Args:
        x: ``[W * n, ...]``, bf16, fp16 or fp32.
        codec: its first hop encodes.
        out: where to put the result, contiguous.
    Returns: ``wait`` gives ``[n, ...]`` of ``x``'s dtype.
    Raises: ValueError: the first dimension does not divide by the world size.
    """
    world_size = transport.world_size
    if x.shape[0] % world_size:
        raise ValueError(
            f"reduce_scatter: the first dimension of {tuple(x.shape)} must divide by the group's "
            f"{world_size} ranks"
        )
    shape = torch.Size((x.shape[0] // world_size, *x.shape[1:]))
    if world_size == 1 or x.numel() == 0:
        return Work.completed(x.reshape(shape) if out is None else out.copy_(x.reshape(shape)))
    codec = codec.hops[0]
    if transport.fuses(codec):
        return transport.fused_reduce_scatter(x, codec, out)
    dtype = x.dtype
    codec, payloads = encode(codec, x.reshape(world_size, *shape), transport)
    received, pending = transport.all_to_all(payloads)

    def decode() -> torch.Tensor:
        into = None if out is None else out[None]
        return codec.decode_sum(received[:, None], shape, dtype, out=into)[0]

    return Work(pending, decode)
