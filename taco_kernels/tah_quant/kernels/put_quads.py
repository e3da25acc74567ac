"""Storing what the warps of encode_quads.py make: two tiles a thread, 8 apart, from one address a section."""

import triton
import triton.language as tl

from taco_kernels.tah_quant.kernels.tiles import section_bytes


@triton.constexpr_function
def _put_assembly(bits, distance):
    return "\n".join(
        [
            "{",
            ".reg .pred p, q;",
            "setp.gt.s32 p, $4, 0;",
            "setp.gt.s32 q, $4, 8;",
            f"@p st.global.b{bits} [$1], $2;",
            f"@q st.global.b{bits} [$1+{distance}], $3;",
            "mov.b32 $0, 0;",
            "}",
        ]
    )


@triton.jit
def put_two(pointers, values, left, DISTANCE: tl.constexpr, C: tl.constexpr):
    """Store integers of the thread's first tile, and of its second DISTANCE elements on, where there are."""
    if C.INTERPRET:
        tl.store(pointers, values[0].to(pointers.dtype.element_ty), mask=left > 0)
        tl.store(pointers + DISTANCE, values[1].to(pointers.dtype.element_ty), mask=left > 8)
    else:
        BITS: tl.constexpr = pointers.dtype.element_ty.primitive_bitwidth
        text: tl.constexpr = _put_assembly(BITS, DISTANCE * BITS // 8)
        inputs = (pointers.to(tl.int64), values[0], values[1], left)
        tl.inline_asm_elementwise(text, "=r,l,r,r,r", inputs, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def nibble_halves(a, b, FROM: tl.constexpr):
    """Bits FROM and FROM + 1 of the nibbles of a in the lower halves of nibbles, of b in the upper ones."""
    if FROM < 2:
        b = b << (2 - FROM)
    else:
        b = b >> (FROM - 2)
    return ((a >> FROM) & 0x33333333) | (b & -0x33333334)


@triton.jit
def ones_of(a, b, BIT: tl.constexpr):
    """Word of a 1-bit plane, in the lower half: bit BIT of nibble words."""
    words = nibble_halves(a, b, BIT)
    return (words & 0x5555) | ((words >> 15) & 0xAAAA)


@triton.jit
def put_nibbles(
    words, out, at, left, tiles, padding, FROM: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr
):
    """store_words of tiles.py for two tiles, one word a thread; ``at`` is 4 times the tile and the thread."""
    a, b, a2, b2 = words
    if BITS & 4:
        pair = out.to(tl.pointer_type(tl.int32)) + at * 2
        put_two(pair, (a, a2), left, 64, C)
        put_two(pair + 1, (b, b2), left, 64, C)
    if BITS & 2:
        values = (nibble_halves(a, b, FROM), nibble_halves(a2, b2, FROM))
        put_two(out.to(tl.pointer_type(tl.int32)) + at, values, left, 32, C)
        out += section_bytes(tiles, C.G // 4, padding)
    if BITS & 1:
        BIT: tl.constexpr = FROM + (BITS & 2)
        values = (ones_of(a, b, BIT), ones_of(a2, b2, BIT))
        put_two(out.to(tl.pointer_type(tl.int16)) + at, values, left, 32, C)


@triton.jit
def put_tiles(base, extra, scales, pivots, sums, tile, thread, tiles, found, C: tl.constexpr):
    """Store what ``encode_two`` gives, the numbers of a tile by a thread each. Tiles are below 2^30."""
    a, b, a2, b2, pair, pair2, byte, byte2, total, total2, weighted, weighted2 = found
    left = tiles - tile
    place = tile.to(tl.uint32)
    at = place * 4 + thread.to(tl.uint32)
    put_nibbles((a, b, a2, b2), base, at, left, tiles, 16, C.EXTRA, C.LOW, C)
    put_two(pivots + place, (byte, byte2), tl.where(thread == 3, left, 0), 8, C)
    if C.EXTRA > 0:
        put_nibbles((a, b, a2, b2), extra, at, left, tiles, 1, 0, C.EXTRA, C)
        value = tl.where(thread == 0, pair, tl.where(thread == 1, total, weighted))
        value2 = tl.where(thread == 0, pair2, tl.where(thread == 1, total2, weighted2))
        first = tl.where(thread == 1, sums, sums + tiles)
        first = tl.where(thread == 0, scales, first)
        put_two(first + place, (value, value2), tl.where(thread < 3, left, 0), 8, C)
    else:
        put_two(scales + place, (pair, pair2), tl.where(thread == 0, left, 0), 8, C)
