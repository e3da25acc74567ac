"""Launching the packing kernels. Same signatures as reference.py."""

import torch

from taco_kernels.homomorphic.layout import EXPONENT_FLOOR
from taco_kernels.layout import ceil_div
from taco_kernels.packed.kernels import decode_sum_kernel
from taco_kernels.packed.layout import WIDTH, PackedLayout
from taco_kernels.packed.pack_kernels import move_kernel, squeeze_kernel
from taco_kernels.packed.sum_kernels import count_kernel, start_kernel, sum_kernel
from taco_kernels.triton.fast_launch import start
from taco_kernels.triton.launch import device_for

ROW_WARPS = 1
"""Warps of a row of 1024 values: one shares nothing with another."""
PACK_ROWS = 8
"""Rows, a warp each, of a program that packs or moves codes."""
MOVED, ZEROS = 8, 16
"""Codes a lane that a program moves at a time; zeros a lane that one writes behind the last code."""
COUNTED_ROWS = 32
"""Rows of a tile that is counted for a sum."""
STARTS, START_WARPS = 4096, 16
"""Tiles that are added up at a time, and the warps that do it."""
SUM_ROWS, PREFETCH = 4, True
"""Rows, a warp each, of a program that adds 16-bit values up; whether it asks for their codes ahead."""
UNROLLED = 8
"""Most senders that a kernel of their own adds up."""


def _parts(wires: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, words and exponents of wires as typed views."""
    values = wires.view({8: torch.int8, 16: torch.int16, 32: torch.int32}[layout.bits])
    return values, wires[:, layout.words_at :].view(torch.int32), wires[:, layout.exponents_at :]


def encode(
    x: torch.Tensor, thresholds: torch.Tensor, layout: PackedLayout, remainder: torch.Tensor | None = None
) -> torch.Tensor:
    """See reference.encode. Needs ``layout.bits`` a value of x for as long as it runs."""
    thresholds = thresholds.contiguous()
    wires = torch.empty((len(x), layout.wire_bytes), dtype=torch.uint8, device=x.device)
    values, words, exponents = _parts(wires, layout)
    shards, rows, tiles = len(x), layout.rows, ceil_div(layout.rows, PACK_ROWS)
    counts = torch.empty((shards, rows), dtype=torch.int32, device=x.device)
    starts = torch.empty((shards, tiles), dtype=torch.int32, device=x.device)
    codes_of_rows = torch.empty((shards, rows * WIDTH), dtype=values.dtype, device=x.device)
    rest, rest_stride = (x, 0) if remainder is None else (remainder, remainder.stride(0))
    constants = dict(
        KEEP_REMAINDER=remainder is not None,
        BITS=layout.bits,
        FLOOR=EXPONENT_FLOOR,
        WIDTH=WIDTH,
        INTERPRET=device_for(x).interpret,
        R=PACK_ROWS,
        num_warps=PACK_ROWS,
    )
    start(
        squeeze_kernel,
        (tiles, shards),
        (x, rest, thresholds, codes_of_rows, counts, starts, words, exponents),
        (layout.numel, rows, tiles, x.stride(0), rest_stride, words.stride(0), exponents.stride(0)),
        **constants,
    )
    start(start_kernel, (shards,), (starts,), (tiles,), N=STARTS, num_warps=START_WARPS)
    room = layout.words_at // values.element_size()
    strides = (rest_stride, values.stride(0), words.stride(0), exponents.stride(0))
    start(
        move_kernel,
        (tiles + ceil_div(room, ZEROS * PACK_ROWS * 32), shards),
        (rest, codes_of_rows, counts, starts, values, words, exponents),
        (rows, tiles, layout.capacity, room, *strides),
        **constants,
        K=MOVED,
        Z=ZEROS,
    )
    return wires


def decode_sum(wires: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """See reference.decode_sum."""
    values, words, exponents = _parts(wires, layout)
    senders, rows, tiles = len(wires), layout.rows, ceil_div(layout.rows, COUNTED_ROWS)
    before = torch.empty((senders, rows), dtype=torch.int32, device=wires.device)
    starts = torch.empty((senders, tiles), dtype=torch.int32, device=wires.device)
    total = torch.empty(layout.numel, dtype=torch.float32, device=wires.device)
    interpret = device_for(wires).interpret
    start(
        count_kernel,
        (tiles, senders),
        (words, before, starts),
        (rows, tiles, words.stride(0)),
        WIDTH=WIDTH,
        INTERPRET=interpret,
        T=COUNTED_ROWS,
    )
    start(start_kernel, (senders,), (starts,), (tiles,), N=STARTS, num_warps=START_WARPS)
    few = senders <= UNROLLED
    constants = dict(
        W=senders if few else 0,
        BITS=layout.bits,
        FLOOR=EXPONENT_FLOOR,
        WIDTH=WIDTH,
        WHOLE=layout.numel % 4 == 0,
        INTERPRET=interpret,
        T=COUNTED_ROWS,
    )
    tensors = (values, words, exponents, before, starts, total)
    strides = (values.stride(0), words.stride(0), exponents.stride(0))
    if few and layout.bits == 16:
        start(
            sum_kernel,
            (ceil_div(rows, SUM_ROWS),),
            tensors,
            (layout.numel, rows, tiles, *strides),
            **constants,
            R=SUM_ROWS,
            PREFETCH=PREFETCH,
            num_warps=SUM_ROWS,
        )
    else:
        start(
            decode_sum_kernel,
            (rows,),
            tensors,
            (layout.numel, rows, tiles, senders, *strides),
            **constants,
            num_warps=ROW_WARPS,
        )
    return total
