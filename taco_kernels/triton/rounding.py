"""Rounding to the grids of the formats, and the random numbers for it."""

import triton
import triton.language as tl

# fp32 with this much added keeps an integer in its low mantissa bits, rounded half to even.
MAGIC = tl.constexpr(12582912.0)


@triton.jit
def philox(block, stream, key):
    """Four uint32 tensors: Philox-4x32-10 of counter (block, stream) and key, int64; the last two scalar."""
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + stream.to(tl.uint32)
    c3 = tl.zeros_like(c0) + (stream >> 32).to(tl.uint32)
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    m0 = tl.full(c0.shape, 0xD2511F53, tl.uint64)
    m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint64)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * m0, c2.to(tl.uint64) * m1  # one 32 x 32 -> 64 bit multiplication each
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def random_tile(random, sender, group, C: tl.constexpr):
    """int32[R, G] of 0..255 for the tile that starts with ``group``, of stream plus ``sender``.

    ``random`` is (key, stream, first block), int64 scalars; 16 elements a Philox block.
    """
    key, stream, first = random
    block = first + group.to(tl.int64) * (C.G // 16) + tl.arange(0, C.R * C.G // 16)
    w0, w1, w2, w3 = philox(block, stream + sender, key)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    b = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24)) & 0xFF
    return tl.reshape(b, [C.R, C.G]).to(tl.int32)


@triton.jit
def dither(random, sender, group, C: tl.constexpr):
    """fp32[R, G] in [-1/2, 1/2) that a decoder subtracts: (b - 128) / 256 for b of random_tile."""
    b = random_tile(random, sender, group, C)
    # a byte at the top of the mantissa of 1.0 makes 1 + b / 256
    return ((b << 15) | 0x3F800000).to(tl.float32, bitcast=True) - 1.5


@triton.jit
def fp8_codes(v, b, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, C: tl.constexpr):
    """int32 codes of |v| <= qmax in integer arithmetic: n steps of the binade that |v| lies in.

    LOWEST is the biased fp32 exponent of the smallest normal number. Codes are consecutive integers, so n
    adds to the binade's first code also where it carries or where the number is subnormal.
    """
    bits = v.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, LOWEST)
    FRACTION: tl.constexpr = 0 if C.NEAREST else 8
    scale = ((254 + MANTISSA + FRACTION - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two
    n = (tl.abs(v) * scale + MAGIC).to(tl.int32, bitcast=True) & 0x3FFFFF
    if not C.NEAREST:
        n = (n + b) >> 8
    return (((exponent - LOWEST) << MANTISSA) + n) | ((bits >> 24) & 0x80)


@triton.jit
def quantize(v, b, C: tl.constexpr):
    """Codes of v in units of the step: uint8 (8-bit formats) or int32 plus 2^(BITS - 1). b: random bytes.

    The int32's bits from 22 on mean nothing; those between are zero.
    Nothing can saturate: v is at most qmax, up to the rounding of one product (reference.round_to_grid).
    """
    if C.FORMAT == "fp8-e4m3":
        if C.HARDWARE_FP8 and C.NEAREST:
            codes = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = fp8_codes(v, b, 3, 121, C).to(tl.uint8)
    elif C.FORMAT == "fp8-e5m2":
        if C.HARDWARE_FP8 and C.NEAREST:
            codes = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            codes = fp8_codes(v, b, 2, 113, C).to(tl.uint8)
    else:
        BIAS: tl.constexpr = 0 if C.BITS == 8 else 2 ** (C.BITS - 1)
        if C.NEAREST:
            codes = (v + (MAGIC + BIAS)).to(tl.int32, bitcast=True)
        else:
            v = v * 256.0
            if C.DITHER:
                v = v - 0.5
            codes = ((v + (MAGIC + 256 * BIAS)).to(tl.int32, bitcast=True) + b) >> 8
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
