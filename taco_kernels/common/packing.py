"""Integers to the bytes of a wire's planes and back, and rounding to the grids of the formats.

In Triton for the interpreter and for fp8, and in PTX, 16 elements or 32 bits at a time: the
compiler takes every byte of a register on its own. In PTX a register is four bytes: permutations
gather them, and planes are put together four bytes at a time.

The 16 elements are four quarters w = 2 p + q of four: element 4 w + k is 8 p + 4 q + k, where p
chooses the half of a byte of a plane of 4 bits, q its word, and k the byte. Their planes, byte 3 on
the left::

    plane of 4 bits,      byte         3        2        1        0
    word q = 0, 1         bits 7-4  8+4q+3   8+4q+2   8+4q+1   8+4q       p = 1
                          bits 3-0    4q+3     4q+2     4q+1     4q       p = 0

    plane of 2 bits,      bits 7-6      15       14       13     12       w = 3
    one word (int6)       bits 5-4      11       10        9      8       w = 2
                          bits 3-2       7        6        5      4       w = 1
                          bits 1-0       3        2        1      0       w = 0

    plane of 1 bit,       bit 2 w + 1                   4w+3   4w+2
    two bytes (int5)      bit 2 w                       4w+1     4w       w = 0 .. 3

A plane of 8 bits has its elements in order. To decode, a byte, the code plus 2^(bits - 1), is set
into the low mantissa bits of 1024 (fp16) or 2^23 (fp32), and what is too much is subtracted.
``bend`` makes the values
u (|u| + 2 bend + 1) of codes u (taco/reference.py).

``C`` is a ``Constants`` with at least R groups a tile, G values a group, BITS a code, FORMAT,
INTERPRET and ROW (0, or the groups of a chunk where a tile holds several whole chunks). ``wire``
points to a chunk, ``plane`` to one of its planes; ``first`` is the tile's first group, int32, and
``groups`` the number of groups of the chunk (with ROW of all chunks up to the tile's last).
"""

import triton
import triton.language as tl

# fp32 with this much added, 1.5 * 2^23, keeps an integer in its low mantissa bits, rounded half to
# even.
MAGIC = tl.constexpr(12582912.0)

# Tables of PTX's lop3: the bits of a result by those of its three operands a, b, c.
SELECT = 0xE4  # a where c is set, else b
MASKED_OR = 0xEA  # (a and b) or c

# Rounding to codes


@triton.jit
def fp8_codes(v, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """int32 codes of |v| <= qmax in integer arithmetic: n steps of the binade that |v| lies in.

    Codes are consecutive integers, so n adds to the binade's first code also where it carries into
    the next one or where the number is subnormal (as in reference.round_to_grid).

    Args:
        v: fp32.
        MANTISSA: mantissa bits of the format.
        LOWEST: biased fp32 exponent of the format's smallest normal number.
    """
    # Below the smallest normal number steps stay as small as its own: subnormal numbers.
    bits = v.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, LOWEST)
    scale = ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two
    # Adding MAGIC rounds to an integer in the low mantissa bits, half to even.
    n = (tl.abs(v) * scale + MAGIC).to(tl.int32, bitcast=True) & 0x3FFFFF
    # n holds the leading 1 of a normal number, too, which adds 1 to the exponent's field.
    return (((exponent - LOWEST) << MANTISSA) + n) | ((bits >> 24) & 0x80)


