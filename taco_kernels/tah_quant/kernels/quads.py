"""Hadamard products of 64-value tiles inside a warp: four threads a tile, nothing through shared memory.

A tensor here has one element a thread. Thread ``t`` of a quad holds two tiles, 8 apart, of the 16 that a warp
does in a step. The tensor cores' fragments fix who holds what: before the product elements 16 t to 16 t + 15,
behind it 8 t to 8 t + 7 and the same in the other half of the tile: a quad's stores lie side by side.
Bits 1, 3, 4 and 5 of an element's number go through the tensor cores; bits 0 and 2 are butterflies before.
"""

import triton
import triton.language as tl

from taco_kernels.tah_quant.kernels.tiles import fetch, from_nibble_words, signed
from taco_kernels.triton.hadamard import sylvester, transform

AND_XOR = 0x6A  # lop3: bits of both the first two operands, flipped where the third is set
ONE, SIXTEENTH = tl.constexpr(0x3C00), tl.constexpr(0x2C00)  # fp16


@triton.jit
def fragment(lane, K: tl.constexpr, N: tl.constexpr, ROTATE: tl.constexpr):
    """int32: two fp16 of the thread's operand B of a 16 x 8 product, columns in half N of a tile.

    A row is bits 1, 4, 5 of an element and, K, bit 3; where that is set its nibble lies four bits further up.
    """
    thread, column = lane & 3, lane >> 2
    pair, third, fourth = column & 1, (column >> 1) & 1, column >> 2
    size: tl.constexpr = SIXTEENTH if K == 1 else ONE
    if ROTATE:
        sign = (K * third) ^ ((thread & 1) & fourth) ^ ((thread >> 1) * N)
        low, high = size | (sign << 15), size | ((sign ^ pair) << 15)
    else:
        same = (third == K) & ((thread & 1) == fourth) & ((thread >> 1) == N)
        low, high = tl.where(same & (pair == 0), size, 0), tl.where(same & (pair == 1), size, 0)
    return low | (high << 16)


@triton.jit
def fragments(lane):
    """The eight of the Hadamard matrix and of the identity, as ``product`` takes them."""
    return (
        fragment(lane, 0, 0, True),
        fragment(lane, 1, 0, True),
        fragment(lane, 0, 1, True),
        fragment(lane, 1, 1, True),
        fragment(lane, 0, 0, False),
        fragment(lane, 1, 0, False),
        fragment(lane, 0, 1, False),
        fragment(lane, 1, 1, False),
    )


@triton.constexpr_function
def _signs(r: int, pivot: str) -> list[str]:
    """Of tile r: sa and sb, signs of elements whose bit 3 is clear and set; p and m, +-1 of bits 0 and 2."""
    lines = [
        f"shr.u32 x, {pivot}, 4;",
        "and.b32 x, x, $21;",
        "popc.b32 x, x;",
        "and.b32 x, x, 1;",
        f"mul.lo.u32 sa{r}, x, {0x80008000};",
        f"shl.b32 x, {pivot}, 30;",
        f"lop3.b32 sa{r}, x, {0x80000000}, sa{r}, {AND_XOR};",
    ]
    for bit, target in ((3, f"sb{r}"), (0, f"p{r}0"), (2, f"p{r}2")):
        lines += [f"shr.u32 x, {pivot}, {bit};", "and.b32 x, x, 1;"]
        lines += [f"mul.lo.u32 {target}, x, {0x80008000};"]
    lines.append(f"xor.b32 sb{r}, sb{r}, sa{r};")
    for bit in (0, 2):
        lines += [
            f"xor.b32 p{r}{bit}, p{r}{bit}, {0x3C003C00};",
            f"xor.b32 m{r}{bit}, p{r}{bit}, {0x80008000};",
        ]
    return lines


@triton.constexpr_function
def _operands(r: int, words: tuple[str, str], pivot: str) -> list[str]:
    """Operands A of tile r: r<r><bit 0><bit 2><bit 3> for the transform, i<...> the identity; one is zero."""
    lines = [f"shl.b32 x, {pivot}, 24;", "shr.s32 x, x, 31;"]
    for c, word in enumerate(words):
        lines += [f"and.b32 w{c}, {word}, x;", f"xor.b32 v{c}, {word}, w{c};"]
    for q in range(2):
        for c in range(2):
            if q:
                lines += [f"shr.u32 w{c}, w{c}, 8;", f"shr.u32 v{c}, v{c}, 8;"]
            for h in range(2):
                mask, sign = 0x000F000F << 4 * h, "sb" if h else "sa"
                lines.append(f"lop3.b32 r{r}{q}{c}{h}, w{c}, {mask}, {sign}{r}, {AND_XOR};")
                lines.append(f"and.b32 i{r}{q}{c}{h}, v{c}, {mask};")
    for h in range(2):
        for bit, pairs in ((0, [("0" + c, "1" + c) for c in "01"]), (2, [(q + "0", q + "1") for q in "01"])):
            for first, second in pairs:
                a, b = f"r{r}{first}{h}", f"r{r}{second}{h}"
                lines += [f"fma.rn.f16x2 x, {b}, p{r}{bit}, {a};", f"fma.rn.f16x2 {b}, {b}, m{r}{bit}, {a};"]
                lines.append(f"mov.b32 {a}, x;")
    return lines


