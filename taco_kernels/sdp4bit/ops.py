"""Dispatch by device: the Triton kernels on CUDA tensors, the reference on CPU tensors."""

import torch

from taco_kernels.sdp4bit import reference
from taco_kernels.sdp4bit.layout import GroupFormat


def _backend(tensor: torch.Tensor):
    if tensor.is_cuda:
        from taco_kernels.sdp4bit.triton import launch  # a CPU-only host may have no Triton

        return launch
    return reference


def quantize(x: torch.Tensor, format: GroupFormat, out: torch.Tensor | None = None) -> torch.Tensor:
    """Wires uint8[rows, bytes] of x[..., n]; see ``reference.quantize``."""
    return _backend(x).quantize(x, format, out)


def quantize_difference(
    new: torch.Tensor, old: torch.Tensor, format: GroupFormat, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Wires uint8[1, bytes] of new[n] - old[n]; see ``reference.quantize_difference``."""
    return _backend(new).quantize_difference(new, old, format, out)


def sum_dequantize(
    wires: torch.Tensor, format: GroupFormat, out: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """``scale`` times the sum of wires uint8[S, rows, bytes] into out[rows, n]; see the reference."""
    return _backend(wires).sum_dequantize(wires, format, out, scale)


def sum_requantize(
    wires: torch.Tensor,
    format: GroupFormat,
    numel: int,
    target: GroupFormat,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of wires uint8[S, rows, bytes] as wires of another format; see ``reference.sum_requantize``."""
    return _backend(wires).sum_requantize(wires, format, numel, target, out)


def add_dequantized(wires: torch.Tensor, format: GroupFormat, weights: torch.Tensor) -> torch.Tensor:
    """Add wires uint8[rows, bytes] to weights[rows, n] in place; see ``reference.add_dequantized``."""
    return _backend(wires).add_dequantized(wires, format, weights)
