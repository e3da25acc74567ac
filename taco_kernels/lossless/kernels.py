"""Triton kernels of the lossless layout (layout.py has the bytes): a program a tile, a lane a group.

A group's first two escapes are taken without looking how many it has; a tile in which one has more loops.
"""

import triton
import triton.language as tl

from taco_kernels.common.packing import four_of
from taco_kernels.lossless.words import (
    BLOCK_GROUPS,
    BYTES,
    FIRST,
    GROUP,
    bases_of,
    codes_of,
    escape_mask,
    exponent_at,
    exponent_of_value,
    exponents_of,
    high_bytes,
    near_value,
    of_groups,
    pairs_of,
    patched,
    put,
    take,
    with_exponents,
    words_joined,
)

HEADER = tl.constexpr(16)
FAR, MANY = tl.constexpr(1 << 12), tl.constexpr(1 << 21)  # a tile has at most 2048 escapes, in 256 groups


@triton.jit
def put_escape(area, place, value, there, words):
    """Set the bits of an escape, from bit ``place`` of the area on."""
    word = place >> 5
    tl.atomic_or(area + word, value << (place & 31), mask=there & (word < words), sem="relaxed")


@triton.jit
def largest_of(t0, t1, t2, t3):
    """The largest of eight exponents, in bytes 0 and 2 of four."""
    first = tl.maximum(tl.maximum(t0 & FIRST, t1 & FIRST), tl.maximum(t2 & FIRST, t3 & FIRST))
    second = tl.maximum(tl.maximum(t0 >> 16, t1 >> 16), tl.maximum(t2 >> 16, t3 >> 16))
    return tl.maximum(first, second)


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
    payload += row * payload_stride
    u0, u1, u2, u3, l0, l1, l2, l3 = pairs_of(x + row * x_stride + first, numel - first, FP32, WHOLE, G)
    group = tl.arange(0, G)
    there = group < groups - tile * G
    quarter = tl.arange(0, 4 * G) < 4 * (groups - tile * G)
    half = tl.arange(0, 2 * G) < 2 * (groups - tile * G)
    if FP32:
        low = (payload + low_at + 2 * first).to(tl.pointer_type(tl.int32))
        put(low + tl.arange(0, 4 * G), words_joined(l0, l1, l2, l3, G), quarter, WHOLE)
    h0, h1 = high_bytes(u0) | (high_bytes(u1) << 8), high_bytes(u2) | (high_bytes(u3) << 8)
    high = (payload + high_at + first).to(tl.pointer_type(tl.int32))
    put(high + tl.arange(0, 2 * G), tl.reshape(tl.join(h0, h1), [2 * G]), half, WHOLE)

    t0, t1, t2, t3 = (u0 >> 7) & BYTES, (u1 >> 7) & BYTES, (u2 >> 7) & BYTES, (u3 >> 7) & BYTES
    bases = bases_of(largest_of(t0, t1, t2, t3), G)
    block = tl.arange(0, G // BLOCK_GROUPS)
    at_block = tile * (G // BLOCK_GROUPS)
    put(payload + bases_at + at_block + block, bases.to(tl.uint8), block < blocks - at_block, WHOLE)
    base = of_groups(bases, G)
    word = codes_of(t0, base, 0) | codes_of(t1, base, 6) | codes_of(t2, base, 12) | codes_of(t3, base, 18)
    codes = (payload + codes_at + first // 4).to(tl.pointer_type(tl.int16))
    put(codes + group, word.to(tl.int16), there, WHOLE)
    put(payload + more_at + first // 8 + group, (word >> 16).to(tl.uint8), there, WHOLE)

    mask, count = escape_mask(word)
    if not WHOLE:
        mask, count = tl.where(there, mask, 0), tl.where(there, count, 0)
    rest = mask & (mask - 1)
    e0 = exponent_at(mask ^ rest, t0, t1, t2, t3)
    after = rest & (rest - 1)
    e1 = exponent_at(rest ^ after, t0, t1, t2, t3)
    v0, near0 = near_value(e0, base)
    v1, near1 = near_value(e1, base)
    is_far = ((mask != 0) & (near0 == 0)) | ((rest != 0) & (near1 == 0))
    totals = tl.sum(count + tl.where(is_far, FAR, 0) + tl.where(after != 0, MANY, 0), axis=0)
    far = (totals // FAR) & 511
    most = 0
    if totals >= MANY:
        most = tl.max(count, axis=0)
        left = after
        for _ in tl.range(2, most):
            later = left & (left - 1)
            _, near = near_value(exponent_at(left ^ later, t0, t1, t2, t3), base)
            far += tl.sum(((left != 0) & (near == 0)).to(tl.int32), axis=0)
            left = later
    far = tl.minimum(far, 1)
    width = 4 + 4 * far
    needed = ((totals & (FAR - 1)) * width + 31) // 32
    start = tl.atomic_add(payload.to(tl.pointer_type(tl.int32)), needed, sem="relaxed")
    tl.store((payload + starts_at).to(tl.pointer_type(tl.int32)) + tile, 2 * start + far)
    area = (payload + HEADER).to(tl.pointer_type(tl.int32)) + start
    free = words - start
    word_of = tl.arange(0, TILE // 4)
    tl.store(area + word_of, tl.zeros([TILE // 4], tl.int32), mask=word_of < tl.minimum(needed, free))
    tl.debug_barrier()  # of these words each escape sets its bits
    place = (tl.cumsum(count, axis=0) - count) * width
    put_escape(area, place, tl.where(far != 0, e0, v0), mask != 0, free)
    put_escape(area, place + width, tl.where(far != 0, e1, v1), rest != 0, free)
    for _ in tl.range(2, most):
        later = after & (after - 1)
        e = exponent_at(after ^ later, t0, t1, t2, t3)
        v, _ = near_value(e, base)
        place += width
        put_escape(area, place + width, tl.where(far != 0, e, v), after != 0, free)
        after = later


@triton.jit
def keep_raw_kernel(
    x, payload, rows, words, values, x_stride, payload_stride, R: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Where a row has not fitted, make all raw: their first values, as bits. Grid (programs, rows)."""
    row = tl.arange(0, R).to(tl.int64)
    header = (payload + row * payload_stride).to(tl.pointer_type(tl.int32))
    needed = tl.max(tl.load(header, mask=row < rows, other=0), axis=0)
    if needed > words:
        own = payload + tl.program_id(1).to(tl.int64) * payload_stride
        if tl.program_id(0) == 0:
            tl.store(own.to(tl.pointer_type(tl.int32)) + 1, 1)
        source = x + tl.program_id(1).to(tl.int64) * x_stride
        target = (own + HEADER).to(x.dtype)
        for begin in tl.range(tl.program_id(0) * T, values, tl.num_programs(0) * T):
            at = begin + tl.arange(0, T)
            tl.store(target + at, tl.load(source + at, mask=at < values), mask=at < values)


@triton.jit
def escaped_exponent(area, place, bit, base, far, words):
    """The exponent of an escape, from bit ``place`` of the area on, over 7 below the base: what to xor."""
    word = place >> 5
    found = tl.load(area + word, mask=(bit != 0) & (word < words), other=0)
    value = (found >> (place & 31)) & tl.where(far != 0, 255, 15)
    change = ((exponent_of_value(value, base, far) ^ (base - 7)) & 255) << 7
    return tl.where(bit == 0, 0, tl.where((bit & 0o10101010) != 0, change << 16, change))


@triton.jit
def pairs_decoded(
    payload, tile, numel, groups, blocks, words,
    starts_at, bases_at, codes_at, more_at, high_at, low_at,
    FP32: tl.constexpr, RAW: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What pairs_of gives of a tile of the tensor, from one payload; zeros if its rest is missing."""
    G: tl.constexpr = TILE // GROUP
    first = tile.to(tl.int64) * TILE
    flag = tl.load(payload + 4).to(tl.int32)
    raw = 0
    if RAW:
        raw = flag
    if raw != 0:
        if FP32:
            x = (payload + HEADER).to(tl.pointer_type(tl.int32))
        else:
            x = (payload + HEADER).to(tl.pointer_type(tl.int16))
        w0, w1, w2, w3, l0, l1, l2, l3 = pairs_of(x + first, numel - first, FP32, WHOLE, G)
    else:
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
        start = tl.where(flag == 0, start, 0)  # of a cut payload without its rest, any number
        mask, count = escape_mask(word)
        w0 = with_exponents(h0 & BYTES, exponents_of(word, base, 0))
        w1 = with_exponents((h0 >> 8) & BYTES, exponents_of(word, base, 6))
        w2 = with_exponents(h1 & BYTES, exponents_of(word, base, 12))
        w3 = with_exponents((h1 >> 8) & BYTES, exponents_of(word, base, 18))
        far, width = start & 1, 4 + 4 * (start & 1)
        area = (payload + HEADER).to(tl.pointer_type(tl.int32)) + (start >> 1)
        free = words - (start >> 1)
        most = tl.maximum(tl.max(count, axis=0), 2)
        place = (tl.cumsum(count, axis=0) - count) * width
        for _ in tl.range(0, most):
            later = mask & (mask - 1)
            bit = mask ^ later
            x = escaped_exponent(area, place, bit, base, far, free)
            w0, w1 = patched(w0, x, bit, 0o100, 0), patched(w1, x, bit, 0o10000, 0o100)
            w2, w3 = patched(w2, x, bit, 0o1000000, 0o10000), patched(w3, x, bit, 1 << 24, 0o1000000)
            place += width
            mask = later
        if FP32:
            low = (payload + low_at + 2 * first).to(tl.pointer_type(tl.int32))
            quarter = tl.arange(0, 4 * G)
            lows = take(low + quarter, quarter < 4 * (groups - tile * G), WHOLE)
            l0, l1, l2, l3 = four_of(tl.reshape(lows, [G, 2, 2]))
        else:
            l0, l1, l2, l3 = w0, w1, w2, w3
        if not RAW:
            kept = tl.where(flag == 0, -1, 0)
            w0, w1, w2, w3 = w0 & kept, w1 & kept, w2 & kept, w3 & kept
            l0, l1, l2, l3 = l0 & kept, l1 & kept, l2 & kept, l3 & kept
    return w0, w1, w2, w3, l0, l1, l2, l3
