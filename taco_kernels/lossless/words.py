"""Device functions of the lossless kernels: a lane has a group, 8 values as 4 words of two 16-bit halves.

The escapes of a group are counted without a loop: bit 3 i of a mask says that value i is one.
"""

import triton
import triton.language as tl

from taco_kernels.common.packing import four_joined, four_of

GROUP = tl.constexpr(8)
BLOCK_GROUPS = tl.constexpr(16)
ONES = tl.constexpr(0o11111111)
BYTES = tl.constexpr(0x00FF00FF)
FIRST, SECOND = tl.constexpr(0xFFFF), tl.constexpr(-65536)


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
    """Load what there is, with zeros behind it, or everything."""
    if WHOLE:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=there, other=0)
    return value


@triton.jit
def words_joined(w0, w1, w2, w3, G: tl.constexpr):
    """int32[4 G], those of each group one behind the other."""
    return tl.reshape(four_joined(w0, w1, w2, w3), [4 * G])


@triton.jit
def high_bytes(w):
    """int32 with sign and mantissa of two values in bytes 0 and 2."""
    return ((w >> 8) & 0x00800080) | (w & 0x007F007F)


@triton.jit
def with_exponents(bytes, exponents):
    """Inverse of high_bytes: the two values, whose exponents are in bytes 0 and 2."""
    return bytes + (bytes & 0x00800080) * 255 + (exponents << 7)


@triton.jit
def bases_of(largest, G: tl.constexpr):
    """int32[G / 16] of the groups' largest exponents [G]."""
    even, odd = tl.split(tl.max(tl.reshape(largest, [G // BLOCK_GROUPS, BLOCK_GROUPS // 2, 2]), axis=1))
    return tl.minimum(even, odd)


@triton.jit
def of_groups(base, G: tl.constexpr):
    """int32[G] of what there is one of a block, [G / 16]."""
    return tl.reshape(tl.broadcast_to(base[:, None], [G // BLOCK_GROUPS, BLOCK_GROUPS]), [G])


@triton.jit
def codes_of(exponents, base, AT: tl.constexpr):
    """Codes of two exponents, in bytes 0 and 2, from bit AT on."""
    first = tl.minimum((base - (exponents & FIRST)).to(tl.uint32, bitcast=True), 7).to(tl.int32, bitcast=True)
    second = tl.minimum((base - (exponents >> 16)).to(tl.uint32, bitcast=True), 7).to(tl.int32, bitcast=True)
    return (first << AT) | (second << (AT + 3))


@triton.jit
def exponents_of(word, base, AT: tl.constexpr):
    """Inverse of codes_of: in bytes 0 and 2; 7 below the base for an escape."""
    codes = ((word >> AT) & 7) | (((word >> (AT + 3)) & 7) << 16)
    return ((base * 0x10001) | 0x01000100) - codes & BYTES


@triton.jit
def escape_mask(word):
    """Bit 3 i: whether value i of a group is an escape; and how many are."""
    mask = word & (word >> 1) & (word >> 2) & ONES
    seven = (((mask << 3) * ONES) >> 21) & 7  # octal digit 7 of the product: the sum of seven bits
    return mask, seven + (mask >> 21)


@triton.jit
def exponent_at(bit, t0, t1, t2, t3):
    """The exponent of the value whose bit of the mask is ``bit``, from four times two."""
    pair = tl.where(bit < 0o10000, tl.where(bit < 0o100, t0, t1), tl.where(bit < 0o1000000, t2, t3))
    return tl.where((bit & 0o10101010) != 0, pair >> 16, pair & FIRST)


@triton.jit
def near_value(exponent, base):
    """What an escape is in 4 bits, and whether it fits them."""
    from_below = (base - exponent + 2).to(tl.uint32, bitcast=True)  # 0, 1, then 9 to 21; large below 0
    value = tl.minimum(from_below, from_below - 7).to(tl.int32, bitcast=True)
    fits = value.to(tl.uint32, bitcast=True) < 15
    return tl.where(exponent == 0, 15, value), fits | (exponent == 0)


@triton.jit
def exponent_of_value(value, base, far):
    """Inverse of near_value; in a far tile the value itself."""
    near = tl.where(value == 15, 0, base - value + tl.where(value < 2, 2, -5))
    return tl.where(far != 0, value, near)


@triton.jit
def patched(w, x, bit, BELOW: tl.constexpr, FROM: tl.constexpr):
    """w, with x exclusively ored where the mask's bit lies in its range."""
    return w ^ tl.where((bit >= FROM) & (bit < BELOW), x, 0)
