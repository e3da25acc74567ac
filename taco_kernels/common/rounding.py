"""Rounding to the grids of the formats, to nearest, and back."""

import triton
import triton.language as tl

# fp32 with this much added keeps an integer in its low mantissa bits, rounded half to even.
MAGIC = tl.constexpr(12582912.0)


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
def converted_to_fp8(v, FORMAT: tl.constexpr):
    """uint8 codes of fp32 v by PTX's conversion, four values at a time.

    On sm_89 Triton 3.6 takes fp16 on the way, towards zero: one code in 256 of e4m3 is then not the nearest.
    """
    kind: tl.constexpr = "e4m3x2" if FORMAT == "fp8-e4m3" else "e5m2x2"
    pair: tl.constexpr = "cvt.rn.satfinite." + kind + ".f32 "
    text: tl.constexpr = (
        "{ .reg .b16 lo, hi; " + pair + "lo, $2, $1; " + pair + "hi, $4, $3; mov.b32 $0, {lo, hi}; }"
    )
    return tl.inline_asm_elementwise(text, "=r,f,f,f,f", [v], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def nearest_fp8(v, C: tl.constexpr):
    """uint8 codes of |v| <= qmax, rounded to nearest."""
    if C.CONVERTS_BY_HALF:
        codes = converted_to_fp8(v, C.FORMAT)
    elif C.FORMAT == "fp8-e4m3":
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
def fixed_point(h, inverse, C: tl.constexpr):
    """int32[R, G] of an integer format: h * inverse plus 2^(BITS - 1), nothing for int8, in its lowest byte.

    The rest means nothing. Nothing can saturate: the product is from -2^(BITS - 1) to qmax, up to its
    rounding (reference.round_to_grid).
    """
    BIAS: tl.constexpr = 0 if C.BITS == 8 else 2 ** (C.BITS - 1)
    inverse = tl.broadcast_to(inverse[:, None], [C.R, C.G])
    return tl.fma(h, inverse, MAGIC + BIAS).to(tl.int32, bitcast=True)


@triton.jit
def quantize(h, inverse, C: tl.constexpr):
    """uint8 codes of h[R, G] * inverse[R] in an 8-bit format."""
    if C.FORMAT != "int8":
        codes = nearest_fp8(h * inverse[:, None], C)
    else:
        codes = fixed_point(h, inverse, C)
    return codes.to(tl.uint8)


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


@triton.jit
def grid_exponent(exponent, FLOOR: tl.constexpr):
    """The exponent that decides a row's power-of-two grid, see magnitudes.py."""
    return tl.minimum(tl.maximum(exponent, FLOOR), 254)


@triton.jit
def threshold_bits(thresholds, shard):
    """magnitudes.threshold_bits of a shard's threshold."""
    return tl.maximum(tl.load(thresholds + shard).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
