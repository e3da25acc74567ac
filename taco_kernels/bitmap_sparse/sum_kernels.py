"""Triton kernels that add 16-bit values up, for a few senders: a warp a row of 1024, lane by lane.

Tensors have one element a thread. Lane l of a warp has word l of its row's bitmap, and with it what the words
before hold. Four values at a time are a thread's: in step s, bits 4 (l & 3) and on of either half of word
8 s + (l >> 2), so that what four threads store lies side by side. Pairs of values are looked for together:
the second one is the code behind the first one's, or that code itself where the first one was not sent.
"""

import triton
import triton.language as tl

from taco_kernels.bitmap_sparse.kernels import TILE_ROWS, bits_set, look_up, over_warp, prefetch, step_of

LANES = tl.constexpr(32)


@triton.constexpr_function
def scan_assembly():
    """$0: $2 and the bits of $1 in all lanes before."""
    lines = ["{", ".reg .b32 n, t, x;", ".reg .pred p;", "popc.b32 n, $1;", "mov.b32 t, n;"]
    for distance in (1, 2, 4, 8, 16):
        lines += [f"shfl.sync.up.b32 x|p, t, {distance}, 0, -1;", "@p add.s32 t, t, x;"]
    return "\n".join([*lines, "sub.s32 t, t, n;", "add.s32 $0, t, $2;", "}"])


@triton.jit
def places(word, start, R: tl.constexpr, INTERPRET: tl.constexpr):
    """int32: the place of the first code of each lane's word, that of lane 0's at ``start``."""
    if INTERPRET:
        count = tl.reshape(bits_set(word, INTERPRET), [R, LANES])
        result = start + tl.reshape(tl.cumsum(count, axis=1) - count, [R * LANES])
    else:
        text: tl.constexpr = scan_assembly()
        result = tl.inline_asm_elementwise(text, "=r,r,r", [word, start], tl.int32, is_pure=True, pack=1)
    return result


@triton.constexpr_function
def sum_assembly(senders, whole):
    """PTX of ``add_four``: all senders' loads, then their sums in order, then the store."""
    lines = ["{", ".reg .b32 t, z;", ".reg .b64 a;", ".reg .f32 s0, s1, s2, s3, v;"]
    lines += [".reg .pred p0, p1, p2, p3;"]
    for w in range(senders):
        word, codes = f"${7 + w}", f"${7 + senders + w}"
        lines.append(f".reg .b32 c{w}0, c{w}1, c{w}2, c{w}3;")
        for pair in range(2):
            lines += [f"and.b32 t, {word}, ${3 + pair};", "popc.b32 t, t;", "shl.b32 t, t, 1;"]
            lines += ["cvt.u64.u32 a, t;", f"add.s64 a, a, {codes};"]
            lines += [f"ld.global.nc.s16 c{w}{2 * pair + i}, [a+{2 * i}];" for i in range(2)]
    lines += [f"mov.f32 s{i}, $6;" for i in range(4)]
    for w in range(senders):
        lines.append(f"shr.u32 z, ${7 + w}, $5;")
        for i in range(4):
            lines += [f"and.b32 t, z, {1 << i};", f"setp.ne.u32 p{i}, t, 0;"]
        for pair in range(2):
            lines.append(f"selp.b32 c{w}{2 * pair + 1}, c{w}{2 * pair + 1}, c{w}{2 * pair}, p{2 * pair};")
        for i in range(4):
            lines.append(f"cvt.rn.f32.s32 v, c{w}{i};")
            lines.append(f"@p{i} fma.rn.f32 s{i}, v, ${7 + 2 * senders + w}, s{i};")
    lines += ["setp.gt.s32 p0, $2, 3;", "@p0 st.global.v4.f32 [$1+0], {s0, s1, s2, s3};"]
    if not whole:
        lines.append("setp.lt.s32 p0, $2, 4;")
        for i in range(3):
            lines += [f"setp.gt.and.s32 p1, $2, {i}, p0;", f"@p1 st.global.f32 [$1+{4 * i}], s{i};"]
    return "\n".join([*lines, "mov.b32 $0, 0;", "}"])


