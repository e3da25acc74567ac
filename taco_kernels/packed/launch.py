"""Launching the packing kernels. Same signatures as reference.py."""

import torch
from triton import next_power_of_2

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
PACK_ROWS, MOVE_REGISTERS = 8, 32
"""Rows, a warp each, of a program that packs or moves codes; most registers to move (all 64 warps fit)."""
MOVED, ZEROS = 8, 16
"""Codes a lane that a program moves at a time; zeros a lane that one writes behind the last code."""
LEAST_COUNTED, MOST_COUNTED = 32, 512
"""Rows of a tile that is counted for a sum, as many as keep tiles few."""
TILES_TO_SUM, TILES_TO_MOVE = 128, 2048
"""So few tiles need no running sums: a program of a sum or of a move adds them up itself."""
STARTS, START_WARPS = 4096, 16
"""Tiles that are added up at a time, and the warps that do it."""
SUM_ROWS = 4
"""Rows, a warp each, of a program that adds 16-bit values up."""
UNROLLED = {8: 4, 16: 8, 32: 4}
"""By bits of a value, most senders that a kernel of their own adds up: more would spill."""


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
    sums = torch.empty((shards, tiles), dtype=torch.int32, device=x.device)
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
        (x, rest, thresholds, codes_of_rows, counts, sums, words, exponents),
        (layout.numel, rows, tiles, x.stride(0), rest_stride, words.stride(0), exponents.stride(0)),
        **constants,
    )
    few = tiles <= TILES_TO_MOVE
    if not few:
        start(start_kernel, (shards,), (sums,), (tiles,), N=STARTS, num_warps=START_WARPS)
    room = layout.words_at // values.element_size()
    strides = (rest_stride, values.stride(0), words.stride(0), exponents.stride(0))
    start(
        move_kernel,
        (tiles + ceil_div(room, ZEROS * PACK_ROWS * 32), shards),
        (rest, codes_of_rows, counts, sums, values, words, exponents),
        (rows, tiles, layout.capacity, room, *strides),
        **constants,
        maxnreg=MOVE_REGISTERS,
        K=MOVED,
        Z=ZEROS,
        N=TILES_TO_MOVE if few else 0,
    )
    return wires


def decode_sum(wires: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """See reference.decode_sum."""
    values, words, exponents = _parts(wires, layout)
    senders, rows = len(wires), layout.rows
    counted = min(MOST_COUNTED, max(LEAST_COUNTED, next_power_of_2(ceil_div(rows, TILES_TO_SUM))))
    tiles = ceil_div(rows, counted)
    before = torch.empty((senders, rows), dtype=torch.int32, device=wires.device)
    sums = torch.empty((senders, tiles), dtype=torch.int32, device=wires.device)
    total = torch.empty(layout.numel, dtype=torch.float32, device=wires.device)
    interpret = device_for(wires).interpret
    start(
        count_kernel,
        (tiles, senders),
        (words, before, sums),
        (rows, tiles, words.stride(0)),
        WIDTH=WIDTH,
        INTERPRET=interpret,
        T=counted,
        num_warps=max(4, counted // 32),
    )
    if tiles > TILES_TO_SUM:
        start(start_kernel, (senders,), (sums,), (tiles,), N=STARTS, num_warps=START_WARPS)
    unrolled = senders <= UNROLLED[layout.bits]
    constants = dict(
        W=senders if unrolled else 0,
        BITS=layout.bits,
        FLOOR=EXPONENT_FLOOR,
        WIDTH=WIDTH,
        WHOLE=layout.numel % 4 == 0,
        INTERPRET=interpret,
        N=TILES_TO_SUM if tiles <= TILES_TO_SUM else 0,
    )
    tensors = (values, words, exponents, before, sums, total)
    sizes = (layout.numel, rows, tiles, counted.bit_length() - 1)
    strides = (values.stride(0), words.stride(0), exponents.stride(0))
    if unrolled and layout.bits == 16:
        start(
            sum_kernel,
            (ceil_div(rows, SUM_ROWS),),
            tensors,
            (*sizes, *strides),
            **constants,
            R=SUM_ROWS,
            num_warps=SUM_ROWS,
        )
    else:
        start(
            decode_sum_kernel,
            (rows,),
            tensors,
            (*sizes, senders, *strides),
            **constants,
            num_warps=ROW_WARPS,
        )
    return total
