"""Rounding to the grids of the formats, and the random numbers for it."""

import triton
import triton.language as tl

# fp32 with this much added keeps an integer in its low mantissa bits, rounded half to even.
MAGIC = tl.constexpr(12582912.0)


@triton.jit
def philox_words(c0, c1, c2, c3, key):
    """Four uint32 tensors: Philox-4x32-7 of the counter's words, uint32, and the int64 scalar key.

    Words that are scalars stay so as long as they can: with one tensor among them the first two rounds
    multiply half as much.
    """
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        # one 32 x 32 -> 64 bit multiplication each
        p0 = c0.to(tl.uint64) * tl.full(c0.shape, 0xD2511F53, tl.uint64)
        p1 = c2.to(tl.uint64) * tl.full(c2.shape, 0xCD9E8D57, tl.uint64)
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ (c1 ^ k0), (p0 >> 32).to(tl.uint32) ^ (c3 ^ k1)
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def philox(counter, stream, key):
    """philox_words of the counter (int64 tensor ``counter``, int64 scalar ``stream``)."""
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    return philox_words(low, high, stream.to(tl.uint32), (stream >> 32).to(tl.uint32), key)


@triton.jit
def random_words(random, sender, group, C: tl.constexpr):
    """int32[R, G / 16, 2]: random bits of the tile that starts with ``group``, 4 an element (layout.Stream).

    ``random`` is (key, stream, first), int64 scalars, ``first`` counting 16 elements; ``sender`` is added to
    the stream. Element i of 16 has its bits in word i // 4 % 2, byte i % 4, from bit i // 8 * 4 on.
    """
    key, stream, first = random
    stream += sender
    first += group.to(tl.int64) * (C.G // 16)
    zero = tl.full((), 0, tl.uint32)
    low, high = stream.to(tl.uint32), (stream >> 32).to(tl.uint32)
    if C.G >= 128:
        block = (first >> 1).to(tl.uint32) + tl.arange(0, C.R * C.G // 32).to(tl.uint32)
        w0, w1, w2, w3 = philox_words(block, zero, low, high, key)
        # [..., sixteen of 64, half of 128, word of the half]; then the half goes first
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [C.R, C.G // 128, 4, 2, 2])
        words = tl.permute(words, [0, 1, 3, 2, 4])
    else:  # both halves of a block lie in different groups
        run = first + tl.arange(0, C.R * C.G // 16)
        block = ((run >> 3 << 2) + (run & 3)).to(tl.uint32)
        w0, w1, w2, w3 = philox_words(block, zero, low, high, key)
        half = (run & 4) != 0
        words = tl.join(tl.where(half, w2, w0), tl.where(half, w3, w1))
    return tl.reshape(words, [C.R, C.G // 16, 2]).to(tl.int32, bitcast=True)


@triton.jit
def nibbles(words, C: tl.constexpr):
    """int32[R, G] of 0..15 from random_words."""
    shift = 4 * tl.arange(0, 2)[:, None, None] + 8 * tl.arange(0, 4)[None, None, :]
    parts = tl.reshape(words, [C.R, C.G // 16, 1, 2, 1]) >> shift[None, None, :, :, :]
    return tl.reshape(parts & 15, [C.R, C.G])


@triton.jit
def dither(words, C: tl.constexpr):
    """fp32[R, G] in (-1/2, 1/2) that a decoder adds: (r - 7.5) / 16 for r of nibbles."""
    return (nibbles(words, C).to(tl.float32) - 7.5) * 0.0625


@triton.jit
def fp8_codes(v, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """int32 codes of |v| <= qmax in integer arithmetic: n steps of the binade that |v| lies in.

    LOWEST is the biased fp32 exponent of the smallest normal number. Codes are consecutive integers, so n
    adds to the binade's first code also where it carries or where the number is subnormal.
    """
    bits = v.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, LOWEST)
    scale = ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two
    n = (tl.abs(v) * scale + MAGIC).to(tl.int32, bitcast=True) & 0x3FFFFF
    return (((exponent - LOWEST) << MANTISSA) + n) | ((bits >> 24) & 0x80)


@triton.jit
def nearest_fp8(v, C: tl.constexpr):
    """uint8 codes of |v| <= qmax, rounded to nearest."""
    if C.FORMAT == "fp8-e4m3":
        if C.HARDWARE_FP8:
            codes = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = fp8_codes(v, 3, 121).to(tl.uint8)
    else:
        if C.HARDWARE_FP8:
            codes = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            codes = fp8_codes(v, 2, 113).to(tl.uint8)
    return codes


@triton.jit
def scaled(h, inverse, C: tl.constexpr):
    """h[R, G] * inverse[R] as random rounding takes it: 2^-8 of it for e4m3 (reference.round_to_grid)."""
    if C.FORMAT == "fp8-e4m3" and not C.NEAREST:
        inverse = inverse * 0.00390625
    return h * inverse[:, None]


@triton.jit
def fixed_point(h, inverse, C: tl.constexpr):
    """int32[R, G] of an integer format: h * inverse in fixed point plus 2^(BITS - 1), nothing for int8.

    To nearest the code is byte 0; else it is byte 1, once 16 times a random nibble is taken off. The rest
    means nothing. Nothing can saturate: the product is from -2^(BITS - 1) to qmax, up to
    its rounding (reference.round_to_grid).
    """
    BIAS: tl.constexpr = 0 if C.BITS == 8 else 2 ** (C.BITS - 1)
    inverse = tl.broadcast_to(inverse[:, None], [C.R, C.G])
    if C.NEAREST:
        number = tl.fma(h, inverse, MAGIC + BIAS)
    else:
        number = tl.fma(h, inverse, MAGIC / 256 + BIAS + 248 / 256)
    return number.to(tl.int32, bitcast=True)


@triton.jit
def quantize(h, inverse, words, C: tl.constexpr):
    """Codes of h[R, G] * inverse[R]: uint8 (8-bit formats) or int32, whose bits from 8 on mean nothing.

    packing.store_groups does the same with fewer instructions; the interpreter comes this way.
    """
    if C.NEAREST:
        if C.BITS == 8 and C.FORMAT != "int8":
            codes = nearest_fp8(scaled(h, inverse, C), C)
        else:
            codes = fixed_point(h, inverse, C)
    elif C.BITS == 8 and C.FORMAT != "int8":
        bits = scaled(h, inverse, C).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        magnitude = bits & 0x7FFF
        if C.FORMAT == "fp8-e4m3":
            magnitude = magnitude << 1
        codes = ((magnitude + 248 - 16 * nibbles(words, C)) >> 8) | ((bits >> 8) & 0x80)
    else:
        codes = (fixed_point(h, inverse, C) - 16 * nibbles(words, C)) >> 8
    if C.BITS == 8:
        codes = codes.to(tl.uint8)
    return codes


@triton.jit
def code_values(codes, dtype: tl.constexpr, C: tl.constexpr):
    """Values of uint8 codes in dtype: fp16, which holds every format exactly, or fp32."""
    if C.FORMAT == "fp8-e4m3":
        if C.HARDWARE_FP8:
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            bits = codes.to(tl.uint16)
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # fp16, whose exponent bias is larger by 8
            values = half.to(tl.float16, bitcast=True) * 256.0
    elif C.FORMAT == "fp8-e5m2":
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        # 1024 + c in fp16 has c in its low mantissa bits
        biased = codes ^ 0x80 if C.BITS == 8 else codes
        values = (biased.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + 2.0 ** (C.BITS - 1))
    return values.to(dtype)
