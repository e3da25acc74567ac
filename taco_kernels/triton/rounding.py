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
def byte_of(words, K: tl.constexpr, AROUND: tl.constexpr, SELECT: tl.constexpr, C: tl.constexpr):
    """int32: byte K of each word in the place of a zero byte of the constant AROUND, in one instruction.

    SELECT is that of PTX's prmt for K = 0: digit i names byte i of the result, 4-7 one of AROUND, 0 byte K.
    """
    PLACE: tl.constexpr = zero_digit(SELECT)
    if C.INTERPRET:
        result = (((words >> (8 * K)).to(tl.int32) & 0xFF) << (8 * PLACE)) | AROUND
    else:
        text: tl.constexpr = permutation(AROUND, SELECT + (K << (4 * PLACE)))
        result = tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    return result


@triton.constexpr_function
def zero_digit(select):
    """Which hexadecimal digit of a selector is zero, the lowest being 0."""
    return f"{select:04x}"[::-1].index("0")


@triton.constexpr_function
def permutation(around, select):
    """PTX that picks bytes of the operand and a constant."""
    return f"prmt.b32 $0, $1, {around}, {select};"


@triton.jit
def spread_bytes(random, sender, group, AROUND: tl.constexpr, SELECT: tl.constexpr, C: tl.constexpr):
    """int32[R, G]: random bytes of the tile that starts with ``group``, each set into AROUND by byte_of.

    ``random`` is (key, stream, first block), int64 scalars; ``sender`` is added to the stream. 16 elements a
    Philox block.
    """
    key, stream, first = random
    block = first + group.to(tl.int64) * (C.G // 16) + tl.arange(0, C.R * C.G // 16)
    w0, w1, w2, w3 = philox(block, stream + sender, key)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    b0, b1 = byte_of(words, 0, AROUND, SELECT, C), byte_of(words, 1, AROUND, SELECT, C)
    b2, b3 = byte_of(words, 2, AROUND, SELECT, C), byte_of(words, 3, AROUND, SELECT, C)
    return tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), [C.R, C.G])


@triton.jit
def random_tile(random, sender, group, C: tl.constexpr):
    """int32[R, G] random bytes, 0..255; see spread_bytes."""
    return spread_bytes(random, sender, group, 0, 0x4440, C)


@triton.jit
def dither(random, sender, group, C: tl.constexpr):
    """fp32[R, G] in (-1/2, 1/2) that a decoder subtracts: (b - 127.5) / 256 for b of random_tile."""
    # the third byte of 1.0 holds b: 1 + b / 256 / 128
    bits = spread_bytes(random, sender, group, 0x3F800000, 0x7604, C)
    return tl.fma(bits.to(tl.float32, bitcast=True), 128.0, -(128 + 127.5 / 256))


@triton.jit
def dither16(random, sender, group, C: tl.constexpr):
    """fp16[R, G]: 16 times dither, exactly."""
    bits = spread_bytes(random, sender, group, 0x5400, 0x4450, C)  # fp16 64 + b / 16
    return (bits.to(tl.int16).to(tl.float16, bitcast=True) - 72.0) + 0.03125


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
def quantize(h, inverse, b, C: tl.constexpr):
    """Codes of h[R, G] * inverse[R]: uint8 (8-bit formats) or int32 plus 2^(BITS - 1). b: random bytes.

    The int32's bits from 8 on mean nothing. Nothing can saturate: the product is at most qmax, up to its
    rounding (reference.round_to_grid).
    """
    inverse = tl.broadcast_to(inverse[:, None], [C.R, C.G])
    if C.FORMAT == "fp8-e4m3":
        if C.HARDWARE_FP8 and C.NEAREST:
            codes = (h * inverse).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = fp8_codes(h * inverse, b, 3, 121, C).to(tl.uint8)
    elif C.FORMAT == "fp8-e5m2":
        if C.HARDWARE_FP8 and C.NEAREST:
            codes = (h * inverse).to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            codes = fp8_codes(h * inverse, b, 2, 113, C).to(tl.uint8)
    else:
        BIAS: tl.constexpr = 0 if C.BITS == 8 else 2 ** (C.BITS - 1)
        if C.NEAREST:
            codes = tl.fma(h, inverse, MAGIC + BIAS).to(tl.int32, bitcast=True)
        else:  # 8 bits behind the point
            codes = (tl.fma(h, inverse, MAGIC / 256 + BIAS).to(tl.int32, bitcast=True) + b) >> 8
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
