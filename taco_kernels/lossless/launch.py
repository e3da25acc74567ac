"""Launching the lossless kernels. Same signatures as reference.py.

Programs write their escapes in the order in which they reach the area, so the bytes of a payload
may differ from the reference's and between runs; what they decode to does not.
"""

import torch

from taco_kernels.common import ALIGNMENT, addressable, check_tensor
from taco_kernels.common.fast_launch import start
from taco_kernels.lossless import reference
from taco_kernels.lossless.kernels import decode_kernel, decode_sum_kernel, encode_kernel
from taco_kernels.lossless.reference import HEADER, TILE, LosslessLayout

WARPS = 2
"""Warps of a program; measured on an H200."""


def encode(x: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """See reference.encode."""
    if layout.raw:
        return reference.encode(x, layout)
    check_tensor("x", x, layout.dtype, (None, layout.numel))
    if x.stride(1) != 1:  # rows may lie anywhere, their values not
        x = x.contiguous()
    payloads = torch.empty((len(x), layout.payload_bytes), dtype=torch.uint8, device=x.device)
    payloads[:, :HEADER] = 0  # the kernel counts words in it
    x = x.view(_bits(layout))
    _start(encode_kernel, (x, payloads), x, layout, (x.stride(0), payloads.stride(0)))
    return payloads


def decode(
    payloads: torch.Tensor, layout: LosslessLayout, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See reference.decode.

    Args:
        payloads: uint8 ``[rows, payload_bytes]``.
        layout: of each row.
        out: ``[rows, numel]`` with contiguous rows; allocated if None.
    """
    if layout.raw:
        return reference.decode(payloads, layout, out)
    if out is not None and out.dtype != layout.dtype:
        return out.copy_(decode(payloads, layout))
    check_tensor("payloads", payloads, torch.uint8, (None, layout.payload_bytes))
    payloads = addressable(payloads)
    out = _output(out, len(payloads), layout, layout.dtype, payloads.device)
    bits = out.view(_bits(layout))
    _start(decode_kernel, (payloads, bits), bits, layout, (payloads.stride(0), bits.stride(0)))
    return out


def decode_sum(
    payloads: torch.Tensor,
    layout: LosslessLayout,
    dtype: torch.dtype,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See reference.decode_sum; one kernel.

    Args:
        payloads: uint8 ``[S, rows, payload_bytes]``.
        layout: of each row.
        dtype: of the result.
        scale: multiplied with the fp32 sum.
        out: ``[rows, numel]`` with contiguous rows; allocated if None.
    """
    if layout.raw:
        return reference.decode_sum(payloads, layout, dtype, scale, out)
    check_tensor("payloads", payloads, torch.uint8, (None, None, layout.payload_bytes))
    payloads = addressable(payloads)
    out = _output(out, payloads.shape[1], layout, dtype, payloads.device)
    fixed = payloads.stride(0), payloads.stride(1), out.stride(0), len(payloads), float(scale)
    # Without fusion: the sum is rounded before it is scaled, as in the reference.
    _start(decode_sum_kernel, (payloads, out), out, layout, fixed, enable_fp_fusion=False)
    return out


def _bits(layout: LosslessLayout) -> torch.dtype:
    """The integers that have the values' bits: kernels look at nothing else."""
    return torch.int32 if layout.dtype == torch.float32 else torch.int16


def _output(
    out: torch.Tensor | None,
    rows: int,
    layout: LosslessLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """``out``, checked, or a new tensor ``[rows, numel]`` of ``dtype``."""
    if out is None:
        return torch.empty((rows, layout.numel), dtype=dtype, device=device)
    check_tensor("out", out, out.dtype, (rows, layout.numel), contiguous=True)
    return out


def _start(
    kernel,
    tensors: tuple[torch.Tensor, ...],
    values: torch.Tensor,
    layout: LosslessLayout,
    fixed: tuple,
    **options,
) -> None:
    """Start ``kernel`` with a program a tile of each row of ``values``, and ``fixed`` after the
    offsets."""
    row_bytes = 0
    if len(values) > 1:
        row_bytes = values.stride(0) * values.element_size()
    # Rows of whole tiles, each at an address that 16-byte accesses can reach, need no masks.
    aligned_rows = row_bytes % ALIGNMENT == 0 and values.data_ptr() % ALIGNMENT == 0
    start(
        kernel,
        (layout.tiles, len(values)),
        tensors,
        (layout.sizes, layout.offsets, *fixed),
        FP32=layout.dtype == torch.float32,
        FULL_TILES=layout.numel % TILE == 0 and aligned_rows,
        TILE=TILE,
        num_warps=WARPS,
        **options,
    )
