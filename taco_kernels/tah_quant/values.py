"""What a tile becomes: sums, outlier, transform, grid and codes, [R, G] at a time.

Values leave the tensor cores twice, multiplied by the identity and by the Hadamard matrix, so that both lie
in the registers of one thread, 16 consecutive ones, without an exchange. Moving element i to i ^ p before a
Hadamard transform flips the sign of its output j where i & j has odd parity: that is done behind the product.
"""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import odd, transform, unshuffle
from taco_kernels.common.packing import alike, sixteen_joined, sixteen_of
from taco_kernels.tah_quant.rows import grid_of

LARGEST_SUM, SMALLEST_SUM = tl.constexpr(2.0**100), tl.constexpr(2.0**-100)


@triton.jit
def logarithm(magnitude, C: tl.constexpr):
    """log2 of fp32 that is not negative; something finite at 0."""
    if C.INTERPRET:
        result = tl.log2(tl.maximum(magnitude, 2.0**-126))
    else:  # an addition has twice the rate of a maximum, and changes nothing above 2^-102
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [magnitude + 2.0**-126],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def above(x, bound, C: tl.constexpr):
    """fp32: 1 where x > bound, else 0."""
    bound = tl.broadcast_to(bound, x.shape)
    if C.INTERPRET:
        result = (x > bound).to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            "set.gt.f32.f32 $0, $1, $2;", "=f,f,f", [x, bound], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def outlier_of(magnitude, C: tl.constexpr):
    """(chosen bool[R], pivot int32[R]): is the largest of magnitude[R, G] twice the second, and where is it.

    It then is alone above half of itself.
    """
    found = above(magnitude, 0.5 * tl.max(magnitude, axis=1)[:, None], C)
    block = tl.arange(0, C.G // 16)[None, :]
    column = tl.arange(0, C.G)[None, :] & 15
    # 256 for each one found, and its number among its thread's 16; the number of the thread's follows
    found = tl.reshape(found * (column.to(tl.float32) + 256.0), [C.R, C.G // 16, 16])
    number = (tl.sum(found, axis=2) + 8388608.0).to(tl.int32, bitcast=True) & 0x7FFFFF
    number = tl.sum(number + (number >> 8) * (16 * block), axis=1)
    return (number >> 8) == 1, number & (C.G - 1)


@triton.constexpr_function
def mixed_assembly():
    """PTX of ``mixed`` for 16 values: $0-15 = $16-31 * factor with a sign + $32-47 * kept."""
    pivot, block, factor, kept = "$48", "$49", "$50", "$51"
    lines = ["{", ".reg .f32 t;", ".reg .b32 b<4>, s<16>;"]
    lines += [
        f"shr.u32 b0, {pivot}, 4;",
        f"and.b32 b0, b0, {block};",
        "popc.b32 b0, b0;",
        "shl.b32 b0, b0, 31;",
    ]
    lines += [f"mov.b32 s0, {factor};", "xor.b32 s0, s0, b0;"]
    for bit in range(4):
        lines += [f"shl.b32 b{bit}, {pivot}, {31 - bit};", f"and.b32 b{bit}, b{bit}, 0x80000000;"]
        lines += [f"xor.b32 s{2**bit + k}, s{k}, b{bit};" for k in range(2**bit)]
    for k in range(16):
        lines += [f"mul.rn.f32 t, ${32 + k}, {kept};", f"fma.rn.f32 ${k}, ${16 + k}, s{k}, t;"]
    return "\n".join([*lines, "}"])


@triton.jit
def mixed(rotated, plain, pivot, chosen, C: tl.constexpr):
    """fp32[R, G]: plain, or rotated / sqrt(G) where chosen, negated where pivot & column has odd parity."""
    block = tl.broadcast_to(tl.arange(0, C.G // 16)[None, :], [C.R, C.G // 16])
    if C.INTERPRET:
        column = tl.arange(0, C.G)[None, :]
        rotated = tl.where(odd(pivot[:, None] & column) == 1, -rotated, rotated) * (1 / C.G**0.5)
        result = tl.where(chosen[:, None], rotated, plain)
    else:
        factor = tl.where(chosen, 1 / C.G**0.5, 0.0)
        kept = tl.where(chosen, 0.0, 1.0)
        text: tl.constexpr = mixed_assembly()
        registers: tl.constexpr = "=f," * 16 + "f," * 32 + "r,r,f,f"
        kinds: tl.constexpr = alike(tl.float32, 16)
        rest = (pivot[:, None], block, factor[:, None], kept[:, None])
        inputs = sixteen_of(rotated, C) + sixteen_of(plain, C) + rest
        a = tl.inline_asm_elementwise(text, registers, inputs, kinds, is_pure=True, pack=1)
        result = sixteen_joined(*a, C)
    return result


@triton.jit
def encoded(y, matrices, C: tl.constexpr):
    """Of tiles y[R, G]: their (chosen, pivot, total, weighted, pair) [R], and codes int32[R, G].

    A code lies at bit rows.SHIFT of its number: 2^(23 - SHIFT) + code + fraction in fp32.
    """
    matrix, unit = matrices
    if C.INTERPRET or not C.TRANSFORM:
        plain = y.to(tl.float32)
    else:  # exact; a NaN or an infinity becomes NaN in all of its tile, which has no other use
        plain = unshuffle(transform(y, unit, C), C)
    magnitude = tl.abs(plain)
    total = tl.sum(magnitude, axis=1)
    weighted = total
    if C.EXTRA > 0:
        weighted = tl.sum(magnitude * logarithm(magnitude, C), axis=1)
    chosen, pivot = total > LARGEST_SUM, total.to(tl.int32, bitcast=True)
    if C.TRANSFORM:
        chosen, pivot = outlier_of(magnitude, C)
        chosen = chosen & (total < LARGEST_SUM)
        rotated = unshuffle(transform(y, matrix, C), C)
        plain = mixed(rotated, plain, pivot, chosen, C)
    pair, inverse, offset = grid_of(tl.min(plain, axis=1), tl.max(plain, axis=1), total, C)
    inverse, offset = (
        tl.broadcast_to(inverse[:, None], plain.shape),
        tl.broadcast_to(offset[:, None], plain.shape),
    )
    codes = tl.fma(plain, inverse, offset).to(tl.int32, bitcast=True)
    return chosen, pivot, total, weighted, pair, codes
