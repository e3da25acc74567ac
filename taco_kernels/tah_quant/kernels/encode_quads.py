"""encode for bf16 tiles of 64 values and up to 4 bits that fill their rows, by warps as quads.py has them.

Elements are held the other way round than there: 8 t to 8 t + 7 of either half of a tile before the
product, behind it 16 t to 16 t + 15, which a word of the wire's planes takes. Bits 0, 3, 4 and 5 of an
element's number are the rows of one product; bits 1 and 2 are four products that are added up.
"""

import triton
import triton.language as tl

from taco_kernels.tah_quant.kernels.put_quads import put_tiles
from taco_kernels.tah_quant.kernels.rows import GRID
from taco_kernels.tah_quant.kernels.tiles import nibble_words
from taco_kernels.tah_quant.kernels.values import encoded
from taco_kernels.triton.hadamard import sylvester

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
XOR = 0x96  # lop3: of all three operands


@triton.jit
def row_fragment(lane, K: tl.constexpr, THIRD: tl.constexpr, SIGN: tl.constexpr, ROTATE: tl.constexpr):
    """int32: two bf16 of the thread's operand B of a 16 x 8 product.

    A row is bits 0, 3, 4 of an element and, K, bit 5; a column bits 0, 4, 5 of one whose bit 3 is THIRD.
    """
    thread, column = lane & 3, lane >> 2
    pair, fourth, fifth = column & 1, (column >> 1) & 1, column >> 2
    if ROTATE:
        sign = SIGN ^ (K * fifth) ^ ((thread & 1) * THIRD) ^ ((thread >> 1) & fourth)
        low, high = 0x3F80 | (sign << 15), 0x3F80 | ((sign ^ pair) << 15)
    else:
        same = (fifth == K) & ((thread & 1) == THIRD) & ((thread >> 1) == fourth)
        low, high = tl.where(same & (pair == 0), 0x3F80, 0), tl.where(same & (pair == 1), 0x3F80, 0)
    return low | (high << 16)


@triton.jit
def row_fragments(lane):
    """The twelve of the Hadamard matrix, its negative and the identity, as ``encode_assembly`` takes them."""
    return (
        row_fragment(lane, 0, 0, 0, True),
        row_fragment(lane, 1, 0, 0, True),
        row_fragment(lane, 0, 1, 0, True),
        row_fragment(lane, 1, 1, 0, True),
        row_fragment(lane, 0, 0, 1, True),
        row_fragment(lane, 1, 0, 1, True),
        row_fragment(lane, 0, 1, 1, True),
        row_fragment(lane, 1, 1, 1, True),
        row_fragment(lane, 0, 0, 0, False),
        row_fragment(lane, 1, 0, 0, False),
        row_fragment(lane, 0, 1, 0, False),
        row_fragment(lane, 1, 1, 0, False),
    )


@triton.jit
def number_fragments(lane):
    """int32 three times: bf16 pairs of an operand B whose odd columns number the rows, the even ones count.

    The first two have elements 8 t and 8 t + 1 of either half of a tile; the third is added for the next two.
    """
    thread = lane & 3
    odd = ((lane >> 2) & 1) == 1
    first = (thread * 8).to(tl.float32).to(tl.int32, bitcast=True)
    second = (thread * 8 + 1).to(tl.float32).to(tl.int32, bitcast=True)
    low = ((first >> 16) & 0xFFFF) | (second & -65536)
    first = (thread * 8 + 32).to(tl.float32).to(tl.int32, bitcast=True)
    second = (thread * 8 + 33).to(tl.float32).to(tl.int32, bitcast=True)
    high = ((first >> 16) & 0xFFFF) | (second & -65536)
    return tl.where(odd, low, 0x3F803F80), tl.where(odd, high, 0x3F803F80), tl.where(odd, 0x40004000, 0)


@triton.constexpr_function
def _over_quad(operation: str, register: str) -> list[str]:
    """``register`` = what ``operation`` makes of it in the four threads of a quad."""
    lines = []
    for distance in (1, 2):
        lines += [
            f"shfl.sync.bfly.b32 x, {register}, {distance}, 31, -1;",
            f"{operation} {register}, {register}, x;",
        ]
    return lines


