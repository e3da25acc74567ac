"""Integer codes to numbers, 32 bits at a time.

A byte, the code plus 2^(bits - 1), is set into the low mantissa bits of 1024 (fp16) or 2^23 (fp32), and what
is too much is taken off. fp16 values, for the tensor cores, come from PTX: two with one permutation.
``bend`` makes them the values u (|u| + 2 bend + 1) of codes u, see taco/quadratic.py.
"""

import triton
import triton.language as tl

from taco_kernels.common.packing import SELECT, alike, four_of, sixteen_joined
from taco_kernels.common.planes import behind, unit_pointers

MASKED_OR = 0xEA  # lop3: bits of both the first two operands, and of the third


@triton.constexpr_function
def inputs_of(bits):
    """Registers that hold the planes of 16 codes."""
    return {8: 4, 4: 2}.get(bits, 3)


@triton.constexpr_function
def two_halves(number):
    """The bits of two fp16 numbers, both this integer from 1 to 2047."""
    exponent = number.bit_length() - 1
    return 0x10001 * ((exponent + 15 << 10) + ((number << 10 - exponent) - 1024))


@triton.constexpr_function
def assembly(bits, bend=0):
    """PTX from 16 codes to 16 fp16 numbers."""
    lines = ["{", ".reg .b32 t, u, v, ones;", f"mov.b32 ones, {0x64646464};"]
    if bend:
        lines += [".reg .b32 x, zero, slope;", f"mov.b32 zero, {two_halves(1024 + 2 ** (bits - 1))};"]
        lines += [f"mov.b32 slope, {two_halves(2 * bend + 1)};"]
    keep = {5: 0x01010101, 6: 0x03030303}.get(bits)
    if bits == 5:  # bits 2 w and 2 w + 1 of two bytes, of elements 2 apart: to bits 2 w of four
        lines += ["shl.b32 v, $18, 15;", f"lop3.b32 v, $18, v, {0x0000FFFF}, {SELECT};"]
    elif bits == 6:
        lines.append("mov.b32 v, $18;")
    for p in range(2):
        for q in range(2):
            number = 2 * p + q
            if bits == 8:
                lines.append(f"xor.b32 t, ${16 + number}, {0x80808080};")
            else:
                lines.append(f"shr.u32 t, ${16 + q}, {4 * p};")
                lines.append(f"and.b32 t, t, {0x0F0F0F0F};")
            if keep:
                shift = 4 - 2 * number
                lines.append(f"shl.b32 u, v, {shift};" if shift >= 0 else f"shr.u32 u, v, {-shift};")
                lines.append(f"lop3.b32 t, u, {keep << 4}, t, {MASKED_OR};")
            for pair, order in enumerate(("0x5140", "0x7362")):
                lines.append(f"prmt.b32 u, t, ones, {order};")
                if bend:
                    lines += ["sub.rn.f16x2 u, u, zero;", "abs.f16x2 x, u;"]
                    lines += ["add.rn.f16x2 x, x, slope;", "mul.rn.f16x2 u, u, x;"]
                first = 4 * number + 2 * pair
                lines.append(f"mov.b32 {{${first}, ${first + 1}}}, u;")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def constraints(bits):
    """The registers that ``assembly`` writes and reads."""
    return ",".join(["=h"] * 16 + ["r"] * inputs_of(bits))


@triton.constexpr_function
def offset(bits, bend=0):
    """What load_halves gives more than the code's value."""
    return 0 if bend else 1024 + 2 ** (bits - 1)