@triton.constexpr_function
def _half(half: int, kind: str) -> list[str]:
    """Both products of a half of two tiles, the affine map, the outlier's constant, and the stores."""
    lines = []
    for q in range(2):
        for c in range(2):
            target = ", ".join(f"d{q}{c}{i}" for i in range(4))
            for number, operand in ((13, "r"), (17, "i")):
                a = ", ".join(f"{operand}{r}{q}{c}{h}" for h in range(2) for r in range(2))
                b = ", ".join(f"${number + 2 * half + h}" for h in range(2))
                start = "nought, nought, nought, nought" if operand == "r" else target
                lines.append(
                    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                    f"{{{target}}}, {{{a}}}, {{{b}}}, {{{start}}};"
                )
    for r in range(2):
        for element in range(8):
            q, pair, c = element & 1, (element >> 1) & 1, element >> 2
            y = f"d{q}{c}{2 * r + pair}"
            lines += [f"fma.rn.f32 {y}, {y}, ${7 + r}, ${9 + r};"]
            lines += [f"setp.eq.u32 e, k{r}, {8 * half + element};", f"@e add.rn.f32 {y}, {y}, ${11 + r};"]
        order = [f"d{e & 1}{e >> 2}{2 * r + ((e >> 1) & 1)}" for e in range(8)]
        size = 4 if kind == "fp32" else 2
        at = 32 * half * size + r * 8 * 64 * size
        if kind == "fp32":
            for i in range(0, 8, 4):
                values = ", ".join(order[i : i + 4])
                lines.append(f"@there{r} st.global.v4.f32 [$22+{at + 4 * i}], {{{values}}};")
        else:
            convert = "cvt.rn.bf16x2.f32" if kind == "bf16" else "cvt.rn.f16x2.f32"
            lines += [f"{convert} o{i}, {order[2 * i + 1]}, {order[2 * i]};" for i in range(4)]
            lines.append(f"@there{r} st.global.v4.b32 [$22+{at}], {{o0, o1, o2, o3}};")
    return lines


@triton.constexpr_function
def decode_assembly(kind):
    """PTX of ``store_tiles``.

    A code in the low bits of fp16 is a denormal number, code * 2^-24: whatever follows is exact. A pivot's
    signs change places in the butterflies of bits 0 and 2, and the signs of codes before the product.
    """
    names = [
        f"{x}{r}{q}{c}{h}" for x in "ri" for r in range(2) for q in range(2) for c in range(2) for h in "01"
    ]
    names += [f"{x}{r}" for x in ("sa", "sb", "k") for r in range(2)]
    names += [f"{x}{r}{b}" for x in "pm" for r in range(2) for b in (0, 2)]
    names += ["x", "w0", "w1", "v0", "v1", "o0", "o1", "o2", "o3"]
    floats = [f"d{q}{c}{i}" for q in range(2) for c in range(2) for i in range(4)]
    lines = ["{", f".reg .b32 {', '.join(names)};", f".reg .f32 nought, {', '.join(floats)};"]
    lines += [".reg .pred e, there0, there1;", "mov.f32 nought, 0f00000000;"]
    for r in range(2):
        pivot = f"${5 + r}"
        lines.append(f"setp.gt.s32 there{r}, $23, {8 * r};")
        # which of the thread's 16 behind the product the outlier is; 16 or more: none
        lines += [f"shr.u32 x, {pivot}, 3;", "xor.b32 x, x, $21;", "and.b32 x, x, 3;", "shl.b32 x, x, 4;"]
        lines += [f"and.b32 k{r}, {pivot}, 7;", f"or.b32 k{r}, k{r}, x;", f"shr.u32 x, {pivot}, 2;"]
        lines += ["and.b32 x, x, 8;", f"or.b32 k{r}, k{r}, x;"]
        lines += [f"xor.b32 x, {pivot}, 128;", "and.b32 x, x, 128;", f"or.b32 k{r}, k{r}, x;"]
        lines += _signs(r, pivot) + _operands(r, (f"${1 + 2 * r}", f"${2 + 2 * r}"), pivot)
    for half in range(2):
        lines += _half(half, kind)
    return "\n".join([*lines, "mov.b32 $0, 0;", "}"])


@triton.jit
def both_tiles(first, second, C: tl.constexpr):
    """[R, 4], row by row, of what the threads have of their first tiles, then of their second."""
    return tl.reshape(tl.permute(tl.join(first, second), [1, 0]), [C.R, 4])