@triton.constexpr_function
def _product(target: str, operand: str, k: int, b: tuple, start: str) -> str:
    a = ", ".join(f"{operand}{r}{j}" for j in (k, 4 + k) for r in range(2))
    return f"{MMA} {{{target}}}, {{{a}}}, {{{b[0]}, {b[1]}}}, {{{start}}};"


@triton.constexpr_function
def _sums(entropy) -> list[str]:
    """Magnitudes m<r><j>, their sums $8, $9 and those times their logarithms $10, $11."""
    lines = [f"abs.bf16x2 m{r}{j}, ${12 + 8 * r + j};" for r in range(2) for j in range(8)]
    total = "d00, d01, d02, d03"
    for k in range(4):
        start = "nought, nought, nought, nought" if k == 0 else total
        lines.append(_product(total, "m", k, ("ones", "ones"), start))
    lines += ["mov.b32 $8, d00;", "mov.b32 $9, d02;"]
    for r in range(2):
        lines.append("mov.f32 u, 0f00000000;")
        for j in range(8 if entropy else 0):
            # either of a word as fp32, 2^-126 more: a product, as the pipe of integers has more to do
            lines.append(f"mov.b32 {{half, other}}, m{r}{j};")
            for pair in ("mov.b32 x, {half, half};", f"mov.b32 x, m{r}{j};"):
                lines += [pair, "fma.rn.bf16x2 x, x, $47, tiny;"]
                lines += ["mov.b32 v, x;", "lg2.approx.ftz.f32 t, v;", "fma.rn.f32 u, v, t, u;"]
        if entropy:
            for distance in (1, 2):
                lines += [
                    "mov.b32 y, u;",
                    f"shfl.sync.bfly.b32 x, y, {distance}, 31, -1;",
                    "mov.b32 v, x;",
                    "add.rn.f32 u, u, v;",
                ]
        lines.append(f"mov.b32 ${10 + r}, u;")
    return lines


@triton.constexpr_function
def _outliers() -> list[str]:
    """Bytes of pivots $6, $7: a tile's only element above half of its largest is the largest, and chosen.

    What magnitudes have above that half is exact. It sums to the half where it is one element's alone; that
    sum, and the sum of it times elements' numbers, are two columns of a product, four times over.
    """
    lines = []
    for r in range(2):
        lines.append(f"max.NaN.bf16x2 c{r}, m{r}0, m{r}1;")
        lines += [f"max.NaN.bf16x2 c{r}, c{r}, m{r}{j};" for j in range(2, 8)]
    lines += ["prmt.b32 x, c0, c1, 0x5410;", "prmt.b32 y, c0, c1, 0x7632;", "max.NaN.bf16x2 y, x, y;"]
    lines += [
        *_over_quad("max.NaN.bf16x2", "y"),
        f"mov.b32 x, {0x01000100};",
        "max.NaN.bf16x2 y, y, x;",
        f"sub.u32 y, y, {0x00800080};",
    ]
    lines += ["prmt.b32 c0, y, y, 0x1010;", "prmt.b32 c1, y, y, 0x3232;"]
    for r in range(2):
        lines.append(f"xor.b32 g{r}, c{r}, {0x80008000};")
        lines += [f"fma.rn.relu.bf16x2 m{r}{j}, m{r}{j}, ones, g{r};" for j in range(8)]
    total = "d00, d01, d02, d03"
    for k in range(4):
        start, numbers = (total, ("n0", "n1")) if k else ("nought, nought, nought, nought", ("$44", "$45"))
        if k:
            before = numbers if k > 1 else ("$44", "$45")
            lines += [f"fma.rn.bf16x2 n{i}, {before[i]}, ones, $46;" for i in range(2)]
        lines.append(_product(total, "m", k, numbers, start))
    for r in range(2):
        lines += [f"and.b32 x, c{r}, {0xFFFF0000};", "mov.b32 u, x;", f"setp.eq.f32 e, d0{2 * r}, u;"]
        lines += [f"mov.b32 v, ${8 + r};", "setp.lt.and.f32 e, v, 0f71800000, e;"]
        lines += ["rcp.approx.ftz.f32 t, u;", f"mul.rn.f32 t, d0{2 * r + 1}, t;"]
        lines += ["add.rn.f32 v, t, 0f4B000080;", "mov.b32 y, v;", "and.b32 y, y, 255;"]
        lines.append(f"selp.b32 ${6 + r}, y, 0, e;")
        lines += [f"selp.b32 c{r}, ones, 0, e;", f"selp.f32 scale{r}, 0f3E000000, 0f3F800000, e;"]
    return lines


