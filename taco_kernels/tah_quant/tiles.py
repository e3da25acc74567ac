"""What both directions share: tiles of the tensor, the swap, planes of codes."""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import odd
from taco_kernels.common.packing import alike, sixteen_joined, sixteen_of
from taco_kernels.tah_quant.rows import SHIFT


@triton.jit
def tile_pointers(x, first, tiles, per_row, channels, C: tl.constexpr):
    """Pointers [R, G] to tiles first... of rows of ``channels`` values, and which of the values there are."""
    tile = first + tl.arange(0, C.R)
    column = tl.arange(0, C.G)[None, :]
    if C.PADDED:
        row = tile // per_row
        at = (tile % per_row)[:, None] * C.G + column
        start = row.to(tl.int64) * channels
        mask = (tile < tiles)[:, None] & (at < channels)
        pointers = x + start[:, None] + at
    else:
        pointers = x + first.to(tl.int64) * C.G + (tl.arange(0, C.R) * C.G)[:, None] + column
        mask = (tile < tiles)[:, None]
    return pointers, mask


@triton.constexpr_function
def _put_assembly(bits):
    return "\n".join(
        [
            "{",
            ".reg .pred p;",
            "setp.ne.b32 p, $3, 0;",
            f"@p st.global.b{bits} [$1], $2;",
            "mov.b32 $0, 0;",
            "}",
        ]
    )


