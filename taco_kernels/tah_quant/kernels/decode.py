"""decode: read the wire once, write the tensor once.

The inverse transform runs on the codes, exactly: the zero point, a constant, is what element 0 gets.
"""

import triton
import triton.language as tl

from taco_kernels.tah_quant.kernels.tiles import (
    from_nibble_words,
    load_bits,
    load_nibbles,
    swapped,
    tile_pointers,
    tile_slots,
)
from taco_kernels.triton.hadamard import shuffle, sylvester, transform, unshuffle


@triton.jit
def decode_tiles(x, base, extra, steps, zeros, pivots, slots, first, counts, matrix, C: tl.constexpr):
    """Decode tiles first...; ``counts`` is (tiles, high tiles, tiles of a unit, of a row, channels)."""
    tiles, high_tiles, per_unit, per_row, channels = counts
    row = first + tl.arange(0, C.R)
    inside = row < tiles
    zero = tl.load(zeros + row, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(steps + row, mask=inside, other=0.0).to(tl.float32)
    if C.EXTRA > 0:
        slot = tile_slots(slots, first, tiles, per_unit, C)
        high = slot >= 0
        zero = tl.where(high, zero, zero + step * ((2**C.EXTRA - 1) * 0.5))
    if C.LOW + C.EXTRA <= 4:
        a, b = load_nibbles(base, row, inside, tiles, C.EXTRA, C.LOW, C)
        if C.EXTRA > 0:
            c, d = load_nibbles(extra, slot, high, high_tiles, 0, C.EXTRA, C)
            a, b = a | c, b | d
        codes = from_nibble_words(a, b, C)
    else:
        codes = load_bits(base, row, inside, tiles, C.LOW, C) << C.EXTRA
        if C.EXTRA > 0:
            codes = codes | load_bits(extra, slot, high, high_tiles, C.EXTRA, C)
    # 2^23 + c in fp32 has c in its low mantissa bits
    values = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
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
