"""Triton kernels of the lossless layout (reference.py has the bytes): a program has a tile, a
thread a group.

A group is 8 values, v0 to v7, held as 4 int32 words of two 16-bit halves, the first value in the
lower bits. Of fp32 these are the upper halves, which are bf16 values; the lower halves are four
more words::

    word 0: v0 v1    word 1: v2 v3    word 2: v4 v5    word 3: v6 v7

    a half:  15   14 ... 7   6 ... 0
             sign exponent   mantissa

Exponents, distances and codes are computed four at a time, as the bytes of an int32. A group is two
such quads; the order of the bytes is what masks and shifts of two words give without moving single
values::

                  byte 0    byte 1    byte 2    byte 3
    quad a        v0        v2        v1        v3          from words 0 and 1
    quad b        v4        v6        v5        v7          from words 2 and 3

What becomes of a group's bits::

    mantissas      8 bytes: sign and mantissa of quad a, then of quad b
    codes          24 bits: three bytes with the codes of bytes 0, 1, 2 of quad a in bits 0-2, of quad b in
                   bits 3-5; the 6 bits of byte 3 fill bits 6-7 of the three
    escapes        in the order of a mask: bit 8 i says that byte i of quad a is an escape, bit 8 i + 1 that
                   byte i of quad b is; so v0, v4, v2, v6, v1, v5, v3, v7
    lower halves   16 bytes of fp32, in the order of the values

A group's first two escapes are encoded without looking how many it has; a tile in which a group has
more loops. Suffixes _a and _b stand for the quads.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from taco_kernels.common.packing import four_joined, four_of
from taco_kernels.lossless import reference

HEADER = tl.constexpr(reference.HEADER)
FLAG_AT = tl.constexpr(reference.FLAG_AT)
GROUP = tl.constexpr(reference.GROUP)
BLOCK_GROUPS = tl.constexpr(reference.GROUPS)

# One sum over a tile carries three counts. A tile has at most 2048 escapes, in 256 groups.
FAR = tl.constexpr(1 << 12)
"""Bits 12 to 20: groups whose first two escapes do not both fit 4 bits; bits 0 to 11 count the
escapes."""
MANY = tl.constexpr(1 << 21)
"""Bits 21 and up: groups of more than two escapes."""

# Masks of the four bytes of an int32, and of its two halves.
ONES = tl.constexpr(0x01010101)
LOW_BITS = tl.constexpr(0x7F7F7F7F)  # the lower 7 bits of each byte ...
HIGH_BITS = tl.constexpr(-0x7F7F7F80)  # ... and the 8th, 0x80808080
EVEN_BYTES = tl.constexpr(0x00FF00FF)
ODD_BYTES = tl.constexpr(-0x00FF0100)  # 0xFF00FF00
LOWER_HALF = tl.constexpr(0xFFFF)
UPPER_HALF = tl.constexpr(-65536)  # 0xFFFF0000
EXPONENT_LOWEST_BITS = tl.constexpr(0x00800080)
"""The lowest bit of the exponent in each half."""

# The codes of byte 3, 6 bits, are multiplied with SPREADING to lie thrice in the product, two bits
# further to the left in each byte; SPREAD keeps bits 6 and 7 of bytes 0 to 2, which are the three
# different pairs.
SIX = tl.constexpr(0x003F3F3F)
SPREAD = tl.constexpr(0x00C0C0C0)
SPREADING = tl.constexpr((1 << 6) + (1 << 12) + (1 << 18))


class Escapes(NamedTuple):
    """A tile's escapes in the area that a row's tiles share."""

    area: tl.tensor
    """Pointer to the tile's first int32 word there."""
    far: tl.tensor
    """1 where an escape is 8 bits, the exponent; else 0, and it is 4 bits."""
    free: tl.tensor
    """Words from the tile's first to the area's end."""


@triton.jit
def store_where(pointers, value, mask, FULL_TILES: tl.constexpr):
    """Store under the mask, or everywhere if FULL_TILES, where all of the mask would be set.

    Args:
        pointers: where to.
        value: what to store.
        mask: elements that exist.
    """
    if FULL_TILES:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit
def load_where(pointers, mask, FULL_TILES: tl.constexpr):
    """Load under the mask, zeros elsewhere; or everything if FULL_TILES, where all of the mask
    would be set.

    Args:
        pointers: where from.
        mask: elements that exist.
    """
    if FULL_TILES:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=mask, other=0)
    return value


@triton.jit
def load_values(x, values_left, FP32: tl.constexpr, FULL_TILES: tl.constexpr, G: tl.constexpr):
    """Load the values of G groups as words of two halves.

    Args:
        x: pointer to the tile's first value: int16, or fp32's int32 bits.
        values_left: values from there to the row's end; zeros are loaded beyond.

    Returns:
        Four int32[G] of the values' upper halves, and four of fp32's lower halves; of bf16 the same
        again.
    """
    if FP32:
        index = tl.arange(0, G * GROUP)
        bits = load_where(x + index, index < values_left, FULL_TILES)
        even, odd = tl.split(tl.reshape(bits, [G, 2, 2, 2]))
        upper = ((even >> 16) & LOWER_HALF) | (odd & UPPER_HALF)
        lower = (even & LOWER_HALF) | (odd << 16)
        uppers = four_of(upper)
        lowers = four_of(lower)
    elif FULL_TILES:  # two values in a word already
        words = tl.load(x.to(tl.pointer_type(tl.int32)) + tl.arange(0, G * GROUP // 2))
        uppers = four_of(tl.reshape(words, [G, 2, 2]))
        lowers = uppers
    else:
        index = tl.arange(0, G * GROUP)
        bits = tl.load(x + index, mask=index < values_left, other=0).to(tl.int32)
        even, odd = tl.split(tl.reshape(bits, [G, 2, 2, 2]))
        uppers = four_of((even & LOWER_HALF) | (odd << 16))
        lowers = uppers
    return uppers, lowers


@triton.jit
def words_joined(words, G: tl.constexpr):
    """int32[4 G]: four words of each group, in order."""
    w0, w1, w2, w3 = words
    return tl.reshape(four_joined(w0, w1, w2, w3), [4 * G])


@triton.jit
def mantissa_bytes(u, v):
    """int32 of bytes: sign and mantissa of four values.

    u = [u1 u0] and v = [v1 v0] are words of two halves; the bytes are of u0, v0, u1, v1.
    """
    lower = (u & EVEN_BYTES) | ((v << 8) & ODD_BYTES)  # an exponent's lowest bit, and the mantissa
    upper = ((u >> 8) & EVEN_BYTES) | (v & ODD_BYTES)  # the sign, and the exponent's other bits
    return (lower & LOW_BITS) | (upper & HIGH_BITS)


@triton.jit
def exponent_bytes(u, v):
    """int32 of bytes: the exponents of four values, in the order of ``mantissa_bytes``."""
    return ((u >> 7) & EVEN_BYTES) | ((v << 1) & ODD_BYTES)


@triton.jit
def values_of(mantissas, exponents):
    """Two words of two halves: the inverse of ``mantissa_bytes`` and ``exponent_bytes``.

    In a half, s mmmmmmm must become s 00000000 mmmmmmm: a set sign, 0x80, needs 0x7F80 = 255 * 0x80
    more. The exponent is added 7 bits higher, which is a product with 128.
    """
    even = mantissas & EVEN_BYTES
    odd = (mantissas >> 8) & EVEN_BYTES
    u = even + (even & EXPONENT_LOWEST_BITS) * 255 + (exponents & EVEN_BYTES) * 128
    v = odd + (odd & EXPONENT_LOWEST_BITS) * 255 + ((exponents >> 8) & EVEN_BYTES) * 128
    return u, v


@triton.jit
def larger_of(u):
    """uint32 whose upper 8 bits are the larger of the exponents of a word's two halves."""
    upper = (u << 1).to(tl.uint32, bitcast=True)
    lower = (u << 17).to(tl.uint32, bitcast=True)
    return tl.maximum(upper, lower)


@triton.jit
def bases_of(words, G: tl.constexpr):
    """int32[G / 16]: each block's base, from the four words of G groups.

    It is the smaller of the largest exponents of the block's even and odd groups, so that one
    outlier does not decide it.
    """
    w0, w1, w2, w3 = words
    first = tl.maximum(larger_of(w0), larger_of(w1))
    second = tl.maximum(larger_of(w2), larger_of(w3))
    largest = (tl.maximum(first, second) >> 24).to(tl.int32, bitcast=True)
    largest = tl.reshape(largest, [G // BLOCK_GROUPS, BLOCK_GROUPS // 2, 2])
    even, odd = tl.split(tl.max(largest, axis=1))
    return tl.minimum(even, odd)


@triton.jit
def of_groups(bases, G: tl.constexpr):
    """int32[G]: each group's base, from those of the blocks, [G / 16]."""
    groups = tl.broadcast_to(bases[:, None], [G // BLOCK_GROUPS, BLOCK_GROUPS])
    return tl.reshape(groups, [G])


@triton.jit
def distances_of(bases, exponents):
    """Bytes: how far four exponents lie below their base, modulo 256.

    A difference of bytes without borrows between them: the 8th bits are left out of the subtraction
    (of the base they are set, so that no byte borrows) and put right by xor.
    """
    difference = (bases | HIGH_BITS) - (exponents & LOW_BITS)
    return difference ^ ((bases ^ ~exponents) & HIGH_BITS)


@triton.jit
def escapes_of(distances):
    """Bytes: 1 where a distance is 7 or more, and so has no code, else 0."""
    # 7 + 0x79 sets the 8th bit of a byte, and so does a distance of 128 and more.
    return ((((distances & LOW_BITS) + 0x79797979) | distances) >> 7) & ONES


@triton.jit
def packed_codes(distances_a, escapes_a, distances_b, escapes_b):
    """24 bits: the codes of a group, which are distances, or 7 for an escape.

    Args:
        distances_a: of quad a, bytes; only the lower 3 bits of an escape's are looked at.
        escapes_a: bytes, 1 for an escape.
        distances_b: of quad b.
        escapes_b: of quad b.
    """
    codes_a = (distances_a & 0x07070707) | (escapes_a * 7)
    codes_b = (distances_b & 0x07070707) | (escapes_b * 7)
    six = codes_a + codes_b * 8
    return (six & SIX) | ((((six >> 24) & 63) * SPREADING) & SPREAD)


@triton.jit
def codes_of(word):
    """The codes of quad a and of quad b, bytes: the inverse of ``packed_codes``."""
    six = (word & SIX) | (((word & SPREAD) * SPREADING) & 0x3F000000)
    return six & 0x07070707, (six >> 3) & 0x07070707


@triton.jit
def exponents_of(bases, codes):
    """Bytes: the exponents whose distances are ``codes``, at most 6; the base where a code is 0."""
    return ((bases | HIGH_BITS) - codes) ^ (~bases & HIGH_BITS)


@triton.jit
def sum_of_bytes(x):
    """The sum of an int32's four bytes, which must be below 256."""
    return ((x * ONES) >> 24) & 255


@triton.jit
def byte_at(bit, quad_a, quad_b):
    """The byte of a quad that one bit of a group's mask stands for; 0 for no bit.

    Args:
        bit: int32 with that bit set alone: 8 i for byte i of quad a, 8 i + 1 for byte i of quad b.
        quad_a: bytes.
        quad_b: bytes.
    """
    of_a = quad_a & ((bit & ONES) * 255)
    of_b = quad_b & (((bit >> 1) & ONES) * 255)
    return sum_of_bytes(of_a | of_b)  # one byte of the two is not zero


@triton.jit
def near_value(distance, base):
    """The 4 bits of an escape, and whether it has such a value; true for a distance of 0, which is
    none.

    ::

        distance    -2   -1   7 ... 19    the base (an exponent of 0)
        value        0    1   2 ... 14    15
    """
    from_below = ((distance + 2) & 255).to(tl.uint32, bitcast=True)  # 0, 1, then 9 to 21
    value = tl.minimum(from_below, from_below - 7).to(tl.int32, bitcast=True)
    return tl.where(distance == base, 15, value), (value < 15) | (distance == base)


@triton.jit
def exponent_of_value(value, base, far):
    """The exponent that an escape's value stands for: the inverse of ``near_value``.

    Args:
        value: 4 bits; in a far tile 8 bits, which are the exponent itself.
        base: of the block.
        far: not 0 in a far tile.
    """
    near = tl.where(value == 15, 0, base - value + tl.where(value < 2, 2, -5))
    return tl.where(far != 0, value, near)


@triton.jit
def put_escape(area, bit, value, mask):
    """Set the bits of an escape. The words hold zeros before, and neighbours share a word: hence
    atomics.

    Args:
        area: pointer to the tile's first int32 word of escapes.
        bit: number of the escape's lowest bit from there.
        value: 4 or 8 bits.
        mask: groups that have such an escape.
    """
    tl.atomic_or(area + (bit >> 5), value << (bit & 31), mask=mask, sem="relaxed")


@triton.jit
def with_far_escapes(far, mask, distances_a, distances_b, base, rounds):
    """``far`` plus the number of escapes that do not fit 4 bits, among those in ``mask``.

    Args:
        far: number of groups whose first two escapes do not both fit.
        mask: int32[G], without each group's first two escapes.
        distances_a: int32[G] of bytes.
        distances_b: int32[G] of bytes.
        base: int32[G].
        rounds: escapes of the group that has most.
    """
    for _ in tl.range(2, rounds):
        later = mask & (mask - 1)  # without its lowest bit
        # By its index: a name `_` would be the loop's own variable, of which Triton 3.5 keeps the
        # type.
        near = near_value(byte_at(mask ^ later, distances_a, distances_b), base)[1]
        far += tl.sum((near == 0).to(tl.int32), axis=0)
        mask = later
    return far


@triton.jit
def encode_kernel(
    x, payload, sizes, offsets, x_stride, payload_stride,
    FP32: tl.constexpr, FULL_TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode one tile of one row; grid (tiles, rows). The header must hold zeros before.

    Tiles take their words of escapes in the order in which they come: one atomic addition to the
    header's count allots them. So payloads may differ between runs, and what they decode to does
    not.

    Args:
        x: int16 (bf16) or int32 (fp32) bits [rows, values].
        payload: uint8 [rows, payload_bytes].
        sizes: ``reference.Sizes`` of a row.
        offsets: ``reference.Offsets`` of a payload.
        x_stride: values from one row to the next.
        payload_stride: bytes from one payload to the next.
        FP32: whether values have lower halves.
        FULL_TILES: rows are whole tiles that can be loaded in words.
        TILE: values in a tile.
    """
    G: tl.constexpr = TILE // GROUP
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first = tile.to(tl.int64) * TILE
    first_flag = payload + FLAG_AT
    payload += row * payload_stride
    tile_x = x + row * x_stride + first
    words, lowers = load_values(tile_x, sizes.numel - first, FP32, FULL_TILES, G)
    w0, w1, w2, w3 = words

    # What is stored as it is: lower halves, signs and mantissas.
    groups_left = sizes.groups - tile * G
    group = tl.arange(0, G)
    inside = group < groups_left
    if FP32:
        low = (payload + offsets.lower_halves + 2 * first).to(tl.pointer_type(tl.int32))
        index = tl.arange(0, 4 * G)
        store_where(low + index, words_joined(lowers, G), index < 4 * groups_left, FULL_TILES)
    high = (payload + offsets.mantissas + first).to(tl.pointer_type(tl.int32))
    mantissas = tl.reshape(tl.join(mantissa_bytes(w0, w1), mantissa_bytes(w2, w3)), [2 * G])
    index = tl.arange(0, 2 * G)
    store_where(high + index, mantissas, index < 2 * groups_left, FULL_TILES)

    # Bases and codes.
    bases = bases_of(words, G)
    block = tl.arange(0, G // BLOCK_GROUPS)
    first_block = tile * (G // BLOCK_GROUPS)
    base_bytes = payload + offsets.bases + first_block + block
    store_where(base_bytes, bases.to(tl.uint8), block < sizes.blocks - first_block, FULL_TILES)
    base = of_groups(bases, G)
    distances_a = distances_of(base * ONES, exponent_bytes(w0, w1))
    distances_b = distances_of(base * ONES, exponent_bytes(w2, w3))
    escapes_a = escapes_of(distances_a)
    escapes_b = escapes_of(distances_b)
    codes = packed_codes(distances_a, escapes_a, distances_b, escapes_b)
    codes_low = (payload + offsets.codes_low + first // 4).to(tl.pointer_type(tl.int16))
    store_where(codes_low + group, codes.to(tl.int16), inside, FULL_TILES)
    codes_high = payload + offsets.codes_high + first // 8
    store_where(codes_high + group, (codes >> 16).to(tl.uint8), inside, FULL_TILES)

    # Each group's escapes as a mask; its first two as values of 4 bits, if they fit.
    mask = escapes_a + escapes_b * 2
    count = sum_of_bytes(escapes_a + escapes_b)
    if not FULL_TILES:
        mask = tl.where(inside, mask, 0)
        count = tl.where(inside, count, 0)
    from_second = mask & (mask - 1)  # without the lowest bit, which is the first escape
    from_third = from_second & (from_second - 1)
    escape0 = byte_at(mask ^ from_second, distances_a, distances_b)
    escape1 = byte_at(from_second ^ from_third, distances_a, distances_b)
    value0, near0 = near_value(escape0, base)
    value1, near1 = near_value(escape1, base)

    # The tile's width of escapes, and how many words it needs.
    far_group = tl.where(near0 & near1, 0, FAR)
    many_group = tl.where(from_third != 0, MANY, 0)
    totals = tl.sum(count + far_group + many_group, axis=0)
    far = (totals // FAR) & 511
    rounds = 0
    if totals >= MANY:
        rounds = tl.max(count, axis=0)
        far = with_far_escapes(far, from_third, distances_a, distances_b, base, rounds)
    far = tl.minimum(far, 1)
    width = 4 + 4 * far
    needed = ((totals & (FAR - 1)) * width + 31) // 32
    start = tl.atomic_add(payload.to(tl.pointer_type(tl.int32)), needed, sem="relaxed")
    tl.store((payload + offsets.starts).to(tl.pointer_type(tl.int32)) + tile, 2 * start + far)
    if start + needed > sizes.escape_words:  # the row overflows; the first row says so too
        tl.store(payload + FLAG_AT, 1)
        tl.store(first_flag, 1)
    else:
        area = (payload + HEADER).to(tl.pointer_type(tl.int32)) + start
        word = tl.arange(0, TILE // 4)  # a tile needs at most a byte a value
        tl.store(area + word, tl.zeros([TILE // 4], tl.int32), mask=word < needed)
        tl.debug_barrier()  # the zeros must lie there before other threads set bits
        bit = (tl.cumsum(count, axis=0) - count) * width  # of the group's first escape
        is_far = far != 0
        put_escape(area, bit, tl.where(is_far, (base - escape0) & 255, value0), mask != 0)
        bit1 = bit + width
        put_escape(area, bit1, tl.where(is_far, (base - escape1) & 255, value1), from_second != 0)
        for _ in tl.range(2, rounds):
            later = from_third & (from_third - 1)
            escape = byte_at(from_third ^ later, distances_a, distances_b)
            near = near_value(escape, base)[0]
            value = tl.where(is_far, (base - escape) & 255, near)
            bit += width
            put_escape(area, bit + width, value, from_third != 0)
            from_third = later


@triton.jit
def escape_over_base(escapes, bit, mask, base):
    """The byte by which a base must be xored to become the exponent of an escape.

    Args:
        escapes: ``Escapes`` of the tile.
        bit: number of the escape's lowest bit from the tile's first word on.
        mask: groups that have such an escape.
        base: of each group.
    """
    word = bit >> 5
    # A payload that did not overflow never reaches beyond the area; a damaged one must not read
    # beyond it.
    bits = tl.load(escapes.area + word, mask=mask & (word < escapes.free), other=0)
    value = (bits >> (bit & 31)) & tl.where(escapes.far != 0, 255, 15)
    return (exponent_of_value(value, base, escapes.far) ^ base) & 255


@triton.jit
def decoded_words(
    payload, tile, sizes, offsets, FP32: tl.constexpr, FULL_TILES: tl.constexpr, TILE: tl.constexpr
):
    """The two results of ``load_values`` for a tile of the tensor; zeros where the payload
    overflowed.

    Args:
        payload: pointer to the row's payload.
        tile: number of the tile in the row.
        sizes: ``reference.Sizes`` of a row.
        offsets: ``reference.Offsets`` of a payload.
    """
    G: tl.constexpr = TILE // GROUP
    first = tile.to(tl.int64) * TILE
    overflow = tl.load(payload + FLAG_AT).to(tl.int32)

    # Codes, mantissas and bases.
    groups_left = sizes.groups - tile * G
    group = tl.arange(0, G)
    inside = group < groups_left
    codes_low = (payload + offsets.codes_low + first // 4).to(tl.pointer_type(tl.int16))
    codes = load_where(codes_low + group, inside, FULL_TILES).to(tl.int32) & LOWER_HALF
    codes_high = payload + offsets.codes_high + first // 8
    codes |= load_where(codes_high + group, inside, FULL_TILES).to(tl.int32) << 16
    high = (payload + offsets.mantissas + first).to(tl.pointer_type(tl.int32))
    index = tl.arange(0, 2 * G)
    mantissas = load_where(high + index, index < 2 * groups_left, FULL_TILES)
    mantissas_a, mantissas_b = tl.split(tl.reshape(mantissas, [G, 2]))
    block = tl.arange(0, G // BLOCK_GROUPS)
    first_block = tile * (G // BLOCK_GROUPS)
    base_bytes = payload + offsets.bases + first_block + block
    bases = load_where(base_bytes, block < sizes.blocks - first_block, FULL_TILES)
    base = of_groups(bases.to(tl.int32), G)

    # Where the tile's escapes lie. The start in a payload that overflowed may be any number.
    start = tl.load((payload + offsets.starts).to(tl.pointer_type(tl.int32)) + tile)
    start = tl.where(overflow == 0, start, 0)

    # Exponents: the base less the code, and for now the base itself for an escape, whose code is 7.
    codes_a, codes_b = codes_of(codes)
    escapes_a = ((codes_a + ONES) >> 3) & ONES
    escapes_b = ((codes_b + ONES) >> 3) & ONES
    exponents_a = exponents_of(base * ONES, codes_a - escapes_a * 7)
    exponents_b = exponents_of(base * ONES, codes_b - escapes_b * 7)
    mask = escapes_a + escapes_b * 2
    count = sum_of_bytes(escapes_a + escapes_b)

    # Every group's first escape, then every group's second one, and so on: a byte is corrected by
    # xor.
    far = start & 1
    width = 4 + 4 * far
    area = (payload + HEADER).to(tl.pointer_type(tl.int32)) + (start >> 1)
    escapes = Escapes(area, far, free=sizes.escape_words - (start >> 1))
    # As in the encoder, two rounds come without looking whether a group has so many.
    rounds = tl.maximum(tl.max(count, axis=0), 2)
    bit_at = (tl.cumsum(count, axis=0) - count) * width
    for _ in tl.range(0, rounds):
        later = mask & (mask - 1)
        lowest = mask ^ later
        correction = escape_over_base(escapes, bit_at, lowest != 0, base)
        exponents_a = exponents_a ^ (lowest & ONES) * correction
        exponents_b = exponents_b ^ ((lowest >> 1) & ONES) * correction
        bit_at += width
        mask = later

    w0, w1 = values_of(mantissas_a, exponents_a)
    w2, w3 = values_of(mantissas_b, exponents_b)
    valid = tl.where(overflow == 0, -1, 0)  # all bits, or none
    words = (w0 & valid, w1 & valid, w2 & valid, w3 & valid)
    if FP32:
        low = (payload + offsets.lower_halves + 2 * first).to(tl.pointer_type(tl.int32))
        index = tl.arange(0, 4 * G)
        lows = load_where(low + index, index < 4 * groups_left, FULL_TILES)
        l0, l1, l2, l3 = four_of(tl.reshape(lows, [G, 2, 2]))
        lowers = (l0 & valid, l1 & valid, l2 & valid, l3 & valid)
    else:
        lowers = words
    return words, lowers


@triton.jit
def bits_of(word, lower, FP32: tl.constexpr):
    """Return two values as the bits of fp32 numbers, int32 each.

    Args:
        word: int32 with the upper 16 bits of both values, the first one's in its lower half.
        lower: int32 with the lower 16 bits of both, likewise; not looked at unless FP32 (a value of
            bf16 has none).
    """
    # A shift to the right of an int32 repeats its sign: the mask removes that.
    if FP32:
        first = (word << 16) | (lower & LOWER_HALF)
        second = (word & UPPER_HALF) | ((lower >> 16) & LOWER_HALF)
    else:
        first = word << 16
        second = word & UPPER_HALF
    return first, second


@triton.jit
def eight_joined(words, lowers, FP32: tl.constexpr, G: tl.constexpr):
    """int32[8 G]: fp32 bits of every value of G groups, in order.

    Args:
        words: four int32[G] of upper halves.
        lowers: four int32[G] of lower halves.
    """
    w0, w1, w2, w3 = words
    l0, l1, l2, l3 = lowers
    first0, second0 = bits_of(w0, l0, FP32)
    first1, second1 = bits_of(w1, l1, FP32)
    first2, second2 = bits_of(w2, l2, FP32)
    first3, second3 = bits_of(w3, l3, FP32)
    firsts = four_joined(first0, first1, first2, first3)
    seconds = four_joined(second0, second1, second2, second3)
    return tl.reshape(tl.join(firsts, seconds), [8 * G])


@triton.jit
def decoded_floats(
    payload, tile, sizes, offsets, FP32: tl.constexpr, FULL_TILES: tl.constexpr, TILE: tl.constexpr
):
    """fp32[TILE]: the values of a tile, from one payload. Arguments as for ``decoded_words``."""
    words, lowers = decoded_words(payload, tile, sizes, offsets, FP32, FULL_TILES, TILE)
    return eight_joined(words, lowers, FP32, TILE // GROUP).to(tl.float32, bitcast=True)


@triton.jit
def decode_kernel(
    payload, out, sizes, offsets, payload_stride, out_stride,
    FP32: tl.constexpr, FULL_TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Decode one tile of one row; grid (tiles, rows).

    Args:
        payload: uint8 [rows, payload_bytes].
        out: int16 (bf16) or int32 (fp32) bits [rows, values].
        sizes: ``reference.Sizes`` of a row.
        offsets: ``reference.Offsets`` of a payload.
        payload_stride: bytes from one payload to the next.
        out_stride: values from one row to the next.
        FP32: whether values have lower halves.
        FULL_TILES: rows are whole tiles that can be stored in words.
        TILE: values in a tile.
    """
    G: tl.constexpr = TILE // GROUP
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    numel = sizes.numel
    row_payload = payload + row * payload_stride
    words, lowers = decoded_words(row_payload, tile, sizes, offsets, FP32, FULL_TILES, TILE)
    first = tile.to(tl.int64) * TILE
    target = out + row * out_stride + first
    index = tl.arange(0, TILE)
    if FULL_TILES and not FP32:
        pairs = target.to(tl.pointer_type(tl.int32)) + tl.arange(0, TILE // 2)
        tl.store(pairs, words_joined(words, G))
    else:
        bits = eight_joined(words, lowers, FP32, G)
        if not FP32:
            bits = bits >> 16
        tl.store(target + index, bits.to(out.dtype.element_ty), mask=index < numel - first)


@triton.jit
def decode_sum_kernel(
    payload, out, sizes, offsets, sender_stride, payload_stride, out_stride, senders, scale,
    FP32: tl.constexpr, FULL_TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = scale times the sum over the senders, in their order, of one tile of one row; grid
    (tiles, rows).

    Args:
        payload: uint8 [senders, rows, payload_bytes].
        out: floating point [rows, values].
        sizes: ``reference.Sizes`` of a row.
        offsets: ``reference.Offsets`` of a payload.
        sender_stride: bytes from one sender's payloads to the next's.
        payload_stride: bytes from one row's payload to the next.
        out_stride: values from one row to the next.
        senders: at least 1.
        scale: fp32, multiplied with the fp32 sum before it is rounded.
        FP32: whether values have lower halves.
        FULL_TILES: rows are whole tiles.
        TILE: values in a tile.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    payload += row * payload_stride
    total = decoded_floats(payload, tile, sizes, offsets, FP32, FULL_TILES, TILE)
    for _ in tl.range(1, senders):
        payload += sender_stride
        total += decoded_floats(payload, tile, sizes, offsets, FP32, FULL_TILES, TILE)
    first = tile.to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    target = out + row * out_stride + first
    tl.store(
        target + index, (total * scale).to(out.dtype.element_ty), mask=index < sizes.numel - first
    )
