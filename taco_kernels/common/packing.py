"""Integers to the bytes of a wire's planes, 16 elements at a time, in PTX: the last step of an encode.

The compiler takes every byte of a register on its own. Here a register is four bytes: permutations gather
them, and planes are put together four bytes at a time. planes.py says the same in Triton, for the
interpreter.

The 16 elements are four quarters, element i being 8 p + 4 q + k: p chooses the half of a byte of a plane of 4
bits, q the word, k the byte.
"""

import triton
import triton.language as tl

from taco_kernels.common.planes import behind, store_codes, unit_pointers
from taco_kernels.common.rounding import fixed_point, quantize

SELECT = 0xE4  # lop3: bits of the first operand where the third is set, else of the second


@triton.constexpr_function
def alike(kind, number):
    """The dtypes of as many results. From Triton 3.8 on a kernel cannot put them together itself."""
    return (kind,) * number


@triton.constexpr_function
def outputs_of(bits):
    """Registers that hold the planes of 16 codes."""
    return 2 if bits == 4 else 3


@triton.constexpr_function
def assembly(bits):
    """PTX from 16 numbers, whose lowest byte is the code, to the bytes of all planes of 4, 5 or 6 bits."""
    outputs = outputs_of(bits)
    lines = ["{", ".reg .b32 t, u, c0, c1, c2, c3;"]
    for number in range(4):  # of the quarter
        n0, n1, n2, n3 = (f"${outputs + 4 * number + k}" for k in range(4))
        lines += [f"prmt.b32 t, {n0}, {n1}, 0x40;", f"prmt.b32 u, {n2}, {n3}, 0x40;"]
        lines += [f"prmt.b32 c{number}, t, u, 0x5410;"]
    for q in range(2):  # below 16: a shift does not leave the byte
        if bits == 4:
            lines.append(f"mad.lo.u32 ${q}, c{2 + q}, 16, c{q};")
        else:
            lines += [f"shl.b32 t, c{2 + q}, 4;", f"lop3.b32 ${q}, c{q}, t, {0x0F0F0F0F}, {SELECT};"]
    if bits in (5, 6):  # what is above 4 bits of element 4 w + k: to bits 2 w and 2 w + 1 of byte k
        lines += [
            "shr.u32 t, c0, 4;",
            "shr.u32 u, c1, 2;",
            f"lop3.b32 t, t, u, {0x03030303}, {SELECT};",
            f"lop3.b32 t, t, c2, {0x0F0F0F0F}, {SELECT};",
            "shl.b32 u, c3, 2;",
            f"lop3.b32 $2, t, u, {0x3F3F3F3F}, {SELECT};",
        ]
    if bits == 5:  # element 4 w + k is bit 2 w + k / 2 of byte k % 2 of two
        lines += [f"and.b32 t, $2, {0x55555555};", "shr.u32 u, t, 15;", "or.b32 $2, t, u;"]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def constraints(bits):
    """The registers that ``assembly`` writes and reads."""
    return ",".join(["=r"] * outputs_of(bits) + ["r"] * 16)


@triton.jit
def four_of(x):
    """[..., 2, 2] as its four parts [...], in order."""
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def four_joined(x0, x1, x2, x3):
    """Inverse of four_of."""
    return tl.join(tl.join(x0, x2), tl.join(x1, x3))


@triton.jit
def sixteen_of(x, C: tl.constexpr):
    """x[R, G] as 16 tensors [R, G / 16]: the first, second, ... of every 16 elements."""
    x0, x1, x2, x3 = four_of(tl.reshape(x, [C.R, C.G // 16, 2, 2, 2, 2]))
    a0, a4, a8, a12 = four_of(x0)
    a1, a5, a9, a13 = four_of(x1)
    a2, a6, a10, a14 = four_of(x2)
    a3, a7, a11, a15 = four_of(x3)
    return a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15


@triton.jit
def sixteen_joined(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, C: tl.constexpr):
    """Inverse of sixteen_of."""
    x0, x1 = four_joined(a0, a4, a8, a12), four_joined(a1, a5, a9, a13)
    x2, x3 = four_joined(a2, a6, a10, a14), four_joined(a3, a7, a11, a15)
    return tl.reshape(four_joined(x0, x1, x2, x3), [C.R, C.G])


@triton.jit
def store_words(plane, words, first, groups, P: tl.constexpr, C: tl.constexpr):
    """Store the int32 or int16 words, R * P bytes in order, as groups first... of a plane of P bytes a group.

    Nothing beyond the last group.
    """
    SIZE: tl.constexpr = words.dtype.primitive_bitwidth // 8
    flat = tl.arange(0, C.R * P // SIZE)
    at = unit_pointers(plane, first, P, words.dtype, C)
    tl.store(at, tl.reshape(words, [C.R * P // SIZE]), mask=flat < (groups - first) * (P // SIZE))


@triton.jit
def store_groups(h, inverse, wire, first, groups, C: tl.constexpr):
    """Round h[R, G] * inverse[R] and store groups first... of the chunk at wire."""
    if C.BITS == 8:
        store_codes(quantize(h, inverse, C), wire, first, groups, C)
    else:
        store_integers(fixed_point(h, inverse, C), wire, first, groups, C)


@triton.jit
def store_integers(codes, wire, first, groups, C: tl.constexpr):
    """Store the lowest 4, 5 or 6 bits of int32[R, G] as groups first... of the chunk at wire."""
    if C.INTERPRET:
        store_codes(codes, wire, first, groups, C)
    else:
        text: tl.constexpr = assembly(C.BITS)
        registers: tl.constexpr = constraints(C.BITS)
        kinds: tl.constexpr = alike(tl.int32, outputs_of(C.BITS))
        inputs = sixteen_of(codes, C)
        result = tl.inline_asm_elementwise(text, registers, inputs, kinds, True, 1)
        store_words(wire, tl.join(result[0], result[1]), first, groups, C.G // 2, C)
        high = behind(wire, C.G // 2, groups, C)
        if C.BITS == 6:
            store_words(high, result[2], first, groups, C.G // 4, C)
        elif C.BITS == 5:
            store_words(high, result[2].to(tl.int16), first, groups, C.G // 8, C)
