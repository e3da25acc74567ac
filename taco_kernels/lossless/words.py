"""Device functions of the lossless kernels: a lane has a group, 8 values as 4 words of two 16-bit halves.

Four exponents, distances and codes are computed at once, as the bytes of a word. Two such words are a group:
bit 8 i of a mask says that byte i of the first is an escape, bit 8 i + 1 that of the second.
"""

import triton
import triton.language as tl

from taco_kernels.common.packing import four_joined, four_of

GROUP = tl.constexpr(8)
BLOCK_GROUPS = tl.constexpr(16)
ONES = tl.constexpr(0x01010101)
LOW_BITS, HIGH_BITS = tl.constexpr(0x7F7F7F7F), tl.constexpr(-0x7F7F7F80)  # of bytes: the lower 7, the 8th
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
        even, odd = tl.split(tl.reshape(take(x + at, at < left, WHOLE), [G, 2, 2, 2]))
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
def put(pointers, value, there, WHOLE: tl.constexpr):
    """Store, where there is anything, or everywhere."""
    if WHOLE:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=there)


@triton.jit
def take(pointers, there, WHOLE: tl.constexpr):
    """Load what there is, with zeros after it, or everything."""
    if WHOLE:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=there, other=0)
    return value


@triton.jit
def words_joined(w0, w1, w2, w3, G: tl.constexpr):
    """int32[4 G], those of each group one after the other."""
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
    largest = tl.maximum(tl.maximum(larger_of(u0), larger_of(u1)), tl.maximum(larger_of(u2), larger_of(u3)))
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
