"""The quadratic grid inside kernels; quadratic.py defines it."""

import triton
import triton.language as tl

from taco_kernels.common.rounding import MAGIC
from taco_kernels.common.unpacking import number
from taco_kernels.taco import quadratic

SIXTEENTHS = tl.constexpr(quadratic.SIXTEENTHS)
ONES = tl.constexpr(2.0**23)  # fp32 with this much added is an integer


@triton.jit
def value_of(u, UNIT: tl.constexpr, C: tl.constexpr):
    """UNIT^2 times the values of codes, from u, UNIT times those: exact, in fp16 where UNIT is 1."""
    return u * (tl.abs(u) + UNIT * (2 * C.BEND + 1))


@triton.jit
def nearest_codes(h, inverse, C: tl.constexpr):
    """int32[R, G]: codes of h[R, G] * inverse[R] plus 2^(BITS - 1), in the lowest bits. See fixed_point."""
    v = h * inverse[:, None]
    x = tl.abs(v) + (SIXTEENTHS + C.BEND * (C.BEND + 1))
    x = x - (SIXTEENTHS - 1.0 / 32)
    n = tl.sqrt(x) + (ONES - 0.5)  # the approximate root; rounds down, as no root is an integer
    u = n - (ONES + C.BEND)
    u = (u.to(tl.int32, bitcast=True) | (v.to(tl.int32, bitcast=True) & -0x80000000)).to(
        tl.float32, bitcast=True
    )
    return (u + (MAGIC + 2 ** (C.BITS - 1))).to(tl.int32, bitcast=True)


@triton.jit
def add_products(t0, t1, t2, t3, words, step, magic, C: tl.constexpr):
    """unpacking.add_products of this grid. Every second value is 256^2 times too large in its place."""
    step = tl.broadcast_to(step[:, None], [C.R, C.G // 4])
    small = step * (1.0 / 65536.0)
    t0 = tl.fma(value_of(number(words, magic, 0xFF, 1.0, C), 1.0, C), step, t0)
    t1 = tl.fma(value_of(number(words, magic, 0xFF00, 256.0, C), 256.0, C), small, t1)
    words = words >> 16
    t2 = tl.fma(value_of(number(words, magic, 0xFF, 1.0, C), 1.0, C), step, t2)
    t3 = tl.fma(value_of(number(words, magic, 0xFF00, 256.0, C), 256.0, C), small, t3)
    return t0, t1, t2, t3
