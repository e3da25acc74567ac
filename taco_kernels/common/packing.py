"""Integers to the bytes of a wire's planes and back, and rounding to the grids of the formats.

In Triton for the interpreter and for fp8, and in PTX, 16 elements or 32 bits at a time: the compiler takes
every byte of a register on its own. In PTX a register is four bytes: permutations gather them, and planes are
put together four bytes at a time. The 16 elements are four quarters, element i being 8 p + 4 q + k: p chooses
the half of a byte of a plane of 4 bits, q the word, k the byte.

To decode, a byte, the code plus 2^(bits - 1), is set into the low mantissa bits of 1024 (fp16) or 2^23
(fp32), and what is too much is subtracted. ``bend`` makes the values u (|u| + 2 bend + 1) of codes u
(taco/reference.py).
"""

import triton
import triton.language as tl

# fp32 with this much added keeps an integer in its low mantissa bits, rounded half to even.
MAGIC = tl.constexpr(12582912.0)


@triton.jit
def fp8_codes(v, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """int32 codes of |v| <= qmax in integer arithmetic, as in reference.round_to_grid: n steps of the binade
    that |v| lies in. LOWEST is the biased fp32 exponent of the smallest normal number."""
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
        "{ .reg .b16 lo, hi; "
        + pair
        + "lo, $2, $1; "
        + pair
        + "hi, $4, $3; mov.b32 $0, {lo, hi}; }"
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
    """int32[R, G] of an integer format: h * inverse plus 2^(BITS - 1), nothing for int8, in its lowest byte;
    the other bits mean nothing. Nothing can saturate (reference.round_to_grid)."""
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
            half = ((bits & 0x80) << 8) | (
                (bits & 0x7F) << 7
            )  # fp16, whose exponent bias is larger by 8
            values = half.to(tl.float16, bitcast=True) * 256.0
    elif C.FORMAT == "fp8-e5m2":
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        # 1024 + c in fp16 has c in its low mantissa bits
        biased = codes ^ 0x80 if C.BITS == 8 else codes
        values = (biased.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (
            1024.0 + 2.0 ** (C.BITS - 1)
        )
    return values.to(dtype)


@triton.jit
def after_plane(wire, BYTES: tl.constexpr, groups, C: tl.constexpr):
    """Pointer to what follows BYTES for each group of a chunk.

    ``groups`` are a chunk's, or with C.ROW those up to the tile's last, which begins with a chunk; chunks
    then have C.ROW each and lie C.STRIDE bytes apart.
    """
    if C.ROW:
        at = wire + BYTES * C.ROW
    else:
        at = wire + tl.full((), BYTES, tl.int64) * groups
    return at


@triton.jit
def across_chunks(first, N: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr):
    """int64[R * N]: places of N units of SIZE bytes a group, in units, of groups first... with C.ROW."""
    flat = tl.arange(0, C.R * N)
    chunk = (first // C.ROW).to(tl.int64) + flat // (C.ROW * N)
    return chunk * (C.STRIDE // SIZE) + flat % (C.ROW * N)


@triton.jit
def unit_pointers(plane, first, P: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """Pointers [R * P / SIZE] to the units of ``dtype`` of groups first... of a plane of P bytes a group."""
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    if C.ROW:
        at = plane.to(tl.pointer_type(dtype)) + across_chunks(first, P // SIZE, SIZE, C)
    else:
        at = (plane + first.to(tl.int64) * P).to(tl.pointer_type(dtype)) + tl.arange(
            0, C.R * P // SIZE
        )
    return at


@triton.jit
def units_left(first, groups, N: tl.constexpr, C: tl.constexpr):
    """int32: units, N a group, from group ``first`` to the last one, but no more than a tile has.

    The product is of at most R groups. Of all that are left, 2^24 and more of 128 bytes, it would pass 2^31.
    """
    return tl.minimum(groups - first, C.R) * N


@triton.jit
def store_plane(plane, value, first, groups, P: tl.constexpr, C: tl.constexpr):
    """Store uint8[R, P] as groups first... of a plane of P bytes a group; nothing beyond the last group."""
    inside = tl.arange(0, C.R * P) < units_left(first, groups, P, C)
    at = unit_pointers(plane, first, P, tl.uint8, C)
    tl.store(at, tl.reshape(value, [C.R * P]), mask=inside)


@triton.jit
def load_plane(plane, first, groups, P: tl.constexpr, C: tl.constexpr):
    """uint8[R, P]: groups first... of a plane of P bytes a group; zeros beyond the last group."""
    inside = tl.arange(0, C.R * P) < units_left(first, groups, P, C)
    at = unit_pointers(plane, first, P, tl.uint8, C)
    return tl.reshape(tl.load(at, mask=inside, other=0), [C.R, P])


@triton.jit
def pack(c, BITS: tl.constexpr, C: tl.constexpr):
    """uint8[R, G * BITS / 8] of int32 codes [R, G] below 2^BITS (4, 2 or 1), bits from 8 on ignored."""
    low, high = tl.split(tl.permute(tl.reshape(c, [C.R, C.G // 16, 2, 8]), [0, 1, 3, 2]))
    c = low | (high << 4)
    if BITS < 4:
        low, high = tl.split(tl.permute(tl.reshape(c, [C.R, C.G // 16, 2, 4]), [0, 1, 3, 2]))
        c = low | (high << 2)
    if BITS < 2:
        low, high = tl.split(tl.permute(tl.reshape(c, [C.R, C.G // 16, 2, 2]), [0, 1, 3, 2]))
        c = low | (high << 1)
    return tl.reshape(c, [C.R, C.G * BITS // 8]).to(tl.uint8)


@triton.jit
def joined(low, high, J: tl.constexpr, C: tl.constexpr):
    """[R, G / 16, 2J]: low, then high, [R, G / 16, J] each."""
    return tl.reshape(tl.permute(tl.join(low, high), [0, 1, 3, 2]), [C.R, C.G // 16, 2 * J])


@triton.jit
def unpack(plane, BITS: tl.constexpr, C: tl.constexpr):
    """Inverse of pack: uint8[R, G]."""
    c = tl.reshape(plane, [C.R, C.G // 16, 2 * BITS])
    if BITS < 2:
        c = joined(c, c >> 1, 2, C)
    if BITS < 4:
        c = joined(c, c >> 2, 4, C)
    return tl.reshape(joined(c, c >> 4, 8, C) & (2**BITS - 1), [C.R, C.G])


@triton.jit
def store_codes(codes, wire, first, groups, C: tl.constexpr):
    """Store codes[R, G] as groups first... of the chunk at wire."""
    if C.BITS == 8:
        store_plane(wire, codes, first, groups, C.G, C)
    else:
        low = codes & 15 if C.BITS > 4 else codes
        store_plane(wire, pack(low, 4, C), first, groups, C.G // 2, C)
        if C.BITS > 4:
            codes = (codes >> 4) & (2 ** (C.BITS - 4) - 1)
            high = after_plane(wire, C.G // 2, groups, C)
            store_plane(high, pack(codes, C.BITS - 4, C), first, groups, C.G * (C.BITS - 4) // 8, C)


@triton.jit
def load_codes(wire, first, groups, C: tl.constexpr):
    """uint8[R, G] codes of groups first... of the chunk at wire."""
    if C.BITS == 8:
        codes = load_plane(wire, first, groups, C.G, C)
    else:
        codes = unpack(load_plane(wire, first, groups, C.G // 2, C), 4, C)
        if C.BITS > 4:
            high = after_plane(wire, C.G // 2, groups, C)
            plane = load_plane(high, first, groups, C.G * (C.BITS - 4) // 8, C)
            codes = codes | (unpack(plane, C.BITS - 4, C) << 4)
    return codes


SELECT = 0xE4  # lop3: bits of the first operand where the third is set, else of the second


@triton.constexpr_function
def alike(kind, number):
    """The dtypes of as many results. From Triton 3.8 on a kernel cannot put them together itself."""
    return (kind,) * number


@triton.constexpr_function
def words_of(bits):
    """Registers that hold the planes of 16 codes."""
    return {8: 4, 4: 2}.get(bits, 3)


@triton.constexpr_function
def constraints(outputs, results, inputs):
    """Of inline assembly: ``results`` registers of a kind (``=r``, ``=h``) from ``inputs`` registers."""
    return ",".join([outputs] * results + ["r"] * inputs)


@triton.constexpr_function
def packing_assembly(bits):
    """PTX from 16 numbers, whose lowest byte is the code, to the bytes of all planes of 4, 5 or 6 bits."""
    outputs = words_of(bits)
    lines = ["{", ".reg .b32 t, u, c0, c1, c2, c3;"]
    for number in range(4):  # of the quarter
        n0, n1, n2, n3 = (f"${outputs + 4 * number + k}" for k in range(4))
        lines += [f"prmt.b32 t, {n0}, {n1}, 0x40;", f"prmt.b32 u, {n2}, {n3}, 0x40;"]
        lines += [f"prmt.b32 c{number}, t, u, 0x5410;"]
    for q in range(2):  # below 16: a shift does not leave the byte
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
        lines += [f"and.b32 t, $2, {0x55555555};", "shr.u32 u, t, 15;", "or.b32 $2, t, u;"]
    return "\n".join([*lines, "}"])


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
def sixteen_joined(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, C: tl.constexpr
):
    """Inverse of sixteen_of."""
    x0, x1 = four_joined(a0, a4, a8, a12), four_joined(a1, a5, a9, a13)
    x2, x3 = four_joined(a2, a6, a10, a14), four_joined(a3, a7, a11, a15)
    return tl.reshape(four_joined(x0, x1, x2, x3), [C.R, C.G])


@triton.jit
def store_words(plane, words, first, groups, P: tl.constexpr, C: tl.constexpr):
    """Store the int32 or int16 words, R * P bytes in order, as groups first... of a plane of P bytes a group;
    nothing beyond the last group."""
    SIZE: tl.constexpr = words.dtype.primitive_bitwidth // 8
    flat = tl.arange(0, C.R * P // SIZE)
    at = unit_pointers(plane, first, P, words.dtype, C)
    inside = flat < units_left(first, groups, P // SIZE, C)
    tl.store(at, tl.reshape(words, [C.R * P // SIZE]), mask=inside)


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
        text: tl.constexpr = packing_assembly(C.BITS)
        registers: tl.constexpr = constraints("=r", words_of(C.BITS), 16)
        kinds: tl.constexpr = alike(tl.int32, words_of(C.BITS))
        inputs = sixteen_of(codes, C)
        result = tl.inline_asm_elementwise(text, registers, inputs, kinds, True, 1)
        store_words(wire, tl.join(result[0], result[1]), first, groups, C.G // 2, C)
        high = after_plane(wire, C.G // 2, groups, C)
        if C.BITS == 6:
            store_words(high, result[2], first, groups, C.G // 4, C)
        elif C.BITS == 5:
            store_words(high, result[2].to(tl.int16), first, groups, C.G // 8, C)


MASKED_OR = 0xEA  # lop3: bits of both the first two operands, and of the third


@triton.constexpr_function
def two_halves(number):
    """The bits of two fp16 numbers, both this integer from 1 to 2047."""
    exponent = number.bit_length() - 1
    return 0x10001 * ((exponent + 15 << 10) + ((number << 10 - exponent) - 1024))


@triton.constexpr_function
def unpacking_assembly(bits, bend=0):
    """PTX from 16 codes to 16 fp16 numbers."""
    lines = ["{", ".reg .b32 t, u, v, ones;", f"mov.b32 ones, {0x64646464};"]
    if bend:
        lines += [
            ".reg .b32 x, zero, slope;",
            f"mov.b32 zero, {two_halves(1024 + 2 ** (bits - 1))};",
        ]
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
                lines.append(
                    f"shl.b32 u, v, {shift};" if shift >= 0 else f"shr.u32 u, v, {-shift};"
                )
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
def offset(bits, bend=0):
    """What load_halves gives more than the code's value."""
    return 0 if bend else 1024 + 2 ** (bits - 1)


@triton.jit
def load_words(plane, first, groups, P: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """int32[R, G / 16, n]: a plane of P bytes a group in words of ``dtype``; zeros beyond the last group."""
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    flat = tl.arange(0, C.R * P // SIZE)
    at = unit_pointers(plane, first, P, dtype, C)
    inside = flat < units_left(first, groups, P // SIZE, C)
    words = tl.load(at, mask=inside, other=0).to(tl.int32)
    return tl.reshape(words, [C.R, C.G // 16, 16 * P // C.G // SIZE])


@triton.jit
def load_halves(wire, first, groups, C: tl.constexpr):
    """fp16[R, G]: integers for the codes of groups first... of the chunk at wire, too large by ``offset``,
    which is cheaper subtracted after the Hadamard transform: that of a constant is zero but in its first
    element. Not interpretable."""
    text: tl.constexpr = unpacking_assembly(C.BITS, C.BEND)
    registers: tl.constexpr = constraints("=h", 16, words_of(C.BITS))
    kinds: tl.constexpr = alike(tl.float16, 16)
    if C.BITS == 8:
        codes = load_words(wire, first, groups, C.G, tl.int32, C)
        inputs = four_of(tl.reshape(codes, [C.R, C.G // 16, 2, 2]))
    else:
        inputs = tl.split(load_words(wire, first, groups, C.G // 2, tl.int32, C))
        high = after_plane(wire, C.G // 2, groups, C)
        if C.BITS == 6:
            more = load_words(high, first, groups, C.G // 4, tl.int32, C)
            inputs += (tl.reshape(more, [C.R, C.G // 16]),)
        elif C.BITS == 5:
            more = load_words(high, first, groups, C.G // 8, tl.int16, C)
            inputs += (tl.reshape(more, [C.R, C.G // 16]),)
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
        plane = after_plane(wire, C.G // 2, groups, C)
        h = tl.arange(0, 2)[None, None, :]
        if C.BITS == 6:  # two bits of that element are 2(2q + h) and the next of byte k
            more = load_words(plane, first, groups, C.G // 4, tl.int32, C) >> (2 * h)
            low, high = low | ((more & 0x03030303) << 4), high | (more & 0x30303030)
        elif C.BITS == 5:  # its bit is 4q + 2h + k // 2 of byte k % 2
            more = load_words(plane, first, groups, C.G // 8, tl.int16, C)
            more = ((more & 0xFFFF) | ((more >> 1) << 16)) >> (2 * h)
            low, high = low | ((more & 0x01010101) << 4), high | (more & 0x10101010)
        words = tl.permute(tl.join(low, high), [0, 1, 3, 2])
    return tl.reshape(words, [C.R, C.G // 4])


@triton.jit
def magic_bits(groups):
    """Bits of 2^23 in fp32, in a way that the compiler does not know them: as an immediate operand, of which
    an instruction takes only one, they would cost a second instruction."""
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
