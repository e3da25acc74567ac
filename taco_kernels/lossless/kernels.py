"""Triton kernels of the lossless layout (layout.py has the bytes): a program a tile, a lane a group.

A group's first two escapes are coded without looking how many it has; a tile in which one has more loops.
"""

import triton
import triton.language as tl

from taco_kernels.common.packing import four_joined, four_of
from taco_kernels.lossless.words import (
    BLOCK_GROUPS,
    FIRST,
    GROUP,
    ONES,
    SECOND,
    bases_of,
    byte_at,
    codes_of,
    distances_of,
    escapes_of,
    exponent_bytes,
    exponent_of_value,
    exponents_of,
    high_bytes,
    near_value,
    of_groups,
    packed_codes,
    pairs_of,
    put,
    sum_of_bytes,
    take,
    values_of,
    words_joined,
)

HEADER, FLAG_AT = tl.constexpr(16), tl.constexpr(4)
FAR, MANY = tl.constexpr(1 << 12), tl.constexpr(1 << 21)  # a tile has at most 2048 escapes, in 256 groups


@triton.jit
def put_escape(area, place, value, there):
    """Set the bits of an escape, from bit ``place`` of the area on."""
    tl.atomic_or(area + (place >> 5), value << (place & 31), mask=there, sem="relaxed")