@triton.constexpr_function
def _transformed() -> list[str]:
    """y<element>_<tile>: the thread's 16 values of either tile, transformed where chosen, but for 1 / 8."""
    lines = []
    for r in range(2):
        lines.append(f"xor.b32 n{r}, c{r}, ones;")
        for j in range(8):
            for name, kept in (("m", "c"), ("i", "n")):
                lines.append(f"fma.rn.bf16x2 {name}{r}{j}, ${12 + 8 * r + j}, {kept}{r}, minus;")
    for third in range(2):
        for n in range(4):
            first = 8 * third + 2 * n
            target = f"y{first}_0, y{first + 1}_0, y{first}_1, y{first + 1}_1"
            unit = (f"${37 + 2 * third}", f"${38 + 2 * third}")
            lines.append(_product(target, "i", n, unit, "nought, nought, nought, nought"))
            for k in range(4):
                number = 29 + 4 * ((k & n).bit_count() & 1) + 2 * third
                lines.append(_product(target, "m", k, (f"${number}", f"${number + 1}"), target))
    for r in range(2):
        pivot = f"${6 + r}"
        # a sign is that of the element's bits 0 and 1 times that of the others
        lines += [f"shr.u32 x, {pivot}, 4;", "and.b32 x, x, $28;", "popc.b32 x, x;", "shl.b32 g0, x, 31;"]
        for bit, names in enumerate(("f1", "f2", "f3", "g1")):
            lines += [f"shl.b32 x, {pivot}, {31 - bit};", f"and.b32 {names}, x, {0x80000000};"]
        lines += ["xor.b32 g3, f3, g0;", "xor.b32 g2, g1, g0;", "xor.b32 x, f3, g2;"]
        lines += ["mov.b32 g1, g3;", "mov.b32 g3, x;", "xor.b32 f3, f1, f2;", "mov.b32 f0, 0;"]
        for element in range(16):
            y = f"y{element}_{r}"
            lines += [
                f"mov.b32 x, {y};",
                f"lop3.b32 x, x, f{element & 3}, g{element >> 2}, {XOR};",
                f"mov.b32 {y}, x;",
            ]
    return lines


@triton.constexpr_function
def _codes(r: int, grid: str) -> list[str]:
    """Scales and nibble words of tile r."""
    lines = []
    for name, operation in (("low", "min.f32"), ("high", "max.f32")):
        lines.append(f"{operation} {name}, y0_{r}, y1_{r};")
        lines += [f"{operation} {name}, {name}, y{j}_{r};" for j in range(2, 16)]
        for distance in (1, 2):
            lines += [f"mov.b32 y, {name};", f"shfl.sync.bfly.b32 x, y, {distance}, 31, -1;", "mov.b32 v, x;"]
            lines.append(f"{operation} {name}, {name}, v;")
        lines.append(f"mul.rn.f32 {name}, {name}, scale{r};")
    lines += [f"mov.b32 total, ${8 + r};", grid, f"mov.b32 ${4 + r}, pairs;"]
    lines.append(f"mul.rn.f32 inverse, inverse, scale{r};")
    for q in range(4):
        for k in range(4):
            lines += [f"fma.rn.f32 v, y{4 * q + k}_{r}, inverse, offset;", f"mov.b32 f{k}, v;"]
        lines += ["prmt.b32 x, f0, f1, 0x62;", "prmt.b32 y, f2, f3, 0x62;", f"prmt.b32 g{q}, x, y, 0x5410;"]
    return [*lines, f"mad.lo.u32 ${2 * r}, g2, 16, g0;", f"mad.lo.u32 ${2 * r + 1}, g3, 16, g1;"]


