"""Launching the packing kernels. Same signatures as reference.py."""

import torch

from taco_kernels.bitmap_sparse.kernels import decode_sum_kernel
from taco_kernels.bitmap_sparse.layout import WIDTH, BitmapLayout
from taco_kernels.bitmap_sparse.pack_kernels import pack_kernel
from taco_kernels.bitmap_sparse.sum_kernels import sum_kernel
from taco_kernels.common.device import device_for
from taco_kernels.common.fast_launch import start
from taco_kernels.common.magnitudes import EXPONENT_FLOOR
from taco_kernels.common.sizes import ceil_div

ROW_WARPS = 1
"""Warps of a row of 1024 values: one shares nothing with another."""
PACK_ROWS, PACK_REGISTERS = 4, 64
"""Rows, a warp each, of a program that packs; most registers of a thread (half of all warps fit)."""
ZEROS, ZEROING = 16, 64
"""Zeros a lane that a program writes at a time behind the last code; most programs that do so."""
SUM_ROWS = 4
"""Rows, a warp each, of a program that adds 16-bit values up."""
UNROLLED = {8: 4, 16: 8}
"""By bits of a value, most senders that a kernel of their own adds up: more would spill."""


def _parts(
    wires: torch.Tensor, layout: BitmapLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, words, starts and exponents of wires as typed views."""
    values = wires.view(torch.int8 if layout.bits == 8 else torch.int16)
    words, starts = (wires[:, at:].view(torch.int32) for at in (layout.words_at, layout.starts_at))
    return values, words, starts, wires[:, layout.exponents_at :]


def encode(
    x: torch.Tensor, thresholds: torch.Tensor, layout: BitmapLayout, remainder: torch.Tensor | None = None
) -> torch.Tensor:
    """See reference.encode."""
    layout.check_values(x, remainder)
    thresholds = thresholds.contiguous()
    wires = torch.empty((len(x), layout.wire_bytes), dtype=torch.uint8, device=x.device)
    values, words, starts, exponents = _parts(wires, layout)
    tiles, room = ceil_div(layout.rows, PACK_ROWS), layout.words_at // values.element_size()
    zeroing = min(ZEROING, ceil_div(room, ZEROS * PACK_ROWS * 32))
    status = torch.zeros((len(x), tiles), dtype=torch.int64, device=x.device)
    rest, rest_stride = (x, 0) if remainder is None else (remainder, remainder.stride(0))
    start(
        pack_kernel,
        (tiles + zeroing, len(x)),
        (x, rest, thresholds, status, values, words, starts, exponents),
        (
            *(layout.numel, layout.rows, tiles, layout.capacity, room, zeroing),
            *(x.stride(0), rest_stride, values.stride(0), words.stride(0), exponents.stride(0)),
        ),
        KEEP_REMAINDER=remainder is not None,
        BITS=layout.bits,
        FLOOR=EXPONENT_FLOOR,
        WIDTH=WIDTH,
        INTERPRET=device_for(x).interpret,
        R=PACK_ROWS,
        Z=ZEROS,
        num_warps=PACK_ROWS,
        maxnreg=PACK_REGISTERS,
    )
    return wires


def decode_sum(wires: torch.Tensor, layout: BitmapLayout) -> torch.Tensor:
    """See reference.decode_sum."""
    layout.check_wires(wires)
    values, words, starts, exponents = _parts(wires, layout)
    senders, rows = len(wires), layout.rows
    total = torch.empty(layout.numel, dtype=torch.float32, device=wires.device)
    unrolled = senders <= UNROLLED[layout.bits]
    constants = dict(
        W=senders if unrolled else 0,
        BITS=layout.bits,
        FLOOR=EXPONENT_FLOOR,
        WIDTH=WIDTH,
        WHOLE=layout.numel % 4 == 0,
        INTERPRET=device_for(wires).interpret,
    )
    tensors = (values, words, starts, exponents, total)
    strides = (values.stride(0), words.stride(0), exponents.stride(0))
    if unrolled and layout.bits == 16:
        start(
            sum_kernel,
            (ceil_div(rows, SUM_ROWS),),
            tensors,
            (layout.numel, rows, *strides),
            **constants,
            R=SUM_ROWS,
            num_warps=SUM_ROWS,
        )
    else:
        start(
            decode_sum_kernel,
            (rows,),
            tensors,
            (layout.numel, rows, senders, *strides),
            **constants,
            num_warps=ROW_WARPS,
        )
    return total
