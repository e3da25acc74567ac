"""Sparse tensors as their values end to end and a bitmap: the fewest bytes to where they are added up.

``encode`` and ``decode_sum`` run Triton kernels on CUDA tensors and ``reference.py`` elsewhere. Beside
``taco_kernels.homomorphic``, whose sketches can be added on the way.
"""

import torch

from taco_kernels.packed import reference
from taco_kernels.packed.layout import PackedLayout

__all__ = ["PackedLayout", "decode_sum", "encode"]


def _backend(tensor: torch.Tensor):
    if tensor.is_cuda:
        from taco_kernels.packed import launch  # a CPU-only host may have no Triton

        return launch
    return reference


def encode(
    x: torch.Tensor, thresholds: torch.Tensor, layout: PackedLayout, remainder: torch.Tensor | None = None
) -> torch.Tensor:
    """Pack x fp32 ``[S, numel]`` into wires uint8 ``[S, wire_bytes]``; see reference.encode.

    Raises:
        ValueError: x is not of the layout, holds no shard, or the remainder is not like it.
    """
    if x.dim() != 2 or x.shape[1] != layout.numel or x.dtype != torch.float32 or x.stride(1) != 1:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; this layout needs float32[*, {layout.numel}]")
    if not len(x):
        raise ValueError("x has no shard to pack")
    if remainder is not None and (
        remainder.shape != x.shape or remainder.dtype != torch.float32 or remainder.stride(1) != 1
    ):
        raise ValueError(
            f"remainder is {remainder.dtype}{list(remainder.shape)}, strides {remainder.stride()}; it must "
            f"be float32{list(x.shape)} with contiguous rows"
        )
    return _backend(x).encode(x, thresholds, layout, remainder)


def decode_sum(wires: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """fp32 ``[numel]``: the sum of wires uint8 ``[W, wire_bytes]``, in fp32 and in their order.

    Raises:
        ValueError: wires are not of the layout, or there are none.
    """
    if (
        wires.dim() != 2
        or not len(wires)
        or wires.shape[1] != layout.wire_bytes
        or wires.dtype != torch.uint8
    ):
        raise ValueError(
            f"wires is {wires.dtype}{list(wires.shape)}; this layout needs uint8[*, {layout.wire_bytes}]"
        )
    return _backend(wires).decode_sum(wires, layout)
