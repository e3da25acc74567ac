"""Dispatch by device: the Triton kernels on CUDA tensors, the reference on CPU tensors."""

import torch

from taco_kernels.homomorphic import reference
from taco_kernels.homomorphic.layout import Layout
from taco_kernels.homomorphic.reference import Decoded


def _backend(tensor: torch.Tensor):
    if tensor.is_cuda:
        from taco_kernels.homomorphic import launch  # a CPU-only host may have no Triton

        return launch
    return reference


def row_exponents(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Biased fp32 exponent of every row's largest magnitude: uint8 ``[S, rows]`` for x fp32 ``[S, numel]``.

    255 where a NaN or an infinity is. All senders encode with the maximum of their exponents.
    """
    _check("x", x, torch.float32, layout.numel)
    return _backend(x).row_exponents(x, layout)


def encode(
    x: torch.Tensor,
    thresholds: torch.Tensor,
    exponents: torch.Tensor,
    layout: Layout,
    senders: int,
    seed: int,
    remainder: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sketches uint8 ``[S, wire_bytes]`` of the values that reach their shard's threshold.

    See reference.encode. ``remainder`` (it may be x) gets what is not sent.
    """
    _check("x", x, torch.float32, layout.numel)
    _check("exponents", exponents, torch.uint8, layout.rows)
    if remainder is not None:
        _check("remainder", remainder, torch.float32, layout.numel)
    return _backend(x).encode(x, thresholds, exponents, layout, senders, seed, remainder)


def combine(wires: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cells (int32) and union of the bitmaps (int32 words) of wires uint8 ``[W, wire_bytes]``."""
    _check("wires", wires, torch.uint8, layout.wire_bytes)
    return _backend(wires).combine(wires, layout)


def pack(cells: torch.Tensor, words: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The wire uint8 ``[wire_bytes]`` of combined cells and words, which may be combined again."""
    return reference.pack(cells, words, layout)


def decode(
    cells: torch.Tensor, words: torch.Tensor, exponents: torch.Tensor, layout: Layout, senders: int, seed: int
) -> Decoded:
    """The sum: values fp32 ``[numel]``, counters (union, leftovers) and how good the estimates are.

    Uses ``cells`` up. See the reference.
    """
    return _backend(cells).decode(cells, words, exponents, layout, senders, seed)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, last: int) -> None:
    if tensor.dim() != 2 or tensor.shape[1] != last or tensor.dtype != dtype or tensor.stride(1) != 1:
        raise ValueError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()}; this layout needs "
            f"{dtype}[*, {last}] with contiguous rows"
        )
