"""Codes of all tiles at their full width: the tensor is read once.

The extra bits go to scratch memory, with the sums that the entropies are made of; select.py chooses whose
extra bits are sent.
"""

import triton
import triton.language as tl

from taco_kernels.tah_quant.kernels.encode_quads import encode_by_quads
from taco_kernels.tah_quant.kernels.rows import identity
from taco_kernels.tah_quant.kernels.tiles import (
    nibble_words,
    put_rows,
    store_bits,
    store_words,
    tile_pointers,
)
from taco_kernels.tah_quant.kernels.values import encoded
from taco_kernels.triton.hadamard import sylvester


@triton.jit
def encode_tiles(x, base, extra, scales, pivots, sums, first, counts, matrices, C: tl.constexpr):
    """Encode tiles first...; ``counts`` is (tiles, tiles of a row, channels)."""
    tiles, per_row, channels = counts
    pointers, mask = tile_pointers(x, first, tiles, per_row, channels, C)
    y = tl.load(pointers, mask=mask, other=0.0)
    chosen, pivot, total, weighted, pair, codes = encoded(y, matrices, C)
    if C.EXTRA > 0:
        put_rows(sums, first, total.to(tl.int32, bitcast=True), tiles, C)
        put_rows(sums + tiles, first, weighted.to(tl.int32, bitcast=True), tiles, C)
    if C.TRANSFORM:
        put_rows(pivots, first, tl.where(chosen, pivot + 128, 0).to(tl.uint8), tiles, C)
    put_rows(scales, first, pair, tiles, C)
    if C.LOW + C.EXTRA <= 4:
        a, b = nibble_words(codes, C)
        store_words(a, b, base, first, tiles, 16, C.EXTRA, C.LOW, C)
        if C.EXTRA > 0:
            store_words(a, b, extra, first, tiles, 1, 0, C.EXTRA, C)
    else:
        codes = (codes >> C.SHIFT) & C.LEVELS
        store_bits(codes >> C.EXTRA, base, first, tiles, 16, C.LOW, C)
        if C.EXTRA > 0:
            store_bits(codes & (2**C.EXTRA - 1), extra, first, tiles, 1, C.EXTRA, C)


@triton.jit
def encode_kernel(x, base, extra, scales, pivots, sums, tiles, per_row, channels, C: tl.constexpr):
    """Everything but the widths and the choice of extra bits. Persistent programs, R tiles a step."""
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    QUADS: tl.constexpr = C.QUADS and x.dtype.element_ty == tl.bfloat16
    matrices = (0, 0)
    if C.TRANSFORM and not QUADS:
        matrices = (sylvester(C, 1.0, True, dot_type), identity(C, dot_type))
    counts = (tiles, per_row, channels)
    if QUADS:
        encode_by_quads(x, base, extra, scales, pivots, sums, tiles, C)
    elif C.INTERPRET:  # no loops over run-time bounds there: one program a step
        first = tl.program_id(0) * C.R
        encode_tiles(x, base, extra, scales, pivots, sums, first, counts, matrices, C)
    else:
        blocks = tl.cdiv(tiles, C.R)
        for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=C.STAGES):
            encode_tiles(x, base, extra, scales, pivots, sums, block * C.R, counts, matrices, C)
