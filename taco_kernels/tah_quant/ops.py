"""Dispatch by device: the Triton kernels on CUDA tensors, the reference on CPU tensors."""

from collections.abc import Sequence

import torch

from taco_kernels.tah_quant import reference
from taco_kernels.tah_quant.layout import TahConfig


def _backend(tensor: torch.Tensor):
    if tensor.is_cuda:
        from taco_kernels.tah_quant.kernels import launch  # a CPU-only host may have no Triton

        return launch
    return reference


def encode(x: torch.Tensor, config: TahConfig) -> torch.Tensor:
    """Encode x (any shape and stride, bf16/fp16/fp32): uint8[layout_of(config, x.shape).wire_bytes]."""
    return _backend(x).encode(x, config)


def decode(wire: torch.Tensor, config: TahConfig, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Invert encode."""
    return _backend(wire).decode(wire, config, shape, dtype)
