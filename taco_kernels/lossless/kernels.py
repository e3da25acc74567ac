"""Triton kernels of the lossless layout (reference.py has the bytes): a program has a tile, a thread a group.

A group is 8 values as 4 words of two 16-bit halves. Four exponents, distances and codes are computed at once,
as the bytes of a word. Two such words are a group: bit 8 i of a mask says that byte i of the first is an
escape, bit 8 i + 1 that of the second. A group's first two escapes are encoded without looking how many it
has; a tile in which one has more loops.
"""

import triton
import triton.language as tl

from taco_kernels.common.packing import four_joined, four_of

HEADER, FLAG_AT = tl.constexpr(16), tl.constexpr(4)
FAR, MANY = (
    tl.constexpr(1 << 12),
    tl.constexpr(1 << 21),
)  # a tile has at most 2048 escapes, in 256 groups
GROUP = tl.constexpr(8)
BLOCK_GROUPS = tl.constexpr(16)
ONES = tl.constexpr(0x01010101)
LOW_BITS, HIGH_BITS = (
    tl.constexpr(0x7F7F7F7F),
    tl.constexpr(-0x7F7F7F80),
)  # of bytes: the lower 7, the 8th
BYTES, OTHERS = tl.constexpr(0x00FF00FF), tl.constexpr(-0x00FF0100)
FIRST, SECOND = tl.constexpr(0xFFFF), tl.constexpr(-65536)
SIX, SPREAD = tl.constexpr(0x003F3F3F), tl.constexpr(0x00C0C0C0)
SPREADING = tl.constexpr((1 << 6) + (1 << 12) + (1 << 18))


@triton.jit
def pairs_of(x, left, FP32: tl.constexpr, WHOLE: tl.constexpr, G: tl.constexpr):
    """Four int32[G] of G groups at x (int16, or fp32's int32 bits): the values' upper halves, the first of
    two in the lower bits; and four of fp32's lower halves. Zeros from the ``left``-th value on."""
    if FP32:
        at = tl.arange(0, G * GROUP)
        even, odd = tl.split(tl.reshape(load_where(x + at, at < left, WHOLE), [G, 2, 2, 2]))
        uppers = ((even >> 16) & FIRST) | (odd & SECOND)
        lowers = (even & FIRST) | (odd << 16)
        u0, u1, u2, u3 = four_of(uppers)
        l0, l1, l2, l3 = four_of(lowers)
    elif WHOLE:
        words = tl.load(x.to(tl.pointer_type(tl.int32)) + tl.arange(0, G * GROUP // 2))
        u0, u1, u2, u3 = four_of(tl.reshape(words, [G, 2, 2]))
        l0, l1, l2, l3 = u0, u0, u0, u0
    else:
        at = tl.arange(0, G * GROUP)
        bits = tl.load(x + at, mask=at < left, other=0).to(tl.int32)
        even, odd = tl.split(tl.reshape(bits, [G, 2, 2, 2]))
        u0, u1, u2, u3 = four_of((even & FIRST) | (odd << 16))
        l0, l1, l2, l3 = u0, u0, u0, u0
    return u0, u1, u2, u3, l0, l1, l2, l3


@triton.jit
def store_where(pointers, value, there, WHOLE: tl.constexpr):
    """Store, where there is anything, or everywhere."""
    if WHOLE:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=there)


@triton.jit
def load_where(pointers, there, WHOLE: tl.constexpr):
    """Load what there is, with zeros elsewhere, or everything."""
    if WHOLE:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=there, other=0)
    return value


@triton.jit
def words_joined(w0, w1, w2, w3, G: tl.constexpr):
    """int32[4 G], those of each group in order."""
    return tl.reshape(four_joined(w0, w1, w2, w3), [4 * G])


@triton.jit
def high_bytes(u, v):
    """int32 with sign and mantissa of four values, of two words: the first, third, second, fourth."""
    mantissas, signs = (u & BYTES) | ((v << 8) & OTHERS), ((u >> 8) & BYTES) | (v & OTHERS)
    return (mantissas & LOW_BITS) | (signs & HIGH_BITS)


@triton.jit
def exponent_bytes(u, v):
    """Their exponents, in the same order."""
    return ((u >> 7) & BYTES) | ((v << 1) & OTHERS)


@triton.jit
def values_of(high, exponents):
    """Inverse of high_bytes and exponent_bytes: two words."""
    a, b = high & BYTES, (high >> 8) & BYTES
    u = a + (a & 0x00800080) * 255 + (exponents & BYTES) * 128
    v = b + (b & 0x00800080) * 255 + ((exponents >> 8) & BYTES) * 128
    return u, v


