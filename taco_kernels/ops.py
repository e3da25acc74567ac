"""Dispatch by device: the Triton kernels on CUDA tensors, the reference on CPU tensors."""

import torch

from taco_kernels import reference
from taco_kernels.layout import CodecConfig, Stream


def _backend(tensor: torch.Tensor):
    if tensor.is_cuda:
        from taco_kernels.triton import launch  # a CPU-only host may have no Triton

        return launch
    return reference


def encode(
    x: torch.Tensor,
    config: CodecConfig,
    chunks: int = 1,
    random: Stream | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode x (any shape and stride, bf16/fp16/fp32) as ``chunks`` equal pieces of its row-major order.

    Returns uint8[chunks, wire_bytes(C)], C = config.chunk_numel(x.numel(), chunks), zero padded at the end;
    into ``out`` if given. ``random`` is needed unless rounding is nearest (ValueError).
    """
    return _backend(x).encode(x, config, chunks, random, out)


def decode(
    wires: torch.Tensor,
    config: CodecConfig,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    random: Stream | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Inverse of encode with chunks = wires.shape[0]; dither needs the encoder's ``random``."""
    return _backend(wires).decode(wires, config, shape, dtype, random, out)


def decode_sum(
    wires: torch.Tensor,
    config: CodecConfig,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    random: Stream | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the same chunk from W senders, wires uint8[W, wire_bytes(numel)], accumulated in fp32 in order.

    With dither, ``random`` is sender 0's and sender w's stream is ``random.stream + w``; the offset is the
    number of the chunk's first element in the senders' encode.
    """
    return _backend(wires).decode_sum(wires, config, shape, dtype, random, out)


def decode_sum_encode(
    wires: torch.Tensor,
    config: CodecConfig,
    numel: int,
    random_in: Stream | None = None,
    random_out: Stream | None = None,
    out: torch.Tensor | None = None,
    config_out: CodecConfig | None = None,
) -> torch.Tensor:
    """encode(decode_sum(wires)) without leaving the Hadamard domain: uint8[wire_bytes(numel)].

    ``random_in`` is the senders' as in decode_sum, ``random_out`` that of the new encode, ``config_out`` its
    config if it is another one (of the same groups).
    """
    return _backend(wires).decode_sum_encode(wires, config, numel, random_in, random_out, out, config_out)