@triton.jit
def load_words(plane, first, groups, P: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """int32[R, G / 16, n]: a plane of P bytes a group in words of ``dtype``; zeros beyond the last group."""
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    flat = tl.arange(0, C.R * P // SIZE)
    at = unit_pointers(plane, first, P, dtype, C)
    words = tl.load(at, mask=flat < (groups - first) * (P // SIZE), other=0).to(tl.int32)
    return tl.reshape(words, [C.R, C.G // 16, 16 * P // C.G // SIZE])


@triton.jit
def load_halves(wire, first, groups, C: tl.constexpr):
    """fp16[R, G]: integers for the codes of groups first... of the chunk at wire, see ``assembly``.

    They are too large by ``offset``, which is cheaper taken off the Hadamard transform: that of a constant is
    zero but in its first element. Not interpretable.
    """
    text: tl.constexpr = assembly(C.BITS, C.BEND)
    registers: tl.constexpr = constraints(C.BITS)
    kinds: tl.constexpr = alike(tl.float16, 16)
    if C.BITS == 8:
        codes = load_words(wire, first, groups, C.G, tl.int32, C)
        inputs = four_of(tl.reshape(codes, [C.R, C.G // 16, 2, 2]))
    else:
        inputs = tl.split(load_words(wire, first, groups, C.G // 2, tl.int32, C))
        high = behind(wire, C.G // 2, groups, C)
        if C.BITS == 6:
            rest = load_words(high, first, groups, C.G // 4, tl.int32, C)
            inputs += (tl.reshape(rest, [C.R, C.G // 16]),)
        elif C.BITS == 5:
            rest = load_words(high, first, groups, C.G // 8, tl.int16, C)
            inputs += (tl.reshape(rest, [C.R, C.G // 16]),)
    return sixteen_joined(*tl.inline_asm_elementwise(text, registers, inputs, kinds, True, 1), C)


@triton.jit
def low_nibbles(words, C: tl.constexpr):
    """words & 0x0F0F0F0F; as PTX, or the compiler takes every nibble from its word on its own instead."""
    if C.INTERPRET:
        words = words & 0x0F0F0F0F
    else:
        words = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    return words


@triton.jit
def load_code_words(wire, first, groups, C: tl.constexpr):
    """int32[R, G / 4]: codes plus 2^(BITS - 1) of an integer format, four in each word, in order."""
    if C.BITS == 8:
        words = load_words(wire, first, groups, C.G, tl.int32, C) ^ -2139062144  # 0x80808080
    else:  # nibble q of byte k of word h is element 8q + 4h + k of 16
        nibbles = load_words(wire, first, groups, C.G // 2, tl.int32, C)
        low, high = low_nibbles(nibbles, C), low_nibbles(nibbles >> 4, C)
        plane = behind(wire, C.G // 2, groups, C)
        h = tl.arange(0, 2)[None, None, :]
        if C.BITS == 6:  # two bits of that element are 2(2q + h) and the next of byte k
            rest = load_words(plane, first, groups, C.G // 4, tl.int32, C) >> (2 * h)
            low, high = low | ((rest & 0x03030303) << 4), high | (rest & 0x30303030)
        elif C.BITS == 5:  # its bit is 4q + 2h + k // 2 of byte k % 2
            rest = load_words(plane, first, groups, C.G // 8, tl.int16, C)
            rest = ((rest & 0xFFFF) | ((rest >> 1) << 16)) >> (2 * h)
            low, high = low | ((rest & 0x01010101) << 4), high | (rest & 0x10101010)
        words = tl.permute(tl.join(low, high), [0, 1, 3, 2])
    return tl.reshape(words, [C.R, C.G // 4])


@triton.jit
def magic_bits(groups):
    """Bits of 2^23 in fp32, in a way that the compiler does not know them.

    Known, they would be an immediate operand, of which an instruction takes only one: masking a byte and
    setting it into them would be two instructions.
    """
    return 0x4B000000 | (groups >> 31)


@triton.jit
def number(word, magic, MASK: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr):
    """fp32: the code under MASK, whose lowest bit is worth UNIT, times UNIT."""
    bits = (word & MASK) | magic
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + UNIT * 2.0 ** (C.BITS - 1))


@triton.jit
def add_products(t0, t1, t2, t3, words, step, magic, C: tl.constexpr):
    """t_k + q_k * step for the four codes of each word, each rounded once; all fp32[R, G / 4].

    Every second code stays where it is in its word, is 256 times too large, and so takes step / 256.
    """
    step = tl.broadcast_to(step[:, None], [C.R, C.G // 4])
    small = step * (1.0 / 256.0)
    t0 = tl.fma(number(words, magic, 0xFF, 1.0, C), step, t0)
    t1 = tl.fma(number(words, magic, 0xFF00, 256.0, C), small, t1)
    words = words >> 16
    t2 = tl.fma(number(words, magic, 0xFF, 1.0, C), step, t2)
    t3 = tl.fma(number(words, magic, 0xFF00, 256.0, C), small, t3)
    return t0, t1, t2, t3


@triton.jit
def load_singles(wire, first, groups, C: tl.constexpr):
    """fp32[R, G]: values of groups first... of the chunk at wire, in an integer format."""
    words = load_code_words(wire, first, groups, C)
    bytes = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
    return number(tl.reshape(bytes, [C.R, C.G]), magic_bits(groups), 0xFF, 1.0, C)