@triton.jit
def encode_kernel(
    x, payload, numel, groups, blocks, words,
    x_stride, payload_stride, starts_at, bases_at, codes_at, more_at, high_at, low_at,
    FP32: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode x[row, tile] (int16 or int32 bits), grid (tiles, rows); the header holds zeros before."""
    G: tl.constexpr = TILE // GROUP
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tile.to(tl.int64) * TILE
    first_flag = payload + FLAG_AT
    payload += row * payload_stride
    u0, u1, u2, u3, l0, l1, l2, l3 = pairs_of(x + row * x_stride + first, numel - first, FP32, WHOLE, G)
    group = tl.arange(0, G)
    there = group < groups - tile * G
    quarter = tl.arange(0, 4 * G) < 4 * (groups - tile * G)
    half = tl.arange(0, 2 * G) < 2 * (groups - tile * G)
    if FP32:
        low = (payload + low_at + 2 * first).to(tl.pointer_type(tl.int32))
        put(low + tl.arange(0, 4 * G), words_joined(l0, l1, l2, l3, G), quarter, WHOLE)
    high = (payload + high_at + first).to(tl.pointer_type(tl.int32))
    highs = tl.reshape(tl.join(high_bytes(u0, u1), high_bytes(u2, u3)), [2 * G])
    put(high + tl.arange(0, 2 * G), highs, half, WHOLE)

    bases = bases_of(u0, u1, u2, u3, G)
    block = tl.arange(0, G // BLOCK_GROUPS)
    at_block = tile * (G // BLOCK_GROUPS)
    put(payload + bases_at + at_block + block, bases.to(tl.uint8), block < blocks - at_block, WHOLE)
    base = of_groups(bases, G)
    d0 = distances_of(base * ONES, exponent_bytes(u0, u1))
    d1 = distances_of(base * ONES, exponent_bytes(u2, u3))
    f0, f1 = escapes_of(d0), escapes_of(d1)
    word = packed_codes(d0, f0, d1, f1)
    codes = (payload + codes_at + first // 4).to(tl.pointer_type(tl.int16))
    put(codes + group, word.to(tl.int16), there, WHOLE)
    put(payload + more_at + first // 8 + group, (word >> 16).to(tl.uint8), there, WHOLE)

    mask, count = f0 + f1 * 2, sum_of_bytes(f0 + f1)
    if not WHOLE:
        mask, count = tl.where(there, mask, 0), tl.where(there, count, 0)
    second = mask & (mask - 1)
    after = second & (second - 1)
    e0, e1 = byte_at(mask ^ second, d0, d1), byte_at(second ^ after, d0, d1)
    v0, near0 = near_value(e0, base)
    v1, near1 = near_value(e1, base)
    totals = tl.sum(count + tl.where(near0 & near1, 0, FAR) + tl.where(after != 0, MANY, 0), axis=0)
    far = (totals // FAR) & 511
    most = 0
    if totals >= MANY:
        most = tl.max(count, axis=0)
        left = after
        for _ in tl.range(2, most):
            later = left & (left - 1)
            _, near = near_value(byte_at(left ^ later, d0, d1), base)
            far += tl.sum((near == 0).to(tl.int32), axis=0)
            left = later
    far = tl.minimum(far, 1)
    width = 4 + 4 * far
    needed = ((totals & (FAR - 1)) * width + 31) // 32
    start = tl.atomic_add(payload.to(tl.pointer_type(tl.int32)), needed, sem="relaxed")
    tl.store((payload + starts_at).to(tl.pointer_type(tl.int32)) + tile, 2 * start + far)
    if start + needed > words:  # the row overflows; the first row says so too
        tl.store(payload + FLAG_AT, 1)
        tl.store(first_flag, 1)
    else:
        area = (payload + HEADER).to(tl.pointer_type(tl.int32)) + start
        word_of = tl.arange(0, TILE // 4)
        tl.store(area + word_of, tl.zeros([TILE // 4], tl.int32), mask=word_of < needed)
        tl.debug_barrier()  # of these words each escape sets its bits
        place = (tl.cumsum(count, axis=0) - count) * width
        put_escape(area, place, tl.where(far != 0, (base - e0) & 255, v0), mask != 0)
        put_escape(area, place + width, tl.where(far != 0, (base - e1) & 255, v1), second != 0)
        for _ in tl.range(2, most):
            later = after & (after - 1)
            e = byte_at(after ^ later, d0, d1)
            v, _ = near_value(e, base)
            place += width
            put_escape(area, place + width, tl.where(far != 0, (base - e) & 255, v), after != 0)
            after = later


@triton.jit
def escape_over_base(area, place, there, base, far, words):
    """The exponent of an escape, from bit ``place`` of the area on: what to xor the base with."""
    word = place >> 5
    found = tl.load(area + word, mask=there & (word < words), other=0)
    value = (found >> (place & 31)) & tl.where(far != 0, 255, 15)
    return (exponent_of_value(value, base, far) ^ base) & 255


@triton.jit
def pairs_decoded(
    payload, tile, groups, blocks, words,
    starts_at, bases_at, codes_at, more_at, high_at, low_at,
    FP32: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What pairs_of gives of a tile of the tensor, from one payload; zeros where it overflowed."""
    G: tl.constexpr = TILE // GROUP
    first = tile.to(tl.int64) * TILE
    overflow = tl.load(payload + FLAG_AT).to(tl.int32)
    group = tl.arange(0, G)
    there = group < groups - tile * G
    codes = (payload + codes_at + first // 4).to(tl.pointer_type(tl.int16))
    word = take(codes + group, there, WHOLE).to(tl.int32) & FIRST
    more = take(payload + more_at + first // 8 + group, there, WHOLE)
    word |= more.to(tl.int32) << 16
    high = (payload + high_at + first).to(tl.pointer_type(tl.int32))
    half = tl.arange(0, 2 * G)
    highs = take(high + half, half < 2 * (groups - tile * G), WHOLE)
    h0, h1 = tl.split(tl.reshape(highs, [G, 2]))
    block = tl.arange(0, G // BLOCK_GROUPS)
    at_block = tile * (G // BLOCK_GROUPS)
    bases = take(payload + bases_at + at_block + block, block < blocks - at_block, WHOLE)
    base = of_groups(bases.to(tl.int32), G)
    start = tl.load((payload + starts_at).to(tl.pointer_type(tl.int32)) + tile)
    start = tl.where(overflow == 0, start, 0)  # of a payload that overflowed, any number
    c0, c1 = codes_of(word)
    f0, f1 = ((c0 + ONES) >> 3) & ONES, ((c1 + ONES) >> 3) & ONES
    e0, e1 = exponents_of(base * ONES, c0 - f0 * 7), exponents_of(base * ONES, c1 - f1 * 7)
    mask, count = f0 + f1 * 2, sum_of_bytes(f0 + f1)
    far, width = start & 1, 4 + 4 * (start & 1)
    area = (payload + HEADER).to(tl.pointer_type(tl.int32)) + (start >> 1)
    free = words - (start >> 1)
    most = tl.maximum(tl.max(count, axis=0), 2)
    place = (tl.cumsum(count, axis=0) - count) * width
    for _ in tl.range(0, most):
        later = mask & (mask - 1)
        bit = mask ^ later
        x = escape_over_base(area, place, bit != 0, base, far, free)
        e0, e1 = e0 ^ (bit & ONES) * x, e1 ^ ((bit >> 1) & ONES) * x
        place += width
        mask = later
    w0, w1 = values_of(h0, e0)
    w2, w3 = values_of(h1, e1)
    kept = tl.where(overflow == 0, -1, 0)
    w0, w1, w2, w3 = w0 & kept, w1 & kept, w2 & kept, w3 & kept
    if FP32:
        low = (payload + low_at + 2 * first).to(tl.pointer_type(tl.int32))
        quarter = tl.arange(0, 4 * G)
        lows = take(low + quarter, quarter < 4 * (groups - tile * G), WHOLE)
        l0, l1, l2, l3 = four_of(tl.reshape(lows, [G, 2, 2]))
        l0, l1, l2, l3 = l0 & kept, l1 & kept, l2 & kept, l3 & kept
    else:
        l0, l1, l2, l3 = w0, w1, w2, w3
    return w0, w1, w2, w3, l0, l1, l2, l3


@triton.jit
def bits_of(w, low, FP32: tl.constexpr):
    """int32 bits as fp32 of the two values of a word, and, of fp32, of their lower halves."""
    if FP32:
        first, second = (w << 16) | (low & FIRST), (w & SECOND) | ((low >> 16) & FIRST)
    else:
        first, second = w << 16, w & SECOND
    return first, second


@triton.jit
def eight_joined(pairs, FP32: tl.constexpr, G: tl.constexpr):
    """int32[8 G]: fp32 bits of what pairs_decoded gives, in order."""
    a0, b0 = bits_of(pairs[0], pairs[4], FP32)
    a1, b1 = bits_of(pairs[1], pairs[5], FP32)
    a2, b2 = bits_of(pairs[2], pairs[6], FP32)
    a3, b3 = bits_of(pairs[3], pairs[7], FP32)
    return tl.reshape(tl.join(four_joined(a0, a1, a2, a3), four_joined(b0, b1, b2, b3)), [8 * G])


@triton.jit
def decode_kernel(
    payload, out, numel, groups, blocks, words,
    payload_stride, out_stride, starts_at, bases_at, codes_at, more_at, high_at, low_at,
    FP32: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Bits of payload[row, tile] to out (int16 or int32), grid (tiles, rows)."""
    G: tl.constexpr = TILE // GROUP
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pairs = pairs_decoded(
        payload + row * payload_stride, tile, groups, blocks, words,
        starts_at, bases_at, codes_at, more_at, high_at, low_at, FP32, WHOLE, TILE,
    )  # fmt: skip
    first = tile.to(tl.int64) * TILE
    target = out + row * out_stride + first
    at = tl.arange(0, TILE)
    if WHOLE and not FP32:
        words_of = words_joined(pairs[0], pairs[1], pairs[2], pairs[3], G)
        tl.store(target.to(tl.pointer_type(tl.int32)) + tl.arange(0, TILE // 2), words_of)
    else:
        bits = eight_joined(pairs, FP32, G)
        if not FP32:
            bits = bits >> 16
        tl.store(target + at, bits.to(out.dtype.element_ty), mask=at < numel - first)


@triton.jit
def decode_sum_kernel(
    payload, out, numel, groups, blocks, words,
    sender_stride, payload_stride, out_stride, starts_at, bases_at, codes_at, more_at, high_at, low_at,
    senders, scale,
    FP32: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """scale times the sum over payload[sender, row, tile] to out, in order, grid (tiles, rows)."""
    G: tl.constexpr = TILE // GROUP
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    payload += row * payload_stride
    pairs = pairs_decoded(
        payload, tile, groups, blocks, words,
        starts_at, bases_at, codes_at, more_at, high_at, low_at, FP32, WHOLE, TILE,
    )  # fmt: skip
    total = eight_joined(pairs, FP32, G).to(tl.float32, bitcast=True)
    for _ in tl.range(1, senders):
        payload += sender_stride
        pairs = pairs_decoded(
            payload, tile, groups, blocks, words,
            starts_at, bases_at, codes_at, more_at, high_at, low_at, FP32, WHOLE, TILE,
        )  # fmt: skip
        total += eight_joined(pairs, FP32, G).to(tl.float32, bitcast=True)
    first = tile.to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    target = out + row * out_stride + first
    tl.store(target + at, (total * scale).to(out.dtype.element_ty), mask=at < numel - first)