@triton.jit
def put(pointers, values, mask, C: tl.constexpr):
    """tl.store of integers from whichever threads hold them: no exchange for longer accesses."""
    if C.INTERPRET:
        tl.store(pointers, values, mask=mask)
    else:
        BITS: tl.constexpr = values.dtype.primitive_bitwidth
        text: tl.constexpr = _put_assembly(BITS)
        tl.inline_asm_elementwise(
            text,
            "=r,l,r,r",
            [pointers.to(tl.int64), values.to(tl.int32), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.constexpr_function
def _fetch_assembly(bits):
    return "\n".join(
        [
            "{",
            ".reg .pred p;",
            "setp.ne.b32 p, $2, 0;",
            "mov.b32 $0, 0;",
            f"@p ld.global.nc.u{bits} $0, [$1];",
            "}",
        ]
    )


@triton.jit
def fetch(pointers, mask, C: tl.constexpr):
    """int32: unsigned integers into whichever threads want them, several the same ones; 0 where masked."""
    if C.INTERPRET:
        values = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        if pointers.dtype.element_ty == tl.int16:
            values = values & 0xFFFF
    else:
        BITS: tl.constexpr = pointers.dtype.element_ty.primitive_bitwidth
        text: tl.constexpr = _fetch_assembly(BITS)
        values = tl.inline_asm_elementwise(
            text, "=r,l,r", [pointers.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
        )
    return values


@triton.jit
def put_rows(out, first, values, tiles, C: tl.constexpr):
    """out[first + r] = values[r], of integers, by the first of the threads that hold a row."""
    row = tl.arange(0, C.R)[:, None]
    block = tl.arange(0, C.G // 16)[None, :]
    values = tl.broadcast_to(values[:, None], [C.R, C.G // 16])
    put(out + first + row + block * 0, values, (row < tiles - first) & (block == 0), C)


@triton.jit
def section_bytes(tiles, P: tl.constexpr, padding):
    """Bytes of a plane of P bytes a tile, up to a multiple of ``padding``."""
    return (tl.full((), P, tl.int64) * tiles + padding - 1) // padding * padding


@triton.constexpr_function
def gather():
    """PTX from 16 numbers whose third byte is a code below 16 to their nibble words."""
    lines = ["{", ".reg .b32 t, u, c0, c1, c2, c3;"]
    for q in range(4):
        n = [f"${2 + 4 * q + k}" for k in range(4)]
        lines += [f"prmt.b32 t, {n[0]}, {n[1]}, 0x62;", f"prmt.b32 u, {n[2]}, {n[3]}, 0x62;"]
        lines += [f"prmt.b32 c{q}, t, u, 0x5410;"]
    return "\n".join([*lines, "mad.lo.u32 $0, c2, 16, c0;", "mad.lo.u32 $1, c3, 16, c1;", "}"])


@triton.jit
def nibble_words(c, C: tl.constexpr):
    """Two int32[R, G / 16]: codes [R, G] below 16 as the first and second half of their 4-bit plane.

    ``c`` has them at bit rows.SHIFT and nothing else in that byte.
    """
    if C.INTERPRET:
        c = (c >> SHIFT) & 15
        low, high = tl.split(tl.permute(tl.reshape(c, [C.R, C.G // 16, 2, 8]), [0, 1, 3, 2]))
        low, high = tl.split(tl.reshape(low | (high << 4), [C.R, C.G // 16, 2, 2, 2]))
        low, high = tl.split(low | (high << 8))
        words = tl.split(low | (high << 16))
    else:
        text: tl.constexpr = gather()
        registers: tl.constexpr = "=r,=r" + ",r" * 16
        words = tl.inline_asm_elementwise(
            text, registers, sixteen_of(c, C), (tl.int32, tl.int32), is_pure=True, pack=1
        )
    return words


@triton.jit
def from_nibble_words(first, second, C: tl.constexpr):
    """int32[R, G], inverse of nibble_words."""
    c = tl.join(first, second)
    c = tl.join(c, c >> 16)
    c = tl.reshape(tl.join(c, c >> 8), [C.R, C.G // 16, 8])
    return tl.reshape(tl.permute(tl.join(c, c >> 4), [0, 1, 3, 2]), [C.R, C.G]) & 15


@triton.constexpr_function
def halves():
    """PTX from two nibble words, a pivot and the number of a tile's sixteen to 16 signed codes in fp16."""
    lines = ["{", ".reg .b32 t, u, ones, bias, b<3>, s<8>;", "mov.b32 ones, 0x64646464;"]
    lines += ["mov.b32 bias, 0x64006400;", "shr.u32 t, $18, 4;", "and.b32 t, t, $19;", "popc.b32 t, t;"]
    # signs of two neighbours at a time: they differ where bit 0 of the pivot is set
    lines += [
        "and.b32 t, t, 1;",
        "mul.lo.u32 s0, t, 0x80008000;",
        "shl.b32 t, $18, 31;",
        "xor.b32 s0, s0, t;",
    ]
    for bit in range(3):
        lines += [f"shr.u32 t, $18, {bit + 1};", "and.b32 t, t, 1;", f"mul.lo.u32 b{bit}, t, 0x80008000;"]
        lines += [f"xor.b32 s{2**bit + k}, s{k}, b{bit};" for k in range(2**bit)]
    for number in range(4):  # elements 4 number and on
        lines += [f"shr.u32 t, ${16 + number % 2}, {4 * (number // 2)};", "and.b32 t, t, 0x0F0F0F0F;"]
        for pair, order in enumerate(("0x5140", "0x7362")):  # 1024 + code
            m = 2 * number + pair
            lines += [f"prmt.b32 u, t, ones, {order};", "sub.rn.f16x2 u, u, bias;", f"xor.b32 u, u, s{m};"]
            lines.append(f"mov.b32 {{${2 * m}, ${2 * m + 1}}}, u;")
    return "\n".join([*lines, "}"])


@triton.jit
def signed_halves(a, b, pivot, C: tl.constexpr):
    """fp16[R, G]: codes of nibble words, negative where pivot[R, 1] & column has odd parity."""
    if C.INTERPRET:
        codes = from_nibble_words(a, b, C).to(tl.float16)
        codes = tl.where(odd(pivot & tl.arange(0, C.G)[None, :]) == 1, -codes, codes)
    else:
        text: tl.constexpr = halves()
        registers: tl.constexpr = "=h," * 16 + "r,r,r,r"
        kinds: tl.constexpr = alike(tl.float16, 16)
        block = tl.arange(0, C.G // 16)[None, :]
        codes = tl.inline_asm_elementwise(text, registers, (a, b, pivot, block), kinds, is_pure=True, pack=1)
        codes = sixteen_joined(*codes, C)
    return codes


@triton.jit
def put_words(out, values, first, tiles, C: tl.constexpr, STRIDE: tl.constexpr = 1):
    """Store [R, G / 16] as tiles first... of a plane of as many elements a tile, STRIDE apart."""
    P: tl.constexpr = C.G // 16
    row, word = tl.arange(0, C.R)[:, None], tl.arange(0, P)[None, :]
    at = out + first.to(tl.int64) * (P * STRIDE) + (row * P + word) * STRIDE
    put(at, values, (row < tiles - first) & (word >= 0), C)


@triton.jit
def store_words(a, b, out, first, tiles, padding, FROM: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Store bits FROM to FROM + BITS of nibble words a and b as planes, each padded to ``padding`` bytes."""
    if BITS & 4:
        pair = out.to(tl.pointer_type(tl.int32))
        put_words(pair, a, first, tiles, C, 2)
        put_words(pair + 1, b, first, tiles, C, 2)
    if BITS & 2:
        words = ((a >> FROM) & 0x33333333) | (((b >> FROM) & 0x33333333) << 2)
        put_words(out.to(tl.pointer_type(tl.int32)), words, first, tiles, C)
        out += section_bytes(tiles, C.G // 4, padding)
    if BITS & 1:
        BIT: tl.constexpr = FROM + (BITS & 2)
        words = ((a >> BIT) & 0x11111111) | (((b >> BIT) & 0x11111111) << 2)
        words = words | (words >> 15)
        put_words(out.to(tl.pointer_type(tl.int16)), words.to(tl.int16), first, tiles, C)


@triton.jit
def spread_twos(word, TO: tl.constexpr):
    """Nibble words whose bits TO and TO + 1 are those of a 2-bit plane's int32 words."""
    return (word & 0x33333333) << TO, ((word >> 2) & 0x33333333) << TO


@triton.jit
def spread_ones(word, TO: tl.constexpr):
    """Nibble words whose bit TO is that of a 1-bit plane's int16 words."""
    word = word.to(tl.int32)
    word = (word & 0x5555) | ((word & 0xAAAA) << 15)
    return (word & 0x11111111) << TO, ((word >> 2) & 0x11111111) << TO


@triton.jit
def load_words(
    plane, at, mask, STRIDE: tl.constexpr, dtype: tl.constexpr, KNOWN: tl.constexpr, C: tl.constexpr
):
    """int32[R, G / 16]: tiles ``at`` of a plane of as many elements a tile, STRIDE apart; 0 where masked."""
    P: tl.constexpr = C.G // 16
    word = tl.arange(0, P)[None, :]
    where = at.to(tl.int64)[:, None] * (P * STRIDE) + word * STRIDE
    where = plane.to(tl.pointer_type(dtype)) + where
    if KNOWN:
        words = tl.load(where, mask=mask[:, None], other=0).to(tl.int32)
    else:
        words = fetch(where, mask[:, None] & (word >= 0), C)
    return words


@triton.jit
def load_nibbles(
    wire, at, mask, tiles, TO: tl.constexpr, BITS: tl.constexpr, KNOWN: tl.constexpr, C: tl.constexpr
):
    """Nibble words with BITS bits from TO on of tiles ``at`` of planes of ``tiles`` tiles.

    KNOWN: the tiles are consecutive, so that the compiler arranges the threads by what is loaded.
    """
    a = tl.zeros([C.R, C.G // 16], tl.int32)
    b = a
    if BITS & 4:
        a = load_words(wire, at, mask, 2, tl.int32, KNOWN, C)
        b = load_words(wire + 4, at, mask, 2, tl.int32, KNOWN, C)
    if BITS & 2:
        a, b = spread_twos(load_words(wire, at, mask, 1, tl.int32, KNOWN, C), TO)
        wire += section_bytes(tiles, C.G // 4, 16)
    if BITS & 1:
        BIT: tl.constexpr = TO + (BITS & 2)
        c, d = spread_ones(load_words(wire, at, mask, 1, tl.int16, KNOWN, C), BIT)
        a, b = a | c, b | d
    return a, b


@triton.jit
def tile_slots(slots, tile, tiles, per_unit):
    """int32: where the extra bits of the numbered tiles lie, counted in tiles; negative for low ones."""
    unit = tile // per_unit
    slot = tl.load(slots + unit, mask=tile < tiles, other=-1)
    return tl.where(slot < 0, -1, slot * per_unit + tile % per_unit)


@triton.jit
def fetch_slots(slots, first, tiles, per_unit, C: tl.constexpr):
    """int32[R]: tile_slots of tiles first..., with one division where a unit has no fewer than R tiles."""
    row = tl.arange(0, C.R)
    if C.BY_TOKEN:
        unit = first // per_unit
        place = first - unit * per_unit + row
        if C.LONG:
            further = (place >= per_unit).to(tl.int32)
        else:
            further = place // per_unit
        slot = fetch(slots + unit + further, row < tiles - first, C)
        slot = tl.where(slot < 0, -1, slot * per_unit + place - further * per_unit)
    else:
        slot = fetch(slots + first + row, row < tiles - first, C)
    return slot