@triton.jit
def add_four(
    out, left, below, shift, first, words, codes, steps,
    W: tl.constexpr, WHOLE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Store at ``out`` the sums of four values, of the first ``left``, and ``first``: fp32.

    Args:
        below: the bits of a word before the four, which begin at ``shift``.
        words, codes, steps: of each sender, the word, where its first code lies, and the step of codes.
    """
    if INTERPRET:
        for i in tl.static_range(4):
            result = first
            for w in tl.static_range(W):
                member = ((words[w] >> (shift + i)) & 1) != 0
                rank = bits_set(words[w] & ((below << i) | ((1 << i) - 1)), INTERPRET)
                code = tl.load(codes[w] + rank, mask=member, other=0)
                result += tl.where(member, code.to(tl.float32) * steps[w], 0.0)
            tl.store(out + i, result, mask=left > i)
    else:
        text: tl.constexpr = sum_assembly(W, WHOLE)
        kinds: tl.constexpr = "=r,l,r,r,r,r,f" + ",r" * W + ",l" * W + ",f" * W
        inputs = (out.to(tl.int64), left, below, (below << 2) | 3, shift, first)
        inputs = inputs + words + codes + steps
        tl.inline_asm_elementwise(text, kinds, inputs, tl.int32, is_pure=False, pack=1)


@triton.jit
def address(base, place, INTERPRET: tl.constexpr):
    """Where the code lies that is 2 * ``place`` bytes behind ``base``; int64, but for the interpreter."""
    if INTERPRET:
        result = base + place
    else:
        result = base.to(tl.int64) + (place * 2).to(tl.uint32).to(tl.int64)
    return result


@triton.jit
def before_in_tile(words, row, lane, back: tl.constexpr):
    """int32: a lane's word of the row ``back`` rows before, 0 if that is of another tile."""
    return tl.load(words + (row - back) * LANES + lane, mask=row % TILE_ROWS >= back, other=0)


@triton.jit
def sum_kernel(
    values, words, starts, exponents, total,
    numel, rows, values_stride, words_stride, exponents_stride,
    W: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRET: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Add the values of W senders in fp32, one after the other. R rows a program of R warps."""
    index = tl.arange(0, R * LANES)
    lane, row = index & 31, tl.program_id(0) * R + (index >> 5)
    there = tl.minimum(row, rows - 1)
    first = tl.zeros([R * LANES], tl.float32)
    # all senders' loads first: assembly below, the prefetches' above all, is not moved past by later loads
    for w in tl.static_range(W):
        of_sender = words + tl.full((), w, tl.int64) * words_stride
        word = (tl.load(of_sender + there * LANES + lane),)
        one = (before_in_tile(of_sender, there, lane, 1),)
        two = (before_in_tile(of_sender, there, lane, 2),)
        three = (before_in_tile(of_sender, there, lane, 3),)
        inside = (tl.load(starts + tl.full((), w, tl.int64) * words_stride + there // TILE_ROWS),)
        exponent = (tl.load(exponents + tl.full((), w, tl.int64) * exponents_stride + there).to(tl.int32),)
        base = (values + tl.full((), w, tl.int64) * values_stride,)
        if w == 0:
            held, ones, twos, threes, begins = word, one, two, three, inside
            found, bases = exponent, base
        else:
            held, ones, twos, threes, begins = (
                held + word,
                ones + one,
                twos + two,
                threes + three,
                begins + inside,
            )
            found, bases = found + exponent, bases + base
    for w in tl.static_range(W):
        part = bits_set(ones[w], INTERPRET) + bits_set(twos[w], INTERPRET) + bits_set(threes[w], INTERPRET)
        start = begins[w] + over_warp(part, False, R, INTERPRET)
        first = tl.where(found[w] == 255, float("nan"), first)
        step = (step_of(found[w], BITS, FLOOR),)
        place = (places(held[w], start, R, INTERPRET),)
        if w == 0:
            at, steps = place, step
        else:
            at, steps = at + place, steps + step
    for w in tl.static_range(W):
        prefetch(address(bases[w], at[w], INTERPRET), INTERPRET)
    offset = (lane >> 2) * 32 + (lane & 3) * 4
    begin = row.to(tl.int64) * WIDTH
    out = total + begin + offset
    left = tl.minimum(numel - begin, WIDTH).to(tl.int32) - offset
    for s in tl.static_range(WIDTH // 256):
        add_eight(out + s * 256, left - s * 256, s * 8, lane, first, held, at, bases, steps,
                  W, WHOLE, INTERPRET, R)  # fmt: skip


@triton.jit
def add_eight(
    out, left, word, lane, first, words, places, bases, steps,
    W: tl.constexpr, WHOLE: tl.constexpr, INTERPRET: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """``add_four`` for both halves of the words from number ``word`` on, of the row's."""
    for w in tl.static_range(W):
        found, place = look_up(words[w], places[w], word + (lane >> 2), True, R, INTERPRET)
        one, code = (found,), (address(bases[w], place, INTERPRET),)
        if w == 0:
            held, codes = one, code
        else:
            held, codes = held + one, codes + code
    shift = (lane & 3) * 4
    for half in tl.static_range(2):
        below = (1 << (shift + 16 * half)) - 1
        add_four(out + 16 * half, left - 16 * half, below, shift + 16 * half, first, held, codes, steps,
                 W, WHOLE, INTERPRET)  # fmt: skip