@triton.jit
def larger_of(u):
    """uint32 whose upper 8 bits are the larger of two exponents."""
    return tl.maximum((u << 1).to(tl.uint32, bitcast=True), (u << 17).to(tl.uint32, bitcast=True))


@triton.jit
def bases_of(u0, u1, u2, u3, G: tl.constexpr):
    """int32[G / 16]: the smaller of the largest exponents of a block's even and odd groups."""
    largest = tl.maximum(
        tl.maximum(larger_of(u0), larger_of(u1)), tl.maximum(larger_of(u2), larger_of(u3))
    )
    largest = (largest >> 24).to(tl.int32, bitcast=True)
    largest = tl.reshape(largest, [G // BLOCK_GROUPS, BLOCK_GROUPS // 2, 2])
    even, odd = tl.split(tl.max(largest, axis=1))
    return tl.minimum(even, odd)


@triton.jit
def of_groups(base, G: tl.constexpr):
    """int32[G] of what there is one of a block, [G / 16]."""
    return tl.reshape(tl.broadcast_to(base[:, None], [G // BLOCK_GROUPS, BLOCK_GROUPS]), [G])


@triton.jit
def distances_of(bases, exponents):
    """Bytes: how far four exponents lie below the base, modulo 256."""
    difference = (bases | HIGH_BITS) - (exponents & LOW_BITS)
    return difference ^ ((bases ^ ~exponents) & HIGH_BITS)


@triton.jit
def escapes_of(distances):
    """Bytes: 1 where a distance has no code, else 0."""
    return ((((distances & LOW_BITS) + 0x79797979) | distances) >> 7) & ONES


@triton.jit
def packed_codes(d0, f0, d1, f1):
    """24 bits of the codes of a group, from the distances and escapes of four values and four."""
    six = ((d0 & 0x07070707) | (f0 * 7)) + ((d1 & 0x07070707) | (f1 * 7)) * 8
    return (six & SIX) | ((((six >> 24) & 63) * SPREADING) & SPREAD)


@triton.jit
def codes_of(word):
    """Inverse of packed_codes: the codes of four values and four, in bytes."""
    six = (word & SIX) | (((word & SPREAD) * SPREADING) & 0x3F000000)
    return six & 0x07070707, (six >> 3) & 0x07070707


@triton.jit
def exponents_of(bases, codes):
    """Inverse of distances_of for distances below 7, modulo 256 too; the base where a code is 0."""
    return ((bases | HIGH_BITS) - codes) ^ (~bases & HIGH_BITS)


@triton.jit
def sum_of_bytes(x):
    """The sum of four bytes, below 256."""
    return ((x * ONES) >> 24) & 255


@triton.jit
def byte_at(bit, x0, x1):
    """The byte of x0 or x1 that the bit of a group's mask stands for; 0 for none."""
    return sum_of_bytes((x0 & ((bit & ONES) * 255)) | (x1 & (((bit >> 1) & ONES) * 255)))


@triton.jit
def near_value(distance, base):
    """What an escape is in 4 bits, and whether it fits them; true for a distance of 0."""
    from_below = ((distance + 2) & 255).to(tl.uint32, bitcast=True)  # 0, 1, then 9 to 21
    value = tl.minimum(from_below, from_below - 7).to(tl.int32, bitcast=True)
    return tl.where(distance == base, 15, value), (value < 15) | (distance == base)


@triton.jit
def exponent_of_value(value, base, far):
    """Inverse of near_value; in a far tile the value itself."""
    near = tl.where(value == 15, 0, base - value + tl.where(value < 2, 2, -5))
    return tl.where(far != 0, value, near)


@triton.jit
def put_escape(area, place, value, there):
    """Set the bits of an escape, from bit ``place`` of the area on."""
    tl.atomic_or(area + (place >> 5), value << (place & 31), mask=there, sem="relaxed")


@triton.jit
def encode_kernel(
    x, payload, sizes, places, x_stride, payload_stride,
    FP32: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode x[row, tile] (int16 or int32 bits), grid (tiles, rows); the header holds zeros before.

    ``sizes``: values, groups, blocks, words of escapes. ``places``: reference.Places without its end.
    """
    numel, groups, blocks, words = sizes
    starts_at, bases_at, codes_at, more_at, high_at, low_at = places
    G: tl.constexpr = TILE // GROUP
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tile.to(tl.int64) * TILE
    first_flag = payload + FLAG_AT
    payload += row * payload_stride
    u0, u1, u2, u3, l0, l1, l2, l3 = pairs_of(
        x + row * x_stride + first, numel - first, FP32, WHOLE, G
    )
    group = tl.arange(0, G)
    there = group < groups - tile * G
    quarter = tl.arange(0, 4 * G) < 4 * (groups - tile * G)
    half = tl.arange(0, 2 * G) < 2 * (groups - tile * G)
    if FP32:
        low = (payload + low_at + 2 * first).to(tl.pointer_type(tl.int32))
        store_where(low + tl.arange(0, 4 * G), words_joined(l0, l1, l2, l3, G), quarter, WHOLE)
    high = (payload + high_at + first).to(tl.pointer_type(tl.int32))
    highs = tl.reshape(tl.join(high_bytes(u0, u1), high_bytes(u2, u3)), [2 * G])
    store_where(high + tl.arange(0, 2 * G), highs, half, WHOLE)

    bases = bases_of(u0, u1, u2, u3, G)
    block = tl.arange(0, G // BLOCK_GROUPS)
    at_block = tile * (G // BLOCK_GROUPS)
    store_where(
        payload + bases_at + at_block + block, bases.to(tl.uint8), block < blocks - at_block, WHOLE
    )
    base = of_groups(bases, G)
    d0 = distances_of(base * ONES, exponent_bytes(u0, u1))
    d1 = distances_of(base * ONES, exponent_bytes(u2, u3))
    f0, f1 = escapes_of(d0), escapes_of(d1)
    word = packed_codes(d0, f0, d1, f1)
    codes = (payload + codes_at + first // 4).to(tl.pointer_type(tl.int16))
    store_where(codes + group, word.to(tl.int16), there, WHOLE)
    store_where(payload + more_at + first // 8 + group, (word >> 16).to(tl.uint8), there, WHOLE)

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
    payload, tile, sizes, places, FP32: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr
):
    """What pairs_of gives of a tile of the tensor, from one payload; zeros where it overflowed."""
    _, groups, blocks, words = sizes
    starts_at, bases_at, codes_at, more_at, high_at, low_at = places
    G: tl.constexpr = TILE // GROUP
    first = tile.to(tl.int64) * TILE
    overflow = tl.load(payload + FLAG_AT).to(tl.int32)
    group = tl.arange(0, G)
    there = group < groups - tile * G
    codes = (payload + codes_at + first // 4).to(tl.pointer_type(tl.int16))
    word = load_where(codes + group, there, WHOLE).to(tl.int32) & FIRST
    more = load_where(payload + more_at + first // 8 + group, there, WHOLE)
    word |= more.to(tl.int32) << 16
    high = (payload + high_at + first).to(tl.pointer_type(tl.int32))
    half = tl.arange(0, 2 * G)
    highs = load_where(high + half, half < 2 * (groups - tile * G), WHOLE)
    h0, h1 = tl.split(tl.reshape(highs, [G, 2]))
    block = tl.arange(0, G // BLOCK_GROUPS)
    at_block = tile * (G // BLOCK_GROUPS)
    bases = load_where(payload + bases_at + at_block + block, block < blocks - at_block, WHOLE)
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
        lows = load_where(low + quarter, quarter < 4 * (groups - tile * G), WHOLE)
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
    payload, out, sizes, places, payload_stride, out_stride,
    FP32: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Bits of payload[row, tile] to out (int16 or int32), grid (tiles, rows)."""
    G: tl.constexpr = TILE // GROUP
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    numel = sizes[0]
    pairs = pairs_decoded(payload + row * payload_stride, tile, sizes, places, FP32, WHOLE, TILE)
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
    payload, out, sizes, places, sender_stride, payload_stride, out_stride, senders, scale,
    FP32: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """scale times the sum over payload[sender, row, tile] to out, in order, grid (tiles, rows)."""
    G: tl.constexpr = TILE // GROUP
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    payload += row * payload_stride
    pairs = pairs_decoded(payload, tile, sizes, places, FP32, WHOLE, TILE)
    total = eight_joined(pairs, FP32, G).to(tl.float32, bitcast=True)
    for _ in tl.range(1, senders):
        payload += sender_stride
        pairs = pairs_decoded(payload, tile, sizes, places, FP32, WHOLE, TILE)
        total += eight_joined(pairs, FP32, G).to(tl.float32, bitcast=True)
    first = tile.to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    target = out + row * out_stride + first
    tl.store(target + at, (total * scale).to(out.dtype.element_ty), mask=at < sizes[0] - first)
