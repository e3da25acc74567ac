"""Both kernels: each reads the tensor, or the wire, once.

Encoding, codes of all tiles are found at their full width; the extra bits go to scratch memory, with the sums
that the entropies are made of, and select.py chooses whose extra bits are sent. Decoding, codes are small
integers, so that products with the identity and with the Hadamard matrix are exact, and lie in the registers
of one thread. Signs of the codes bring the outlier back to its place; the zero point, a constant, is what
that element alone gets.
"""

import triton
import triton.language as tl

from taco_kernels.common.constants import as_tensor
from taco_kernels.common.hadamard import sylvester, transform, unshuffle
from taco_kernels.tah_quant.rows import identity
from taco_kernels.tah_quant.tiles import (
    fetch,
    fetch_slots,
    load_nibbles,
    nibble_words,
    put_rows,
    signed_halves,
    store_words,
    tile_pointers,
)
from taco_kernels.tah_quant.values import encoded


@triton.jit
def encode_kernel(x, base, extra, scales, pivots, sums, tiles, per_row, channels, C: tl.constexpr):
    """Everything but the widths and the choice of extra bits. Persistent programs, R tiles a step."""
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    matrices = (0, 0)
    if C.TRANSFORM:
        matrices = (sylvester(C, 1.0, True, dot_type), identity(C, dot_type))
    blocks = tl.cdiv(tiles, C.R)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=C.STAGES):
        first = as_tensor(block) * C.R
        pointers, mask = tile_pointers(x, first, tiles, per_row, channels, C)
        y = tl.load(pointers, mask=mask, other=0.0)
        chosen, pivot, total, weighted, pair, codes = encoded(y, matrices, C)
        if C.EXTRA > 0:
            put_rows(sums, first, total.to(tl.int32, bitcast=True), tiles, C)
            put_rows(sums + tiles, first, weighted.to(tl.int32, bitcast=True), tiles, C)
        if C.TRANSFORM:
            put_rows(pivots, first, tl.where(chosen, pivot + 128, 0).to(tl.uint8), tiles, C)
        put_rows(scales, first, pair, tiles, C)
        a, b = nibble_words(codes, C)
        store_words(a, b, base, first, tiles, 16, C.EXTRA, C.LOW, C)
        if C.EXTRA > 0:
            store_words(a, b, extra, first, tiles, 1, 0, C.EXTRA, C)


@triton.jit
def equal(x, y, C: tl.constexpr):
    """fp32: 1 where x = y, else 0."""
    x, y = tl.broadcast(x, y)
    if C.INTERPRET:
        result = (x == y).to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            "set.eq.f32.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def load_values(base, extra, pivots, slots, first, counts, C: tl.constexpr):
    """fp16[R, G]: codes of tiles first..., with the signs that their pivots demand.

    ``counts`` is (tiles, high tiles, tiles of a unit).
    """
    tiles, high_tiles, per_unit = counts
    row = first + tl.arange(0, C.R)
    inside = row < tiles
    pivot = tl.zeros([C.R, 1], tl.int32)
    if C.TRANSFORM:
        byte = fetch(pivots + row[:, None], inside[:, None], C)
        pivot = tl.where(byte >= 128, byte & 127, 0)
    if C.EXTRA > 0:
        slot = fetch_slots(slots, first, tiles, per_unit, C)
    a, b = load_nibbles(base, row, inside, tiles, C.EXTRA, C.LOW, True, C)
    if C.EXTRA > 0:
        c, d = load_nibbles(extra, slot, inside & (slot >= 0), high_tiles, 0, C.EXTRA, False, C)
        a, b = a | c, b | d
    return signed_halves(a, b, pivot, C)


@triton.jit
def decode_kernel(
    x, base, extra, scales, pivots, slots, tiles, high_tiles, per_unit, per_row, channels,
    C: tl.constexpr,
):  # fmt: skip
    """Persistent programs, R tiles a step."""
    matrices = (0, 0)
    if C.TRANSFORM:
        matrices = (sylvester(C, 1.0, True, tl.float16), identity(C, tl.float16))
    matrix, unit = matrices
    blocks = tl.cdiv(tiles, C.R)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=C.STAGES):
        first = as_tensor(block) * C.R
        values = load_values(base, extra, pivots, slots, first, (tiles, high_tiles, per_unit), C)
        row = first + tl.arange(0, C.R)
        inside = row < tiles
        pair = fetch(scales + row, inside, C)
        step = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if C.EXTRA > 0:
            middle = zero + step * ((2**C.EXTRA - 1) * 0.5)
            zero = tl.where(fetch_slots(slots, first, tiles, per_unit, C) >= 0, zero, middle)
        if C.TRANSFORM:
            byte = fetch(pivots + row, inside, C)
            chosen = byte >= 128
            # of a chosen tile the first product counts for nothing, of another the second
            y = unshuffle(transform(values, unit, C), C)
            own, own_zero = tl.where(chosen, 0.0, step), tl.where(chosen, 0.0, zero)
            own, own_zero = (
                tl.broadcast_to(own[:, None], y.shape),
                tl.broadcast_to(own_zero[:, None], y.shape),
            )
            rotated = unshuffle(transform(values, matrix, C), C)
            factor = tl.broadcast_to(tl.where(chosen, step * (1 / C.G**0.5), 0.0)[:, None], y.shape)
            y = tl.fma(rotated, factor, tl.fma(y, own, own_zero))
            column = tl.arange(0, C.G)[None, :]
            place = (tl.where(chosen, byte & 127, 4 * C.G)[:, None] - (column & ~15)).to(tl.float32)
            constant = tl.broadcast_to((zero * C.G**0.5)[:, None], y.shape)
            y = tl.fma(equal(place, (column & 15).to(tl.float32), C), constant, y)
        else:
            y = tl.fma(values.to(tl.float32), step[:, None], zero[:, None])
        pointers, mask = tile_pointers(x, first, tiles, per_row, channels, C)
        tl.store(pointers, y.to(x.dtype.element_ty), mask=mask)
