"""Integer codes to numbers, 32 bits at a time.

A byte, the code plus 2^(bits - 1), is set into the low mantissa bits of 1024 (fp16) or 2^23 (fp32), and what
is too much is taken off. fp16 values, for the tensor cores, come from PTX: two with one permutation.
"""

import triton
import triton.language as tl

from taco_kernels.triton.planes import beside_nibbles, joined, load_plane


@triton.constexpr_function
def assembly(bits):
    """PTX that turns 4 bytes of each input plane into fp16 numbers: one a byte (8 bits) or one a nibble.

    The rest of a 5- or 6-bit code comes beside_nibbles.
    """

    def numbers(first):
        return [
            f"prmt.b32 ${first}, t, 0x64646464, 0x4140;",
            f"prmt.b32 ${first + 1}, t, 0x64646464, 0x4342;",
            f"sub.f16x2 ${first}, ${first}, bias;",
            f"sub.f16x2 ${first + 1}, ${first + 1}, bias;",
        ]

    lines = ["{", ".reg .b32 t, t2, bias;", f"mov.b32 bias, {0x64006400 + (0x10001 << (bits - 1))};"]
    if bits == 8:
        lines += ["xor.b32 t, $2, 0x80808080;", *numbers(0)]
    else:
        mask = {4: 0, 5: 0x10101010, 6: 0x30303030}[bits]
        lines.append("and.b32 t, $4, 0x0F0F0F0F;")
        if mask:
            lines += ["shl.b32 t2, $5, 4;", f"and.b32 t2, t2, {mask};", "or.b32 t, t, t2;"]
        lines += numbers(0)
        lines += ["shr.u32 t, $4, 4;", "and.b32 t, t, 0x0F0F0F0F;"]
        if mask:
            lines += [f"and.b32 t2, $5, {mask};", "or.b32 t, t, t2;"]
        lines += numbers(2)
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def constraints(bits):
    """The registers that ``assembly`` writes and reads."""
    return {8: "=r,=r,r", 4: "=r,=r,=r,=r,r"}.get(bits, "=r,=r,=r,=r,r,r")


@triton.jit
def load_halves(wire, first, groups, C: tl.constexpr):
    """fp16[R, G]: values of groups first... of the chunk at wire, in an integer format. Not interpretable."""
    text: tl.constexpr = assembly(C.BITS)
    registers: tl.constexpr = constraints(C.BITS)
    if C.BITS == 8:
        codes = load_plane(wire, first, groups, C.G, C)
        values = tl.inline_asm_elementwise(text, registers, [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        planes = [beside_nibbles(load_plane(wire, first, groups, C.G // 2, C), 4, C)]
        if C.BITS > 4:
            plane = wire + tl.full((), C.G // 2, tl.int64) * groups
            plane = load_plane(plane, first, groups, C.G * (C.BITS - 4) // 8, C)
            planes = [planes[0], beside_nibbles(plane, C.BITS - 4, C)]
        kinds: tl.constexpr = (tl.float16, tl.float16)
        low, high = tl.inline_asm_elementwise(text, registers, planes, dtype=kinds, is_pure=True, pack=4)
        values = tl.reshape(joined(low, high, 8, C), [C.R, C.G])
    return values


@triton.jit
def load_words(plane, first, groups, P: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """int32[R, G / 16, n]: a plane of P bytes a group in words of ``dtype``; zeros beyond the last group."""
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    flat = tl.arange(0, C.R * P // SIZE)
    at = (plane + first.to(tl.int64) * P).to(tl.pointer_type(dtype)) + flat
    words = tl.load(at, mask=flat < (groups - first) * (P // SIZE), other=0).to(tl.int32)
    return tl.reshape(words, [C.R, C.G // 16, 16 * P // C.G // SIZE])


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
        plane = wire + tl.full((), C.G // 2, tl.int64) * groups
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