@triton.jit
def store_interpreted(out, left, thread, words, pivots, factors, offsets, constants, C: tl.constexpr):
    """store_tiles in Triton, for the interpreter."""
    second = tl.arange(0, C.R)[:, None] >= C.R // 2
    a, b = both_tiles(words[0], words[2], C), both_tiles(words[1], words[3], C)
    pivot = both_tiles(pivots[0], pivots[1], C)
    byte = tl.max(pivot, axis=1)[:, None]
    codes = from_nibble_words(a, b, C).to(tl.float32)
    rotated = transform(signed(codes, byte & 127, C), sylvester(C, 1.0, False, tl.float32), C)
    codes = tl.where(byte >= 128, rotated, codes) * 2.0**-24
    codes = tl.permute(tl.reshape(codes, [C.R, 2, 4, 8]), [0, 2, 1, 3])
    factor = tl.reshape(both_tiles(factors[0], factors[1], C), [C.R, 4, 1, 1])
    offset = tl.reshape(both_tiles(offsets[0], offsets[1], C), [C.R, 4, 1, 1])
    constant = tl.reshape(both_tiles(constants[0], constants[1], C), [C.R, 4, 1, 1])
    y = tl.fma(codes, tl.broadcast_to(factor, codes.shape), tl.broadcast_to(offset, codes.shape))
    half = tl.arange(0, 2)[None, None, :, None]
    element = tl.arange(0, 8)[None, None, None, :] + half * 32
    inside = both_tiles(thread, thread, C)
    outlier = tl.reshape(pivot - 128 - inside * 8, [C.R, 4, 1, 1]) == element
    y = tl.where(outlier, y + constant, y)
    distance = tl.where(second, 8 * C.G, 0)
    there = tl.where(second, both_tiles(left, left, C) > 8, both_tiles(left, left, C) > 0)
    pointers = tl.broadcast_to(tl.reshape(out, [1, C.R // 2, 4]), [2, C.R // 2, 4])
    pointers = tl.reshape(tl.reshape(pointers, [C.R, 4]) + distance, [C.R, 4, 1, 1]) + element
    tl.store(pointers, y.to(out.dtype.element_ty), mask=tl.reshape(there, [C.R, 4, 1, 1]) & (element >= 0))


@triton.jit
def store_tiles(out, left, thread, words, pivots, factors, offsets, constants, matrices, C: tl.constexpr):
    """Decode two tiles a quad and store them as bf16, fp16 or fp32.

    Args:
        out: of the thread's first value of the first tile; the second is 8 tiles behind.
        left: tiles there are from the first on.
        words: the thread's nibble words of its 16 codes, two of each tile.
        pivots: bytes of the wire; from 128 on the tile is transformed.
        factors, offsets, constants: fp32. 2^24 times what a code (transformed: their sums) is worth, what is
            added to every value, and what is added to the outlier of a transformed tile.
        matrices: of ``fragments``.
    """
    if C.INTERPRET:
        store_interpreted(out, left, thread, words, pivots, factors, offsets, constants, C)
    else:
        text: tl.constexpr = decode_assembly(out.dtype.element_ty.name)
        rest = (thread, out.to(tl.int64), left)
        inputs = words + pivots + factors + offsets + constants + matrices + rest
        registers: tl.constexpr = "=r," + "r," * 6 + "f," * 6 + "r," * 9 + "l,r"
        tl.inline_asm_elementwise(text, registers, inputs, dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _fetch_assembly(bits, distance):
    return "\n".join(
        [
            "{",
            ".reg .pred p, q;",
            "setp.gt.s32 p, $3, 0;",
            "setp.gt.s32 q, $3, 8;",
            "mov.b32 $0, 0;",
            "mov.b32 $1, 0;",
            f"@p ld.global.nc.u{bits} $0, [$2];",
            f"@q ld.global.nc.u{bits} $1, [$2+{distance}];",
            "}",
        ]
    )


@triton.jit
def fetch_two(pointers, left, DISTANCE: tl.constexpr, C: tl.constexpr):
    """Two int32 a thread: unsigned numbers at ``pointers`` and DISTANCE bytes on, for 8 tiles on; else 0."""
    if C.INTERPRET:
        SIZE: tl.constexpr = pointers.dtype.element_ty.primitive_bitwidth // 8
        further = pointers + DISTANCE // SIZE
        result = (fetch(pointers, left > 0, C), fetch(further, left > 8, C))
    else:
        BITS: tl.constexpr = pointers.dtype.element_ty.primitive_bitwidth
        text: tl.constexpr = _fetch_assembly(BITS, DISTANCE)
        kinds: tl.constexpr = (tl.int32, tl.int32)
        inputs = (pointers.to(tl.int64), left)
        result = tl.inline_asm_elementwise(text, "=r,=r,l,r", inputs, kinds, is_pure=True, pack=1)
    return result
