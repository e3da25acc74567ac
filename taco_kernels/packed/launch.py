"""Launching the packing kernels. Same signatures as reference.py."""

import torch
import triton

from taco_kernels.homomorphic.layout import EXPONENT_FLOOR
from taco_kernels.packed.kernels import count_kernel, decode_sum_kernel, pack_kernel, survey_kernel
from taco_kernels.packed.layout import WIDTH, PackedLayout
from taco_kernels.triton.fast_launch import start

ROWS = 4
"""Rows a program holds at a time."""


def _parts(wires: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, words and exponents of wires as typed views."""
    values = wires.view({8: torch.int8, 16: torch.int16, 32: torch.int32}[layout.bits])
    return values, wires[:, layout.words_at :].view(torch.int32), wires[:, layout.exponents_at :]


def encode(
    x: torch.Tensor, thresholds: torch.Tensor, layout: PackedLayout, remainder: torch.Tensor | None = None
) -> torch.Tensor:
    """See reference.encode."""
    thresholds = thresholds.contiguous()
    wires = torch.zeros((len(x), layout.wire_bytes), dtype=torch.uint8, device=x.device)
    values, words, exponents = _parts(wires, layout)
    counts = torch.empty((len(x), layout.rows), dtype=torch.int32, device=x.device)
    grid = (triton.cdiv(layout.rows, ROWS), len(x))
    constants = dict(BITS=layout.bits, FLOOR=EXPONENT_FLOOR, WIDTH=WIDTH, T=ROWS, num_warps=8)
    start(
        survey_kernel,
        grid,
        (x, thresholds, counts, exponents),
        (layout.numel, layout.rows, x.stride(0), exponents.stride(0)),
        **constants,
    )
    start(
        pack_kernel,
        grid,
        (
            x,
            x if remainder is None else remainder,
            thresholds,
            exponents,
            counts.cumsum(1, dtype=torch.int32),
            values,
            words,
        ),
        (
            layout.numel,
            layout.rows,
            layout.capacity,
            x.stride(0),
            0 if remainder is None else remainder.stride(0),
            exponents.stride(0),
            values.stride(0),
            words.stride(0),
        ),
        KEEP_REMAINDER=remainder is not None,
        **constants,
    )
    return wires


def decode_sum(wires: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """See reference.decode_sum."""
    values, words, exponents = _parts(wires, layout)
    counts = torch.empty((len(wires), layout.rows), dtype=torch.int32, device=wires.device)
    rows = triton.cdiv(layout.rows, ROWS)
    start(
        count_kernel,
        (rows, len(wires)),
        (words, counts),
        (layout.rows, words.stride(0)),
        WIDTH=WIDTH,
        T=ROWS,
    )
    total = torch.empty(layout.numel, dtype=torch.float32, device=wires.device)
    start(
        decode_sum_kernel,
        (rows,),
        (values, words, exponents, counts.cumsum(1, dtype=torch.int32), total),
        (layout.numel, layout.rows, len(wires), values.stride(0), words.stride(0), exponents.stride(0)),
        BITS=layout.bits,
        FLOOR=EXPONENT_FLOOR,
        WIDTH=WIDTH,
        T=ROWS,
        num_warps=8,
    )
    return total
