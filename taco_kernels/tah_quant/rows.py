"""What is computed once a tile: zero point, step, and their places in the arithmetic of codes; matrices."""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import shuffled

SHIFT = tl.constexpr(16)
"""Where a code lies in an fp32 number that is a power of two more."""


@triton.jit
def identity(C: tl.constexpr, dtype: tl.constexpr):
    """dtype[POINT, POINT]: ones on the diagonal, columns in the order of ``shuffle``."""
    row, column = tl.arange(0, C.POINT)[:, None], tl.arange(0, C.POINT)[None, :]
    if C.POINT >= 64:
        column = shuffled(column)
    return tl.where(row == column, 1.0, 0.0).to(dtype)


@triton.jit
def round_down_fp16(x):
    """Bits, int32, of the largest fp16 that is not above x (fp32)."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -32767, bits + 1))
    return tl.where(half.to(tl.float32) > x, below, bits)


@triton.jit
def round_up_fp16(x):
    """Bits, int32, of the smallest fp16 that is not below x (fp32, not negative)."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(half.to(tl.float32) < x, bits + 1, bits)


# Divisions are products with a reciprocal and one step of Newton's; of an fp16 step it is correctly rounded,
# whatever the last bits of a GPU's approximation. Not finite tiles: 0 for their minimum and maximum makes
# zero point, step and factor 0; the step becomes NaN at the end.
GRID = tl.constexpr(
    """{
    .reg .pred p, q;
    .reg .b16 z, s;
    .reg .f32 zero, span, t, r, step;
    .reg .b32 k, n;
    setp.lt.f32 p, $5, 0f71800000;
    selp.f32 t, $3, 0f00000000, p;
    selp.f32 r, $4, 0f00000000, p;
    cvt.rm.f16.f32 z, t;
    cvt.f32.f16 zero, z;
    sub.rn.f32 span, r, zero;
    max.f32 span, span, 0f00000000;
    mul.rn.f32 t, span, $7;
    fma.rn.f32 r, t, $6, span;
    fma.rn.f32 t, r, $7, t;
    cvt.rp.f16.f32 s, t;
    cvt.f32.f16 step, s;
    rcp.approx.ftz.f32 t, step;
    neg.f32 step, step;
    fma.rn.f32 r, step, t, 0f3F800000;
    fma.rn.f32 t, r, t, t;
    setp.lt.f32 q, step, 0f00000000;
    selp.f32 t, t, 0f00000000, q;
    neg.f32 zero, zero;
    fma.rn.f32 $2, zero, t, $8;
    mov.f32 $1, t;
    mov.b32 k, {s, z};
    and.b32 n, k, 0xFFFF0000;
    or.b32 n, n, 0x00007E00;
    selp.b32 $0, k, n, p;
}"""
)


@triton.jit
def grid_of(low, high, total, C: tl.constexpr):
    """Grid between low and high, fp32[R], of tiles whose magnitudes add up to total.

    Returns: int32[R], step and zero point in fp16, the step in the lower half; the inverse of the step; and
    2^(23 - SHIFT) + 1/2 - zero / step.
    """
    LEVELS: tl.constexpr = C.LEVELS * 1.0
    START: tl.constexpr = 2.0 ** (23 - SHIFT) + 0.5
    if C.INTERPRET:
        fits = total < 2.0**100
        zero_bits = round_down_fp16(tl.where(fits, low, 0.0))
        zero = zero_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        span = tl.maximum(tl.where(fits, high, 0.0) - zero, 0.0)
        step_bits = round_up_fp16(tl.div_rn(span, tl.full([C.R], LEVELS, tl.float32)))
        step = step_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        inverse = tl.where(step > 0.0, 1.0 / tl.where(step > 0.0, step, 1.0), 0.0)
        offset = START - zero * inverse
        pair = (tl.where(fits, step_bits, 0x7E00) & 0xFFFF) | (zero_bits << 16)
    else:
        pair, inverse, offset = tl.inline_asm_elementwise(
            GRID,
            "=r,=f,=f,f,f,f,f,f,f",
            [low, high, total, -LEVELS, 1 / LEVELS, START],
            dtype=(tl.int32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return pair, inverse, offset