@triton.constexpr_function
def encode_assembly(entropy, grid):
    """PTX of ``encode_two``. ``grid``: rows.GRID."""
    constants = {"$0": "pairs", "$1": "inverse", "$2": "offset", "$3": "low", "$4": "high", "$5": "total"}
    constants |= {"$6": "$41", "$7": "$42", "$8": "$43"}
    for name, value in constants.items():
        grid = grid.replace(name + ",", value + ",").replace(name + ";", value + ";")
    words = [f"{x}{r}{j}" for x in "mi" for r in range(2) for j in range(8)]
    words += ["x", "y", "c0", "c1", "n0", "n1", "tiny", "minus", "ones", "pairs"]
    words += [f"{x}{k}" for x in "fg" for k in range(4)]
    singles = [f"y{j}_{r}" for j in range(16) for r in range(2)] + ["d00", "d01", "d02", "d03", "nought"]
    singles += ["t", "u", "v"]
    singles += ["low", "high", "total", "inverse", "offset", "scale0", "scale1"]
    lines = [
        "{",
        f".reg .b32 {', '.join(words)};",
        f".reg .f32 {', '.join(singles)};",
        ".reg .pred e;",
        ".reg .b16 half, other;",
    ]
    lines += ["mov.f32 nought, 0f00000000;", f"mov.b32 ones, {0x3F803F80};"]
    lines += [f"mov.b32 tiny, {0x00800000};", f"mov.b32 minus, {0x80008000};"]  # minus: -0, added to nothing
    lines += _sums(entropy) + _outliers() + _transformed() + _codes(0, grid) + _codes(1, grid)
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _load_assembly():
    lines = ["{", ".reg .pred p, q;", "setp.gt.s32 p, $17, 0;", "setp.gt.s32 q, $17, 8;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(16)]
    for i in range(4):
        registers = ", ".join(f"${4 * i + k}" for k in range(4))
        predicate, distance = "pq"[i // 2], 64 * (i % 2) + 8 * 128 * (i // 2)
        lines.append(f"@{predicate} ld.global.nc.v4.b32 {{{registers}}}, [$16+{distance}];")
    return "\n".join([*lines, "}"])


@triton.jit
def four_words(pointers, mask):
    """Four int32 a thread, one behind the other."""
    return (
        tl.load(pointers, mask=mask, other=0),
        tl.load(pointers + 1, mask=mask, other=0),
        tl.load(pointers + 2, mask=mask, other=0),
        tl.load(pointers + 3, mask=mask, other=0),
    )


@triton.jit
def load_two(x, left, C: tl.constexpr):
    """16 int32 a thread: its 16 bf16 of the tile at x (its first value there), and of that 8 tiles behind."""
    if C.INTERPRET:
        words = x.to(tl.pointer_type(tl.int32))
        result = four_words(words, left > 0) + four_words(words + 16, left > 0)
        words += 8 * 32
        result = result + four_words(words, left > 8) + four_words(words + 16, left > 8)
    else:
        text: tl.constexpr = _load_assembly()
        registers: tl.constexpr = "=&r," * 16 + "l,r"
        kinds: tl.constexpr = (tl.int32,) * 16
        inputs = (x.to(tl.int64), left)
        result = tl.inline_asm_elementwise(text, registers, inputs, kinds, is_pure=True, pack=1)
    return result


PREFETCH = tl.constexpr("""{
    .reg .pred p, q;
    setp.gt.s32 p, $2, 0;
    setp.gt.s32 q, $2, 8;
    @p prefetch.global.L2 [$1];
    @q prefetch.global.L2 [$1+1024];
    mov.b32 $0, 0;
}""")


@triton.jit
def prefetch_two(x, left, C: tl.constexpr):
    """Ask for what ``load_two`` will load: registers do not last for two steps, the cache does."""
    if not C.INTERPRET:
        inputs = (x.to(tl.int64), left)
        tl.inline_asm_elementwise(PREFETCH, "=r,l,r", inputs, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def halves_of(values, C: tl.constexpr):
    """What the threads have of their first and of their second tiles, of values [R, 4]."""
    return tl.split(tl.permute(tl.reshape(values, [2, C.R * 2]), [1, 0]))


@triton.jit
def encode_interpreted(words, C: tl.constexpr):
    """encode_two in Triton, for the interpreter."""
    first = tl.join(tl.join(words[0], words[1]), tl.join(words[2], words[3]))
    first = tl.join(first, tl.join(tl.join(words[4], words[5]), tl.join(words[6], words[7])))
    second = tl.join(tl.join(words[8], words[9]), tl.join(words[10], words[11]))
    second = tl.join(second, tl.join(tl.join(words[12], words[13]), tl.join(words[14], words[15])))
    both = tl.permute(tl.join(first, second), [4, 0, 1, 2, 3])  # tile, thread, bits 1, 2 and 5 of an element
    both = tl.permute(tl.reshape(both, [C.R, 4, 2, 2, 2]), [0, 4, 1, 3, 2])
    y = tl.join(both << 16, both & -65536).to(tl.float32, bitcast=True)
    matrices = (sylvester(C, 1.0, True, tl.float32), 0)
    chosen, pivot, total, weighted, pair, codes = encoded(tl.reshape(y, [C.R, C.G]), matrices, C)
    a, b = nibble_words(codes, C)
    byte = tl.where(chosen, pivot + 128, 0)
    a, a2 = halves_of(a, C)
    b, b2 = halves_of(b, C)
    result = (a, b, a2, b2)
    result = result + halves_of(tl.broadcast_to(pair[:, None], [C.R, 4]), C)
    result = result + halves_of(tl.broadcast_to(byte[:, None], [C.R, 4]), C)
    for_thread = tl.broadcast_to(total.to(tl.int32, bitcast=True)[:, None], [C.R, 4])
    result = result + halves_of(for_thread, C)
    for_thread = tl.broadcast_to(weighted.to(tl.int32, bitcast=True)[:, None], [C.R, 4])
    return result + halves_of(for_thread, C)


@triton.jit
def encode_two(words, thread, matrices, elements, C: tl.constexpr):
    """Encode two tiles a quad.

    Returns: int32. Nibble words a and b of the thread's 16 codes of the first tile, then of the second; and
    of either tile in turn step and zero point, byte of pivots, and the bits of the fp32 sums of magnitudes
    and of those times their logarithms, of magnitudes 2^-126 more.
    """
    if C.INTERPRET:
        result = encode_interpreted(words, C)
    else:
        text: tl.constexpr = encode_assembly(C.EXTRA > 0, GRID)
        registers: tl.constexpr = "=&r," * 12 + "r," * 29 + "f,f,f,r,r,r,r"
        kinds: tl.constexpr = (tl.int32,) * 12
        LEVELS: tl.constexpr = C.LEVELS * 1.0
        place, numbers = (thread,), (-LEVELS, 1 / LEVELS, 2.0 ** (23 - C.SHIFT) + 0.5)
        inputs = words + place + matrices + numbers + elements
        result = tl.inline_asm_elementwise(text, registers, inputs, kinds, is_pure=True, pack=1)
    return result


@triton.jit
def encode_by_quads(x, base, extra, scales, pivots, sums, tiles, C: tl.constexpr):
    """Persistent programs, R tiles a step, 16 a warp. Values are loaded a step ahead, into the cache two."""
    index = tl.arange(0, 2 * C.R)
    lane, thread = index & 31, index & 3
    matrices, elements = row_fragments(lane), number_fragments(lane)
    # always so, but not to the compiler, which makes a known constant anew each time
    upper = (tl.where(index < tiles + 2 * C.R, 0x3F800000, 0),)
    elements = elements + upper
    step = tl.num_programs(0) * C.R
    tile = tl.program_id(0) * C.R + (index >> 5) * 16 + (lane >> 2)
    x += tile.to(tl.int64) * C.G + thread * 8
    sector = thread * 8  # further on for the prefetch: four sectors of 32 bytes are a tile
    words = load_two(x, tiles - tile, C)
    prefetch_two(x + step.to(tl.int64) * C.G + sector, tiles - tile - step, C)
    first = tl.program_id(0) * C.R
    while first < tiles:
        first += step
        x += step.to(tl.int64) * C.G
        prefetch_two(x + step.to(tl.int64) * C.G + sector, tiles - tile - 2 * step, C)
        following = load_two(x, tiles - tile - step, C)
        found = encode_two(words, thread, matrices, elements, C)
        put_tiles(base, extra, scales, pivots, sums, tile, thread, tiles, found, C)
        tile += step
        words = following
