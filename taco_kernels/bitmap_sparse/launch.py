"""Launching the packing kernels. Same signatures as reference.py."""

import torch

from taco_kernels.bitmap_sparse.kernels import count_kernel, decode_sum_kernel, pack_kernel
from taco_kernels.bitmap_sparse.layout import TILE_ROWS, WIDTH, BitmapLayout
from taco_kernels.common.device import device_for
from taco_kernels.common.fast_launch import start
from taco_kernels.common.magnitudes import EXPONENT_FLOOR

ROW_WARPS = 1
"""Warps of a row of 1024 values: one shares nothing with another."""
UNROLLED = 4
"""Most senders that a kernel of their own adds up: more would spill."""


def _parts(
    wires: torch.Tensor, layout: BitmapLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, words, starts and exponents of wires as typed views."""
    values = wires.view(torch.int8 if layout.bits == 8 else torch.int16)
    words, starts = (wires[:, at:].view(torch.int32) for at in (layout.words_at, layout.starts_at))
    return values, words, starts, wires[:, layout.exponents_at :]


def _constants(layout: BitmapLayout) -> dict:
    whole = layout.numel % 4 == 0
    return dict(BITS=layout.bits, FLOOR=EXPONENT_FLOOR, WIDTH=WIDTH, WHOLE=whole, num_warps=ROW_WARPS)


def encode(
    x: torch.Tensor, thresholds: torch.Tensor, layout: BitmapLayout, remainder: torch.Tensor | None = None
) -> torch.Tensor:
    """See reference.encode."""
    layout.check_values(x, remainder)
    thresholds, constants = thresholds.contiguous(), _constants(layout)
    numel, rows, grid = layout.numel, layout.rows, (layout.rows, len(x))
    counts = torch.empty((len(x), rows), dtype=torch.int32, device=x.device)
    start(count_kernel, grid, (x, thresholds, counts), (numel, rows, x.stride(0)), **constants)
    begins = (counts.cumsum(1) - counts).clamp(max=layout.capacity).int()
    wires = torch.zeros((len(x), layout.wire_bytes), dtype=torch.uint8, device=x.device)
    values, words, starts, exponents = _parts(wires, layout)
    starts[:, : layout.tiles] = begins[:, ::TILE_ROWS]
    rest = x if remainder is None else remainder
    start(
        pack_kernel,
        grid,
        (x, rest, thresholds, begins, values, words, exponents),
        (
            *(numel, rows, layout.capacity, x.stride(0), rest.stride(0)),
            *(values.stride(0), words.stride(0), exponents.stride(0)),
        ),
        KEEP_REMAINDER=remainder is not None,
        **constants,
    )
    return wires


def decode_sum(wires: torch.Tensor, layout: BitmapLayout) -> torch.Tensor:
    """See reference.decode_sum."""
    layout.check_wires(wires)
    values, words, starts, exponents = _parts(wires, layout)
    senders = len(wires)
    total = torch.empty(layout.numel, dtype=torch.float32, device=wires.device)
    start(
        decode_sum_kernel,
        (layout.rows,),
        (values, words, starts, exponents, total),
        (layout.numel, layout.rows, senders, values.stride(0), words.stride(0), exponents.stride(0)),
        W=senders if senders <= UNROLLED else 0,
        INTERPRET=device_for(wires).interpret,
        **_constants(layout),
    )
    return total
