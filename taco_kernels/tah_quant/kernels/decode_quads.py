"""decode for tiles of 64 values and up to 4 bits that fill their rows, by the warps of quads.py.

What a step needs is asked for a step before, and where extra bits lie two steps before: loads then take their
time while codes are multiplied.
"""

import triton
import triton.language as tl

from taco_kernels.tah_quant.kernels.quads import fetch_two, fragments, store_tiles
from taco_kernels.tah_quant.kernels.tiles import fetch, section_bytes, spread_ones, spread_twos


@triton.jit
def base_words(base, high_plane, left, C: tl.constexpr):
    """Words of both tiles of a thread as they lie in the base planes, two of each."""
    words = base.to(tl.pointer_type(tl.int32))
    if C.LOW == 4:
        first, second = fetch_two(words, left, 8 * C.G // 2, C)
        first_b, second_b = fetch_two(words + 1, left, 8 * C.G // 2, C)
    else:
        first, second = fetch_two(words, left, 8 * C.G // 4, C)
        first_b, second_b = first, second
        if C.LOW == 3:
            first_b, second_b = fetch_two(high_plane.to(tl.pointer_type(tl.int16)), left, 8 * C.G // 8, C)
    return first, first_b, second, second_b


@triton.jit
def extra_word(extra, slot, place, thread, per_unit, C: tl.constexpr):
    """The word of an extra plane at ``place`` of a high unit; 0 of low ones."""
    tile = slot * per_unit + place if C.BY_TOKEN else slot
    if C.EXTRA == 2:
        pointers = (extra + (tile.to(tl.int64) * (C.G // 4) + thread * 4)).to(tl.pointer_type(tl.int32))
    else:
        pointers = (extra + (tile.to(tl.int64) * (C.G // 8) + thread * 2)).to(tl.pointer_type(tl.int16))
    return fetch(pointers, slot >= 0, C)


@triton.jit
def nibbles(word, high_word, extra, C: tl.constexpr):
    """Nibble words of 16 codes from their words of base and extra planes."""
    if C.LOW == 4:
        a, b = word, high_word
    else:
        a, b = spread_twos(word, C.EXTRA)
        if C.LOW == 3:
            c, d = spread_ones(high_word, C.EXTRA + 2)
            a, b = a | c, b | d
    if C.EXTRA == 1:
        c, d = spread_ones(extra, 0)
        a, b = a | c, b | d
    elif C.EXTRA == 2:
        c, d = spread_twos(extra, 0)
        a, b = a | c, b | d
    return a, b


@triton.jit
def affine(pair, byte, slot, C: tl.constexpr):
    """(factor, offset, constant) of store_tiles from a tile's scales, its byte of pivots and its slot."""
    step = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if C.EXTRA > 0:
        zero = tl.where(slot >= 0, zero, zero + step * ((2**C.EXTRA - 1) * 0.5))
    chosen = byte >= 128
    factor = step * tl.where(chosen, 2.0**24 / C.G**0.5, 2.0**24)
    return factor, tl.where(chosen, 0.0, zero), zero * C.G**0.5


@triton.jit
def load_slots(slots, first, second, left, C: tl.constexpr):
    """Slots of the units of both tiles of a thread, -1 of low ones and beyond the last."""
    if C.EXTRA > 0:
        a, b = tl.where(left > 0, 0, -1), tl.where(left > 8, 0, -1)
        a, b = a | fetch(slots + first, left > 0, C), b | fetch(slots + second, left > 8, C)
    else:
        a, b = left, left
    return a, b


@triton.jit
def advance(unit, place, units, places, per_unit, C: tl.constexpr):
    """Where a tile so many tiles on lies: ``units`` whole units and ``places`` tiles."""
    unit += units
    if C.BY_TOKEN:
        place += places
        over = place >= per_unit
        unit, place = tl.where(over, unit + 1, unit), tl.where(over, place - per_unit, place)
    return unit, place


@triton.jit
def decode_by_quads(x, base, extra, scales, pivots, slots, counts, C: tl.constexpr):
    """Persistent programs, R tiles a step and 16 a warp; ``counts`` is (tiles, tiles of a unit)."""
    tiles, per_unit = counts
    index = tl.arange(0, 2 * C.R)
    lane, thread = index & 31, index & 3
    matrices = fragments(lane)
    step = tl.num_programs(0) * C.R
    tile = tl.program_id(0) * C.R + (index >> 5) * 16 + (lane >> 2)
    wide = tile.to(tl.int64)
    x += wide * C.G + thread * 8
    high_plane = base + section_bytes(tiles, C.G // 4, 16) + wide * (C.G // 8) + thread * 2
    base += wide * (C.LOW // 2 * C.G // 4) + thread * (C.LOW // 2 * 4)
    scales += wide
    pivots += wide
    left = tiles - tile
    units, places = step, 0
    unit_a, place_a, unit_b, place_b = tile, tile, tile + 8, tile
    if C.BY_TOKEN:
        units, places = step // per_unit, step % per_unit
        unit_a, place_a, unit_b, place_b = (
            tile // per_unit,
            tile % per_unit,
            (tile + 8) // per_unit,
            (tile + 8) % per_unit,
        )
    # this step: words, pivots, scales and slots; the next: slots, and then the units behind
    slot_a, slot_b = load_slots(slots, unit_a, unit_b, left, C)
    a0, a1, b0, b1 = base_words(base, high_plane, left, C)
    byte_a, byte_b = fetch_two(pivots, left, 8, C)
    pair_a, pair_b = fetch_two(scales, left, 32, C)
    more_a, more_b = a0, b0
    if C.EXTRA > 0:
        more_a = extra_word(extra, slot_a, place_a, thread, per_unit, C)
        more_b = extra_word(extra, slot_b, place_b, thread, per_unit, C)
    unit_a, place_a = advance(unit_a, place_a, units, places, per_unit, C)
    unit_b, place_b = advance(unit_b, place_b, units, places, per_unit, C)
    next_slot_a, next_slot_b = load_slots(slots, unit_a, unit_b, left - step, C)
    first = tl.program_id(0) * C.R
    while first < tiles:
        first += step
        base += step.to(tl.int64) * (C.LOW // 2 * C.G // 4)
        high_plane += step.to(tl.int64) * (C.G // 8)
        scales += step
        pivots += step
        next_left = left - step
        next_a0, next_a1, next_b0, next_b1 = base_words(base, high_plane, next_left, C)
        next_byte_a, next_byte_b = fetch_two(pivots, next_left, 8, C)
        next_pair_a, next_pair_b = fetch_two(scales, next_left, 32, C)
        next_more_a, next_more_b = more_a, more_b
        if C.EXTRA > 0:
            next_more_a = extra_word(extra, next_slot_a, place_a, thread, per_unit, C)
            next_more_b = extra_word(extra, next_slot_b, place_b, thread, per_unit, C)
        unit_a, place_a = advance(unit_a, place_a, units, places, per_unit, C)
        unit_b, place_b = advance(unit_b, place_b, units, places, per_unit, C)
        after_a, after_b = load_slots(slots, unit_a, unit_b, next_left - step, C)
        words = nibbles(a0, a1, more_a, C) + nibbles(b0, b1, more_b, C)
        factor_a, offset_a, constant_a = affine(pair_a, byte_a, slot_a, C)
        factor_b, offset_b, constant_b = affine(pair_b, byte_b, slot_b, C)
        store_tiles(
            x,
            left,
            thread,
            words,
            (byte_a, byte_b),
            (factor_a, factor_b),
            (offset_a, offset_b),
            (constant_a, constant_b),
            matrices,
            C,
        )
        x += step.to(tl.int64) * C.G
        left = next_left
        a0, a1, b0, b1, more_a, more_b = next_a0, next_a1, next_b0, next_b1, next_more_a, next_more_b
        byte_a, byte_b, pair_a, pair_b = next_byte_a, next_byte_b, next_pair_a, next_pair_b
        slot_a, slot_b, next_slot_a, next_slot_b = next_slot_a, next_slot_b, after_a, after_b
