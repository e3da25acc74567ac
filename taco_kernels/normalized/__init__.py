"""Integers of channels without their mean and spread: what a pipeline stage sends, behind its own statistics.

``encode`` and ``decode`` run Triton kernels on CUDA tensors and ``reference.py`` elsewhere. The statistics
take one pass over the tensor, the normalisation none: it happens where the codec loads and stores.
"""

import torch

from taco_kernels.layout import Stream, check_stream
from taco_kernels.normalized import reference
from taco_kernels.normalized.layout import NormalizedLayout

__all__ = ["NormalizedLayout", "decode", "encode"]


def _backend(tensor: torch.Tensor):
    if tensor.is_cuda:
        from taco_kernels.normalized import launch  # a CPU-only host may have no Triton

        return launch
    return reference


def encode(x: torch.Tensor, layout: NormalizedLayout, random: Stream | None = None) -> torch.Tensor:
    """uint8 ``[wire_bytes]`` of x ``[tokens, channels]`` (bf16, fp16, fp32); see reference.encode.

    ``random`` is needed unless rounding is nearest.

    Raises:
        ValueError: x is not of the layout's shape, or ``random`` is missing.
    """
    check_stream(random, layout.config, "random")
    if tuple(x.shape) != (layout.tokens, layout.channels):
        raise ValueError(f"x is {list(x.shape)}; this layout needs [{layout.tokens}, {layout.channels}]")
    return _backend(x).encode(x, layout, random)


def decode(
    wire: torch.Tensor, layout: NormalizedLayout, dtype: torch.dtype, random: Stream | None = None
) -> torch.Tensor:
    """Inverse of encode: ``[tokens, channels]`` in ``dtype``; dither needs the encoder's ``random``.

    Raises:
        ValueError: wire is not uint8 ``[wire_bytes]``, or ``random`` is missing.
    """
    check_stream(random, layout.config, "random", decoding=True)
    if tuple(wire.shape) != (layout.wire_bytes,) or wire.dtype != torch.uint8:
        raise ValueError(
            f"wire is {wire.dtype}{list(wire.shape)}; this layout needs uint8[{layout.wire_bytes}]"
        )
    return _backend(wire).decode(wire, layout, dtype, random)
