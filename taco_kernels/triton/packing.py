"""Numbers to the bytes of a wire's planes, 16 elements at a time, in PTX: the last step of an encode.

The compiler takes every byte of a register on its own. Here a register is four bytes or two halves: random
numbers are masked for all of them at once, permutations gather the codes' bytes, and planes are put together
four bytes at a time. planes.py says the same in Triton, for the interpreter.

The 16 elements are four quarters, element i being 8 p + 4 q + k: p chooses the half of a byte of a plane of 4
bits (and of a byte of random bits), q the word, k the byte.
"""

import triton
import triton.language as tl

from taco_kernels.triton.planes import store_codes
from taco_kernels.triton.rounding import fixed_point, quantize, scaled

SELECT = 0xE4  # lop3: bits of the first operand where the third is set, else of the second
FLIPPED = 0xAE  # lop3: bits of the second operand where the first is not set, and the third


@triton.constexpr_function
def _gather(target: str, numbers: list[str], byte: int) -> list[str]:
    """``target`` = byte number ``byte`` of four registers."""
    both = f"0x{4 + byte}{byte}"
    return [
        f"prmt.b32 t, {numbers[0]}, {numbers[1]}, {both};",
        f"prmt.b32 u, {numbers[2]}, {numbers[3]}, {both};",
        f"prmt.b32 {target}, t, u, 0x5410;",
    ]


@triton.constexpr_function
def _random_integers(numbers: list[str], word: str, p: int) -> list[str]:
    """Take 16 times their random nibbles off four fixed-point numbers: a dot product extracts and adds."""
    mask, times = (0x0F0F0F0F, 0xF0) if p == 0 else (0xF0F0F0F0, 0xFF)  # -16 and -1
    lines = [f"and.b32 t, {word}, {mask};"]
    return lines + [f"dp4a.u32.s32 n{k}, t, {times << 8 * k}, {number};" for k, number in enumerate(numbers)]


@triton.constexpr_function
def _random_fp8(target: str, numbers: list[str], word: str, p: int, e4m3: bool) -> list[str]:
    """``target`` = codes of four fp32 numbers, as fp16 in pairs 2 apart, like the nibbles of ``word``."""
    lines = []
    for pair, shift in enumerate(([4, -4], [0, -8])[p]):
        moved = {0: "mov.b32 t, {0};", 4: "shl.b32 t, {0}, 4;"}.get(shift, f"shr.u32 t, {{0}}, {-shift};")
        lines += [
            moved.format(word),
            f"lop3.b32 t, t, {0x00F000F0}, {0x00080008}, {FLIPPED};",  # 248 - 16 r
            f"cvt.rn.f16x2.f32 n{pair}, {numbers[pair + 2]}, {numbers[pair]};",
        ]
        if e4m3:  # twice the magnitude: the code to the upper byte, below the sign
            lines += [f"and.b32 u, n{pair}, {0x7FFF7FFF};", f"add.u32 n{pair}, n{pair}, u;"]
        lines.append(f"add.u32 n{pair}, n{pair}, t;")
    return [*lines, f"prmt.b32 {target}, n0, n1, 0x7351;"]


@triton.constexpr_function
def outputs_of(bits):
    """Registers that hold the planes of 16 codes."""
    return {8: 4, 4: 2}.get(bits, 3)


@triton.constexpr_function
def assembly(format, bits, nearest):
    """PTX from 16 numbers, and two registers of random bits unless nearest, to their bytes in all planes."""
    outputs = outputs_of(bits)
    lines = ["{", ".reg .b32 t, u, n0, n1, n2, n3, c0, c1, c2, c3;"]
    for p in range(2):
        for q in range(2):
            number = 2 * p + q  # of the quarter
            numbers = [f"${outputs + 4 * number + k}" for k in range(4)]
            target = f"${number}" if bits == 8 else f"c{number}"
            word = f"${outputs + 16 + q}"
            if nearest:
                lines += _gather(target, numbers, 0)
            elif format.startswith("fp8"):
                lines += _random_fp8(target, numbers, word, p, format == "fp8-e4m3")
            else:
                lines += [
                    *_random_integers(numbers, word, p),
                    *_gather(target, [f"n{k}" for k in range(4)], 1),
                ]
    if bits < 8:  # below 16: a shift does not leave the byte
        for q in range(2):
            if bits == 4:
                lines.append(f"mad.lo.u32 ${q}, c{2 + q}, 16, c{q};")
            else:
                lines += [
                    f"shl.b32 t, c{2 + q}, 4;",
                    f"lop3.b32 ${q}, c{q}, t, {0x0F0F0F0F}, {SELECT};",
                ]
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
        lines += [
            f"and.b32 t, $2, {0x55555555};",
            "shr.u32 u, t, 15;",
            "or.b32 $2, t, u;",
        ]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def constraints(format, bits, nearest):
    """The registers that ``assembly`` writes and reads."""
    kind = "f" if format.startswith("fp8") else "r"
    return ",".join(["=r"] * outputs_of(bits) + [kind] * 16 + ([] if nearest else ["r"] * 2))


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
    at = (plane + first.to(tl.int64) * P).to(tl.pointer_type(words.dtype)) + flat
    tl.store(at, tl.reshape(words, [C.R * P // SIZE]), mask=flat < (groups - first) * (P // SIZE))


@triton.jit
def store_groups(h, inverse, words, wire, first, groups, C: tl.constexpr):
    """Round h[R, G] * inverse[R] and store groups first... of the chunk at wire.

    ``words``: of random_words, anything when rounding to nearest.
    """
    FLOAT: tl.constexpr = C.BITS == 8 and C.FORMAT != "int8"
    if C.INTERPRET or (C.NEAREST and C.BITS == 8):
        store_codes(quantize(h, inverse, words, C), wire, first, groups, C)
    else:
        if FLOAT:
            inputs = sixteen_of(scaled(h, inverse, C), C)
        else:
            inputs = sixteen_of(fixed_point(h, inverse, C), C)
        if not C.NEAREST:
            inputs = inputs + tl.split(words)
        text: tl.constexpr = assembly(C.FORMAT, C.BITS, C.NEAREST)
        registers: tl.constexpr = constraints(C.FORMAT, C.BITS, C.NEAREST)
        kinds: tl.constexpr = (tl.int32,) * outputs_of(C.BITS)
        result = tl.inline_asm_elementwise(text, registers, inputs, kinds, True, 1)
        if C.BITS == 8:
            codes = four_joined(result[0], result[1], result[2], result[3])
            store_words(wire, codes, first, groups, C.G, C)
        else:
            store_words(wire, tl.join(result[0], result[1]), first, groups, C.G // 2, C)
            high = wire + tl.full((), C.G // 2, tl.int64) * groups
            if C.BITS == 6:
                store_words(high, result[2], first, groups, C.G // 4, C)
            elif C.BITS == 5:
                store_words(high, result[2].to(tl.int16), first, groups, C.G // 8, C)