@triton.jit
def converted_to_fp8(v, FORMAT: tl.constexpr):
    """uint8 codes of fp32 v by PTX's conversion, four values at a time.

    On sm_89 Triton 3.6 takes fp16 on the way, towards zero: one code in 256 of e4m3 is then not the
    nearest.
    """
    types: tl.constexpr = "e4m3x2" if FORMAT == "fp8-e4m3" else "e5m2x2"
    convert: tl.constexpr = "cvt.rn.satfinite." + types + ".f32 "
    assembly: tl.constexpr = (
        "{ .reg .b16 lo, hi; "
        + convert
        + "lo, $2, $1; "
        + convert
        + "hi, $4, $3; mov.b32 $0, {lo, hi}; }"
    )
    return tl.inline_asm_elementwise(
        assembly, "=r,f,f,f,f", [v], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def nearest_fp8(v, C: tl.constexpr):
    """uint8 codes of |v| <= qmax (fp32), rounded to nearest."""
    # sm_89 by PTX; sm_90 and later by Triton; older devices have no such instruction.
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
    """int32[R, G]: codes of h * inverse in an integer format, in the lowest byte; other bits mean
    nothing.

    A code is the product plus 2^(BITS - 1), plus nothing for int8. Nothing can saturate: the
    product is from
    -2^(BITS - 1) to qmax, up to its rounding (reference.round_to_grid).

    Args:
        h: fp32[R, G].
        inverse: fp32[R], reciprocals of the groups' steps.
        C: constants of the tile.
    """
    BIAS: tl.constexpr = 0 if C.BITS == 8 else 2 ** (C.BITS - 1)
    inverse = tl.broadcast_to(inverse[:, None], [C.R, C.G])
    return tl.fma(h, inverse, MAGIC + BIAS).to(tl.int32, bitcast=True)


@triton.jit
def quantize(h, inverse, C: tl.constexpr):
    """uint8[R, G]: codes of h * inverse in a format of 8 bits.

    Args:
        h: fp32[R, G].
        inverse: fp32[R], reciprocals of the groups' steps.
        C: constants of the tile.
    """
    if C.FORMAT != "int8":
        codes = nearest_fp8(h * inverse[:, None], C)
    else:
        codes = fixed_point(h, inverse, C)
    return codes.to(tl.uint8)


@triton.jit
def code_values(codes, dtype: tl.constexpr, C: tl.constexpr):
    """Values of uint8 codes.

    Args:
        codes: uint8, of any shape.
        dtype: of the values: fp16, which holds every format exactly, or fp32.
        C: constants of the tile.
    """
    if C.FORMAT == "fp8-e4m3":
        if C.HARDWARE_FP8:
            # Exact: fp16 has more of both exponent and mantissa.
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            # The same fields as fp16, whose exponent's bias is larger by 8.
            bits = codes.to(tl.uint16)
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
            values = half.to(tl.float16, bitcast=True) * 256.0
    elif C.FORMAT == "fp8-e5m2":
        # fp16 without its last 8 mantissa bits.
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        # 1024 + c in fp16 has c in its low mantissa bits.
        biased = codes ^ 0x80 if C.BITS == 8 else codes
        values = (biased.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        values = values - (1024.0 + 2.0 ** (C.BITS - 1))
    return values.to(dtype)


# Where planes lie


@triton.jit
def aligned_bytes(size):
    """Bytes up to the next multiple of 16, where what follows begins."""
    return (size + 15) // 16 * 16


@triton.jit
def after_plane(wire, BYTES: tl.constexpr, groups, C: tl.constexpr):
    """Pointer to what follows BYTES for each group of a chunk.

    Args:
        wire: pointer to the chunk.
        BYTES: of each group that lie before.
        groups: of the chunk, or with C.ROW those up to the tile's last, which begins with a chunk;
            chunks then have C.ROW groups each and lie C.STRIDE bytes apart.
        C: constants of the tile.
    """
    if C.ROW:
        pointer = wire + BYTES * C.ROW
    else:
        pointer = wire + tl.full((), BYTES, tl.int64) * groups
    return pointer


@triton.jit
def wire_of(wires, sender, wire_stride):
    """Pointer to a sender's wire.

    Args:
        wires: pointer to the first sender's wire.
        sender: its number, of any integer type or known to the compiler.
        wire_stride: bytes from one sender's wire to the next, likewise.
    """
    # The product is of 64 bits: all wires together may be longer than 2 GiB.
    return wires + (tl.full((), 0, tl.int64) + sender) * wire_stride


@triton.jit
def across_chunks(first, N: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr):
    """int64[R * N]: offsets of the units of a tile that holds several whole chunks (C.ROW), in
    units.

    Args:
        first: the tile's first group.
        N: units a group.
        SIZE: bytes a unit.
        C: constants of the tile.
    """
    flat = tl.arange(0, C.R * N)
    # The tile begins with a chunk, so units of the tile count on from that chunk's first.
    chunk = (first // C.ROW).to(tl.int64) + flat // (C.ROW * N)
    return chunk * (C.STRIDE // SIZE) + flat % (C.ROW * N)


@triton.jit
def unit_pointers(plane, first, P: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """Pointers [R * P / size of dtype] to the units of a tile in a plane.

    Args:
        plane: pointer to the plane.
        first: the tile's first group.
        P: bytes a group.
        dtype: of a unit: uint8, int16 or int32.
        C: constants of the tile.
    """
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    if C.ROW:
        pointers = plane.to(tl.pointer_type(dtype)) + across_chunks(first, P // SIZE, SIZE, C)
    else:
        # 64 bits once a tile; inside it 32 are enough.
        units = (plane + first.to(tl.int64) * P).to(tl.pointer_type(dtype))
        pointers = units + tl.arange(0, C.R * P // SIZE)
    return pointers


@triton.jit
def units_left(first, groups, N: tl.constexpr, C: tl.constexpr):
    """int32: units from group ``first`` to the last one, but no more than a tile has.

    The product is of at most R groups. Of all that are left, 2^24 and more of 128 bytes, it would
    pass 2^31.

    Args:
        first: the tile's first group.
        groups: of the chunk.
        N: units a group.
        C: constants of the tile.
    """
    return tl.minimum(groups - first, C.R) * N


@triton.jit
def store_plane(plane, value, first, groups, P: tl.constexpr, C: tl.constexpr):
    """Store bytes of a tile's groups in a plane; nothing beyond the last group.

    Args:
        plane: pointer to the plane.
        value: uint8[R, P].
        first: the tile's first group.
        groups: of the chunk.
        P: bytes a group.
        C: constants of the tile.
    """
    inside = tl.arange(0, C.R * P) < units_left(first, groups, P, C)
    pointers = unit_pointers(plane, first, P, tl.uint8, C)
    tl.store(pointers, tl.reshape(value, [C.R * P]), mask=inside)


@triton.jit
def load_plane(plane, first, groups, P: tl.constexpr, C: tl.constexpr):
    """uint8[R, P]: bytes of a tile's groups in a plane; zeros beyond the last group.

    Args:
        plane: pointer to the plane.
        first: the tile's first group.
        groups: of the chunk.
        P: bytes a group.
        C: constants of the tile.
    """
    inside = tl.arange(0, C.R * P) < units_left(first, groups, P, C)
    pointers = unit_pointers(plane, first, P, tl.uint8, C)
    return tl.reshape(tl.load(pointers, mask=inside, other=0), [C.R, P])


# Planes in Triton, for the interpreter and for what PTX does not serve


@triton.jit
def halves_of(c):
    """[R, n, 2, J] as two [R, n, J]: the first J of every 2J elements, and the others."""
    return tl.split(tl.permute(c, [0, 1, 3, 2]))


@triton.jit
def pack(c, BITS: tl.constexpr, C: tl.constexpr):
    """uint8[R, G * BITS / 8]: a plane of codes.

    Halves of 16 elements, then of 8, of 4, meet in a byte: the drawing above from the top down.

    Args:
        c: int32[R, G], codes below 2^BITS; bits from 8 on are ignored.
        BITS: of the plane: 4, 2 or 1.
        C: constants of the tile.
    """
    low, high = halves_of(tl.reshape(c, [C.R, C.G // 16, 2, 8]))
    c = low | (high << 4)
    if BITS < 4:
        low, high = halves_of(tl.reshape(c, [C.R, C.G // 16, 2, 4]))
        c = low | (high << 2)
    if BITS < 2:
        low, high = halves_of(tl.reshape(c, [C.R, C.G // 16, 2, 2]))
        c = low | (high << 1)
    return tl.reshape(c, [C.R, C.G * BITS // 8]).to(tl.uint8)


@triton.jit
def low_then_high(low, high, J: tl.constexpr, C: tl.constexpr):
    """[R, G / 16, 2J]: the elements of ``low``, then those of ``high``.

    Args:
        low: [R, G / 16, J].
        high: [R, G / 16, J].
        J: elements of each.
        C: constants of the tile.
    """
    halves = tl.permute(tl.join(low, high), [0, 1, 3, 2])
    return tl.reshape(halves, [C.R, C.G // 16, 2 * J])


@triton.jit
def unpack(plane, BITS: tl.constexpr, C: tl.constexpr):
    """uint8[R, G]: codes of a plane, the inverse of ``pack``.

    Args:
        plane: uint8[R, G * BITS / 8].
        BITS: of the plane: 4, 2 or 1.
        C: constants of the tile.
    """
    c = tl.reshape(plane, [C.R, C.G // 16, 2 * BITS])
    if BITS < 2:
        c = low_then_high(c, c >> 1, 2, C)
    if BITS < 4:
        c = low_then_high(c, c >> 2, 4, C)
    c = low_then_high(c, c >> 4, 8, C)
    return tl.reshape(c & (2**BITS - 1), [C.R, C.G])


@triton.jit
def store_codes(codes, wire, first, groups, C: tl.constexpr):
    """Store the codes of a tile's groups in all planes of a chunk.

    Args:
        codes: uint8 or int32 [R, G].
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    # The low 4 bits of a code, then the others, in planes one behind the other.
    if C.BITS == 8:
        store_plane(wire, codes, first, groups, C.G, C)
    else:
        low = codes & 15 if C.BITS > 4 else codes
        store_plane(wire, pack(low, 4, C), first, groups, C.G // 2, C)
        if C.BITS > 4:
            codes = (codes >> 4) & (2 ** (C.BITS - 4) - 1)
            high = after_plane(wire, C.G // 2, groups, C)
            bits = pack(codes, C.BITS - 4, C)
            store_plane(high, bits, first, groups, C.G * (C.BITS - 4) // 8, C)


@triton.jit
def load_codes(wire, first, groups, C: tl.constexpr):
    """uint8[R, G]: codes of a tile's groups, the inverse of ``store_codes``.

    Args:
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    if C.BITS == 8:
        codes = load_plane(wire, first, groups, C.G, C)
    else:
        codes = unpack(load_plane(wire, first, groups, C.G // 2, C), 4, C)
        if C.BITS > 4:
            high = after_plane(wire, C.G // 2, groups, C)
            plane = load_plane(high, first, groups, C.G * (C.BITS - 4) // 8, C)
            codes = codes | (unpack(plane, C.BITS - 4, C) << 4)
    return codes


# Planes in PTX: encoding


@triton.constexpr_function
def repeated(dtype, count):
    """Return the dtypes of ``count`` results. From Triton 3.8 on a kernel cannot put them together
    itself."""
    return (dtype,) * count


@triton.constexpr_function
def words_of(bits):
    """Return how many registers hold the planes of 16 codes of ``bits`` bits."""
    return {8: 4, 4: 2}.get(bits, 3)


@triton.constexpr_function
def constraints(outputs, results, inputs):
    """Return the constraints of inline assembly.

    Args:
        outputs: kind of the output registers: ``=r`` of 32 bits, ``=h`` of 16.
        results: how many there are.
        inputs: how many input registers of 32 bits there are.
    """
    return ",".join([outputs] * results + ["r"] * inputs)


@triton.constexpr_function
def packing_assembly(bits):
    """Return PTX from 16 numbers to the bytes of all planes of 4, 5 or 6 bits.

    The lowest byte of a number is its code. Registers: $0, $1 get the words of the plane of 4 bits,
    $2 the other plane; the numbers follow. c0 .. c3 are the quarters, a code a byte.
    """
    outputs = words_of(bits)
    lines = ["{", ".reg .b32 t, u, c0, c1, c2, c3;"]
    # The lowest bytes of four numbers, gathered in one register.
    for quarter in range(4):
        n0, n1, n2, n3 = (f"${outputs + 4 * quarter + k}" for k in range(4))
        lines += [
            f"prmt.b32 t, {n0}, {n1}, 0x40;",
            f"prmt.b32 u, {n2}, {n3}, 0x40;",
            f"prmt.b32 c{quarter}, t, u, 0x5410;",
        ]
    # Word q: the low nibbles of quarter q, and those of quarter 2 + q above them.
    for q in range(2):
        if bits == 4:
            # Codes are below 16, so a shift does not leave the byte.
            lines.append(f"mad.lo.u32 ${q}, c{2 + q}, 16, c{q};")
        else:
            lines += [
                f"shl.b32 t, c{2 + q}, 4;",
                f"lop3.b32 ${q}, c{q}, t, {0x0F0F0F0F}, {SELECT};",
            ]
    # The bits above 4 of element 4 w + k, to bits 2 w and 2 w + 1 of byte k.
    if bits in (5, 6):
        lines += [
            "shr.u32 t, c0, 4;",
            "shr.u32 u, c1, 2;",
            f"lop3.b32 t, t, u, {0x03030303}, {SELECT};",
            f"lop3.b32 t, t, c2, {0x0F0F0F0F}, {SELECT};",
            "shl.b32 u, c3, 2;",
            f"lop3.b32 $2, t, u, {0x3F3F3F3F}, {SELECT};",
        ]
    # Bit 2 w of byte k of four, to bit 2 w + k / 2 of byte k % 2 of two.
    if bits == 5:
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
    """[..., 2, 2] of four parts [...], the inverse of ``four_of``.

    Args:
        x0: element 0, 0.
        x1: element 0, 1.
        x2: element 1, 0.
        x3: element 1, 1.
    """
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
    """[R, G] of 16 tensors [R, G / 16], the inverse of ``sixteen_of``.

    Args:
        a0, a1, a2, a3, a4, a5, a6, a7: the first, second, ... of every 16 elements.
        a8, a9, a10, a11, a12, a13, a14, a15: the ninth, tenth, ...
        C: constants of the tile.
    """
    x0 = four_joined(a0, a4, a8, a12)
    x1 = four_joined(a1, a5, a9, a13)
    x2 = four_joined(a2, a6, a10, a14)
    x3 = four_joined(a3, a7, a11, a15)
    return tl.reshape(four_joined(x0, x1, x2, x3), [C.R, C.G])


@triton.jit
def store_words(plane, words, first, groups, P: tl.constexpr, C: tl.constexpr):
    """Store words of a tile's groups in a plane; nothing beyond the last group.

    Args:
        plane: pointer to the plane.
        words: int32 or int16, R * P bytes in order.
        first: the tile's first group.
        groups: of the chunk.
        P: bytes a group.
        C: constants of the tile.
    """
    SIZE: tl.constexpr = words.dtype.primitive_bitwidth // 8
    flat = tl.arange(0, C.R * P // SIZE)
    pointers = unit_pointers(plane, first, P, words.dtype, C)
    inside = flat < units_left(first, groups, P // SIZE, C)
    tl.store(pointers, tl.reshape(words, [C.R * P // SIZE]), mask=inside)


@triton.jit
def store_groups(h, inverse, wire, first, groups, C: tl.constexpr):
    """Round h * inverse and store the codes of a tile's groups.

    Args:
        h: fp32[R, G].
        inverse: fp32[R], reciprocals of the groups' steps.
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    if C.BITS == 8:
        store_codes(quantize(h, inverse, C), wire, first, groups, C)
    else:
        store_integers(fixed_point(h, inverse, C), wire, first, groups, C)


@triton.jit
def store_integers(codes, wire, first, groups, C: tl.constexpr):
    """Store codes of 4, 5 or 6 bits of a tile's groups.

    Args:
        codes: int32[R, G], the code in the lowest bits, others ignored.
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    if C.INTERPRET:
        store_codes(codes, wire, first, groups, C)
    else:
        assembly: tl.constexpr = packing_assembly(C.BITS)
        registers: tl.constexpr = constraints("=r", words_of(C.BITS), 16)
        types: tl.constexpr = repeated(tl.int32, words_of(C.BITS))
        # One block of PTX for 16 codes of a thread.
        inputs = sixteen_of(codes, C)
        result = tl.inline_asm_elementwise(assembly, registers, inputs, types, True, 1)
        store_words(wire, tl.join(result[0], result[1]), first, groups, C.G // 2, C)
        high = after_plane(wire, C.G // 2, groups, C)
        if C.BITS == 6:
            store_words(high, result[2], first, groups, C.G // 4, C)
        elif C.BITS == 5:
            store_words(high, result[2].to(tl.int16), first, groups, C.G // 8, C)


# Planes in PTX: decoding to fp16


@triton.constexpr_function
def two_halves(number):
    """Return the bits of two fp16 numbers, both this integer from 1 to 2047."""
    # An integer below 2^11 fits fp16's mantissa: biased exponent, then what follows the leading 1.
    exponent = number.bit_length() - 1
    return 0x10001 * ((exponent + 15 << 10) + ((number << 10 - exponent) - 1024))


@triton.constexpr_function
def unpacking_assembly(bits, bend=0):
    """Return PTX from the planes of 16 codes to 16 fp16 numbers.

    Registers: $0 .. $15 get the numbers. With 8 bits $16 .. $19 are the quarters; else $16 and $17
    are the words of the plane of 4 bits, and $18 is the other plane. A number is the code plus
    ``halves_offset``, or with ``bend`` the value of the quadratic grid.
    """
    lines = ["{", ".reg .b32 t, u, v, ones;", f"mov.b32 ones, {0x64646464};"]
    if bend:
        lines += [
            ".reg .b32 x, zero, slope;",
            f"mov.b32 zero, {two_halves(1024 + 2 ** (bits - 1))};",
            f"mov.b32 slope, {two_halves(2 * bend + 1)};",
        ]
    # v: the bits above 4 of element 4 w + k in bits 2 w and 2 w + 1 of byte k.
    high_bits = {5: 0x01010101, 6: 0x03030303}.get(bits)
    if bits == 5:
        # Two bytes hold elements 2 apart in bits 2 w and 2 w + 1: to bits 2 w of four bytes.
        lines += ["shl.b32 v, $18, 15;", f"lop3.b32 v, $18, v, {0x0000FFFF}, {SELECT};"]
    elif bits == 6:
        lines.append("mov.b32 v, $18;")
    for p in range(2):
        for q in range(2):
            quarter = 2 * p + q
            # t: the quarter's codes plus 2^(bits - 1), a byte each.
            if bits == 8:
                lines.append(f"xor.b32 t, ${16 + quarter}, {0x80808080};")
            else:
                lines.append(f"shr.u32 t, ${16 + q}, {4 * p};")
                lines.append(f"and.b32 t, t, {0x0F0F0F0F};")
            if high_bits:
                shift = 4 - 2 * quarter
                if shift >= 0:
                    lines.append(f"shl.b32 u, v, {shift};")
                else:
                    lines.append(f"shr.u32 u, v, {-shift};")
                lines.append(f"lop3.b32 t, u, {high_bits << 4}, t, {MASKED_OR};")
            # Two bytes become the low bytes of two halves whose high bytes are 0x64: 1024 plus
            # each.
            for pair, order in enumerate(("0x5140", "0x7362")):
                lines.append(f"prmt.b32 u, t, ones, {order};")
                if bend:
                    lines += ["sub.rn.f16x2 u, u, zero;", "abs.f16x2 x, u;"]
                    lines += ["add.rn.f16x2 x, x, slope;", "mul.rn.f16x2 u, u, x;"]
                first = 4 * quarter + 2 * pair
                lines.append(f"mov.b32 {{${first}, ${first + 1}}}, u;")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def halves_offset(bits, bend=0):
    """Return how much more ``load_halves`` gives than the code's value."""
    return 0 if bend else 1024 + 2 ** (bits - 1)


@triton.jit
def load_words(plane, first, groups, P: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """int32[R, G / 16, n]: words of a tile's groups in a plane; zeros beyond the last group.

    Args:
        plane: pointer to the plane.
        first: the tile's first group.
        groups: of the chunk.
        P: bytes a group.
        dtype: of a word in memory: int32 or int16.
        C: constants of the tile.
    """
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    flat = tl.arange(0, C.R * P // SIZE)
    pointers = unit_pointers(plane, first, P, dtype, C)
    inside = flat < units_left(first, groups, P // SIZE, C)
    words = tl.load(pointers, mask=inside, other=0).to(tl.int32)
    return tl.reshape(words, [C.R, C.G // 16, 16 * P // C.G // SIZE])


@triton.jit
def load_halves(wire, first, groups, C: tl.constexpr):
    """fp16[R, G]: integers for the codes of a tile's groups, too large by ``halves_offset``.

    The offset is cheaper subtracted after the Hadamard transform: that of a constant is zero but in
    its first element. Not interpretable.

    Args:
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    assembly: tl.constexpr = unpacking_assembly(C.BITS, C.BEND)
    registers: tl.constexpr = constraints("=h", 16, words_of(C.BITS))
    types: tl.constexpr = repeated(tl.float16, 16)
    # Registers of 16 codes: four words of bytes, or two of nibbles and one of the bits above them.
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
    halves = tl.inline_asm_elementwise(assembly, registers, inputs, types, True, 1)
    return sixteen_joined(*halves, C)


# Planes in words of four codes: decoding to fp32 sums


@triton.jit
def low_nibbles(words, C: tl.constexpr):
    """int32: words & 0x0F0F0F0F.

    In PTX, or the compiler takes every nibble from its word on its own instead.
    """
    if C.INTERPRET:
        words = words & 0x0F0F0F0F
    else:
        words = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    return words


@triton.jit
def load_code_words(wire, first, groups, C: tl.constexpr):
    """int32[R, G / 4]: codes plus 2^(BITS - 1) of an integer format, four in each word, in order.

    Args:
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    if C.BITS == 8:
        words = load_words(wire, first, groups, C.G, tl.int32, C) ^ -2139062144  # 0x80808080
    else:
        # low, high: quarters q and 2 + q of 16 elements, [R, G / 16, 2].
        nibbles = load_words(wire, first, groups, C.G // 2, tl.int32, C)
        low = low_nibbles(nibbles, C)
        high = low_nibbles(nibbles >> 4, C)
        plane = after_plane(wire, C.G // 2, groups, C)
        q = tl.arange(0, 2)[None, None, :]
        # The bits above 4 of quarter w lie in bits 2 w and 2 w + 1 of byte k: shifted by 2 q, those
        # of quarter q are the lowest, and those of quarter 2 + q bits 4 and 5, where they belong.
        if C.BITS == 6:
            more = load_words(plane, first, groups, C.G // 4, tl.int32, C) >> (2 * q)
            low = low | ((more & 0x03030303) << 4)
            high = high | (more & 0x30303030)
        elif C.BITS == 5:
            more = load_words(plane, first, groups, C.G // 8, tl.int16, C)
            more = ((more & 0xFFFF) | ((more >> 1) << 16)) >> (2 * q)
            low = low | ((more & 0x01010101) << 4)
            high = high | (more & 0x10101010)
        words = tl.permute(tl.join(low, high), [0, 1, 3, 2])
    return tl.reshape(words, [C.R, C.G // 4])


@triton.jit
def magic_bits(groups):
    """int32: the bits of 2^23 in fp32, in a form that the compiler cannot fold (``groups`` is not
    negative).

    Known, they would be an immediate operand, of which an instruction takes only one: masking a
    byte and setting it into them would be two instructions.
    """
    return 0x4B000000 | (groups >> 31)


@triton.jit
def code_under(word, magic, MASK: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr):
    """fp32: a code of each word times UNIT.

    Args:
        word: int32, codes plus 2^(BITS - 1), a byte each.
        magic: what ``magic_bits`` gives.
        MASK: bits of the code in its word.
        UNIT: what the lowest of them is worth: 1.0 or 256.0.
        C: constants of the tile.
    """
    # The code in the mantissa of 2^23, at its place in the word; 2^23 and the bias are subtracted.
    bits = (word & MASK) | magic
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + UNIT * 2.0 ** (C.BITS - 1))


@triton.jit
def add_products(t0, t1, t2, t3, words, step, magic, C: tl.constexpr):
    """t_k + q_k * step for the four codes of each word, each rounded once; four fp32[R, G / 4].

    Every second code stays where it is in its word, is 256 times too large, and so takes step /
    256.

    Args:
        t0, t1, t2, t3: fp32[R, G / 4], sums so far of every fourth element.
        words: int32[R, G / 4], what ``load_code_words`` gives.
        step: fp32[R], steps of the groups.
        magic: what ``magic_bits`` gives.
        C: constants of the tile.
    """
    step = tl.broadcast_to(step[:, None], [C.R, C.G // 4])
    # Exact, as are both products: a power of two.
    small = step * (1.0 / 256.0)
    t0 = tl.fma(code_under(words, magic, 0xFF, 1.0, C), step, t0)
    t1 = tl.fma(code_under(words, magic, 0xFF00, 256.0, C), small, t1)
    words = words >> 16
    t2 = tl.fma(code_under(words, magic, 0xFF, 1.0, C), step, t2)
    t3 = tl.fma(code_under(words, magic, 0xFF00, 256.0, C), small, t3)
    return t0, t1, t2, t3


@triton.jit
def load_singles(wire, first, groups, C: tl.constexpr):
    """fp32[R, G]: codes of a tile's groups in an integer format.

    Args:
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    words = load_code_words(wire, first, groups, C)
    # Bytes 0, 1, 2, 3 of each word, in the lowest bits, in order.
    bytes = four_joined(words, words >> 8, words >> 16, words >> 24)
    return code_under(tl.reshape(bytes, [C.R, C.G]), magic_bits(groups), 0xFF, 1.0, C)
