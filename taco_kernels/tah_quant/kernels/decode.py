"""decode: read the wire once, write the tensor once.

The inverse transform runs on the codes, exactly: the zero point, a constant, is what element 0 gets.
"""

import triton
import triton.language as tl

from taco_kernels.tah_quant.kernels.tiles import gather_bits, load_bits, swapped, tile_pointers, tile_slots
from taco_kernels.triton.hadamard import shuffle, sylvester, transform, unshuffle


@triton.jit
def decode_tiles(x, base, extra, steps, zeros, pivots, slots, first, counts, matrix, C: tl.constexpr):
    """Decode tiles first...; ``counts`` is (tiles, high tiles, tiles of a unit, of a row, channels)."""
    tiles, high_tiles, per_unit, per_row, channels = counts
    codes = load_bits(base, first, tiles, C.LOW, C)
    values = codes.to(tl.float32)
    if C.EXTRA > 0:
        slot = tile_slots(slots, first, tiles, per_unit, C)
        rest = gather_bits(extra, slot, high_tiles, C.EXTRA, C).to(tl.float32)
        rest = tl.where((slot >= 0)[:, None], rest, (2**C.EXTRA - 1) * 0.5)
        values = values * (2**C.EXTRA) + rest
    row = first + tl.arange(0, C.R)
    inside = row < tiles
    zero = tl.load(zeros + row, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(steps + row, mask=inside, other=0.0).to(tl.float32)
    y = zero[:, None] + step[:, None] * values
    if C.TRANSFORM:
        byte = tl.load(pivots + row, mask=inside, other=0).to(tl.int32)
        rotated = unshuffle(transform(shuffle(values.to(tl.float16), C), matrix, C), C)
        rotated = rotated * (step * (1 / C.G**0.5))[:, None]
        column = tl.arange(0, C.G)[None, :]
        rotated = tl.where(column == 0, rotated + (zero * C.G**0.5)[:, None], rotated)
        y = tl.where((byte >= 128)[:, None], swapped(rotated, byte & 127, C), y)
    pointers, mask = tile_pointers(x, first, tiles, per_row, channels, C)
    tl.store(pointers, y.to(x.dtype.element_ty), mask=mask)


@triton.jit
def decode_kernel(
    x,
    base,
    extra,
    steps,
    zeros,
    pivots,
    slots,
    tiles,
    high_tiles,
    per_unit,
    per_row,
    channels,
    C: tl.constexpr,
):
    """Persistent programs, R tiles a step."""
    matrix = 0
    if C.TRANSFORM:
        matrix = sylvester(C, 1.0, False, tl.float16)
    counts = (tiles, high_tiles, per_unit, per_row, channels)
    if C.INTERPRET:  # no loops over run-time bounds there: one program a step
        first = tl.program_id(0) * C.R
        decode_tiles(x, base, extra, steps, zeros, pivots, slots, first, counts, matrix, C)
    else:
        blocks = tl.cdiv(tiles, C.R)
        for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=C.STAGES):
            decode_tiles(x, base, extra, steps, zeros, pivots, slots, block * C.R, counts, matrix, C)
