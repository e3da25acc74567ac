"""Triton kernel that packs sparse values in one pass, a warp a row of 1024.

Tensors have one element a thread. Word w of a row's bitmap is what the lanes of its warp vote on value 32 w
and their own number: so that what they store lies side by side. Where a tile's codes begin is found by
look_back.py.
"""

import triton
import triton.language as tl

from taco_kernels.bitmap_sparse.kernels import TILE_ROWS, bits_set, look_up, over_warp, step_of
from taco_kernels.bitmap_sparse.look_back import COUNTED, REACHED, look_back, publish
from taco_kernels.common.rounding import MAGIC, grid_exponent, threshold_bits

LANES = tl.constexpr(32)
BALLOT = tl.constexpr("{\n.reg .pred p;\nsetp.ne.u32 p, $1, 0;\nvote.sync.ballot.b32 $0, p, -1;\n}")


@triton.jit
def ballot(flag, lane, R: tl.constexpr, INTERPRET: tl.constexpr):
    """int32, the same in all lanes of a warp: a bit a lane, whether its ``flag`` is set."""
    if INTERPRET:
        words = tl.sum(tl.reshape(flag.to(tl.int32) << lane, [R, LANES]), axis=1)
        result = tl.reshape(tl.broadcast_to(words[:, None], [R, LANES]), [R * LANES])
    else:
        result = tl.inline_asm_elementwise(
            BALLOT, "=r,r", [flag.to(tl.int32)], tl.int32, is_pure=True, pack=1
        )
    return result


@triton.constexpr_function
def put_assembly(bits):
    return f"{{\n.reg .pred p;\nsetp.gt.s32 p, $3, $4;\n@p st.global.b{bits} [$1], $2;\nmov.b32 $0, 0;\n}}"


@triton.jit
def put(pointers, value, a, b, INTERPRET: tl.constexpr):
    """Store where a > b, int32. In assembly, for Triton takes seconds to lay out a hundred stores."""
    if INTERPRET:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=a > b)
    else:
        text: tl.constexpr = put_assembly(pointers.dtype.element_ty.primitive_bitwidth)
        inputs = (pointers.to(tl.int64), value.to(tl.int32, bitcast=True), a, b)
        tl.inline_asm_elementwise(text, "=r,l,r,r,r", inputs, tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def put_code_assembly(bits):
    """Store $2 where $3 has the lane's bit $6: $4 and the bits of $3 below it, $5, codes behind $1."""
    lines = ["{", ".reg .pred p;", ".reg .b32 t, u;", ".reg .b64 a;"]
    lines += ["and.b32 t, $3, $5;", "popc.b32 t, t;", "add.s32 t, t, $4;"]
    lines += [f"mad.wide.s32 a, t, {bits // 8}, $1;", "and.b32 u, $3, $6;", "setp.ne.u32 p, u, 0;"]
    return "\n".join([*lines, f"@p st.global.b{bits} [a], $2;", "mov.b32 $0, 0;", "}"])


@triton.jit
def put_code(values, code, vote, place, lane, INTERPRET: tl.constexpr):
    """Store a lane's code where ``vote`` has its bit; the codes of a vote begin at ``place``."""
    below = (1 << lane) - 1
    if INTERPRET:
        where = values + place + bits_set(vote & below, INTERPRET)
        tl.store(where, code.to(values.dtype.element_ty), mask=((vote >> lane) & 1) != 0)
    else:
        text: tl.constexpr = put_code_assembly(values.dtype.element_ty.primitive_bitwidth)
        inputs = (values.to(tl.int64), code, vote, place, below, 1 << lane)
        tl.inline_asm_elementwise(text, "=r,l,r,r,r,r,r", inputs, tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def load_assembly(count):
    lines = ["{", ".reg .pred p;"]
    for i in range(count):
        lines += [f"mov.b32 ${i}, 0;", f"setp.gt.s32 p, ${count + 1}, {32 * i};"]
        lines.append(f"@p ld.global.b32 ${i}, [${count}+{128 * i}];")
    return "\n".join([*lines, "}"])


@triton.jit
def load_each_word(pointers, left, WORDS: tl.constexpr, INTERPRET: tl.constexpr):
    """int32 bits of fp32: what lies there, 32 values on and so forth; 0 from the ``left``-th value on."""
    if INTERPRET:
        for w in tl.static_range(WORDS):
            value = (tl.load(pointers + w * LANES, mask=left > w * LANES, other=0.0),)
            bits = (value[0].to(tl.int32, bitcast=True),)
            if w == 0:
                found = bits
            else:
                found = found + bits
    else:
        text: tl.constexpr = load_assembly(WORDS)
        registers: tl.constexpr = "=&r," * WORDS + "l,r"
        kinds: tl.constexpr = (tl.int32,) * WORDS
        inputs = (pointers.to(tl.int64), left)
        found = tl.inline_asm_elementwise(text, registers, inputs, kinds, is_pure=False, pack=1)
    return found


@triton.constexpr_function
def vote_assembly(count):
    """$0: in lane w, the votes on whether the magnitude of value w exceeds the lane's limit."""
    limit, lane = f"${count + 1}", f"${count + 2}"
    lines = ["{", ".reg .pred p, q;", ".reg .b32 v;", ".reg .f32 a;", "mov.b32 $0, 0;"]
    for i in range(count):
        lines += [f"mov.b32 a, ${i + 1};", "abs.f32 a, a;", f"setp.gt.f32 p, a, {limit};"]
        lines += ["vote.sync.ballot.b32 v, p, -1;", f"setp.eq.u32 q, {lane}, {i};", "@q mov.b32 $0, v;"]
    return "\n".join([*lines, "}"])


@triton.jit
def bitmap_of(values, limit, lane, WORDS: tl.constexpr, R: tl.constexpr, INTERPRET: tl.constexpr):
    """int32: in lane w, which magnitudes of ``values[w]``, bits of fp32, exceed the lanes' ``limit``."""
    if INTERPRET:
        word = tl.zeros([R * LANES], tl.int32)
        for w in tl.static_range(WORDS):
            more = tl.abs(values[w].to(tl.float32, bitcast=True)) > limit
            word = tl.where(lane == w, ballot(more, lane, R, INTERPRET), word)
    else:
        text: tl.constexpr = vote_assembly(WORDS)
        registers: tl.constexpr = "=&r" + ",r" * WORDS + ",f,r"
        inputs = values + (limit,) + (lane,)  # noqa: RUF005 - the compiler knows no star
        word = tl.inline_asm_elementwise(text, registers, inputs, tl.int32, is_pure=False, pack=1)
    return word


@triton.jit
def limit_of(threshold, exponent, BITS: tl.constexpr, FLOOR: tl.constexpr):
    """fp32 that magnitudes of a row must exceed to be sent, from int32 bits of a threshold of at least 1.

    At or above a threshold is above the number before it. Half a step and less rounds to 0, ties to even.
    Nothing exceeds a NaN, the limit of rows that have one or an infinity.
    """
    limit = tl.maximum(threshold - 1, (grid_exponent(exponent, FLOOR) + 1 - BITS) << 23)
    return tl.where(exponent == 255, 0x7FFFFFFF, limit).to(tl.float32, bitcast=True)


@triton.jit
def code_of(value, inverse, BITS: tl.constexpr):
    """int32 with the code in its lowest BITS bits: those of MAGIC plus the code."""
    LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
    value = tl.minimum(tl.maximum(value * inverse + MAGIC, MAGIC - LARGEST), MAGIC + LARGEST)
    return value.to(tl.int32, bitcast=True)


@triton.jit
def sent_of(code, step):
    """fp32 that a code of ``code_of`` stands for."""
    return (code.to(tl.float32, bitcast=True) - MAGIC) * step


@triton.jit
def put_codes(
    values, codes, word, place, lane, WORDS: tl.constexpr, R: tl.constexpr, INTERPRET: tl.constexpr
):
    """Store a row's codes, those of the word that a lane has from ``place`` on."""
    for w in tl.static_range(WORDS):
        vote, at = look_up(word, place, tl.full([R * LANES], w, tl.int32), False, R, INTERPRET)
        put_code(values, codes[w], vote, at, lane, INTERPRET)


# Add a code of ``code_of``, $2, times $3, to what lies at $1, where $4 is set. Exact: the value was split
# without rounding; not as it was split, lest 32 are kept.
PUT_BACK = tl.constexpr(
    """{
.reg .pred p;
.reg .b32 t;
.reg .f32 r, v;
setp.ne.u32 p, $4, 0;
sub.s32 t, $2, 0x4B400000;
cvt.rn.f32.s32 v, t;
@p ld.global.f32 r, [$1];
fma.rn.f32 r, v, $3, r;
@p st.global.f32 [$1], r;
mov.b32 $0, 0;
}"""
)


@triton.jit
def put_back(pointers, code, step, flag, INTERPRET: tl.constexpr):
    """What was not sent after all into the remainder, where ``flag`` is set."""
    if INTERPRET:
        value = tl.load(pointers, mask=flag, other=0.0) + sent_of(code, step)
        tl.store(pointers, value, mask=flag)
    else:
        inputs = (pointers.to(tl.int64), code, step, flag.to(tl.int32))
        tl.inline_asm_elementwise(PUT_BACK, "=r,l,r,f,r", inputs, tl.int32, is_pure=False, pack=1)


@triton.jit
def put_what_fits(
    values, codes, word, place, lane, rest_at, step, capacity,
    KEEP_REMAINDER: tl.constexpr, WORDS: tl.constexpr, R: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """``put_codes`` below ``capacity``; what has no room goes back into the remainder. Returns the words."""
    fit = tl.zeros([R * LANES], tl.int32)
    for w in tl.static_range(WORDS):
        vote, at = look_up(word, place, tl.full([R * LANES], w, tl.int32), False, R, INTERPRET)
        at += bits_set(vote & ((1 << lane) - 1), INTERPRET)
        member = ((vote >> lane) & 1) != 0
        sent = member & (at < capacity)
        put(values + at, codes[w], sent.to(tl.int32), 0, INTERPRET)
        fit = tl.where(lane == w, ballot(sent, lane, R, INTERPRET), fit)
        if KEEP_REMAINDER:
            back = member & (at >= capacity)
            put_back(rest_at + w * LANES, codes[w], step, back, INTERPRET)
    return fit


@triton.jit
def zero_behind(
    values, starts, exponents, rows, used, room, this, programs, index, SIZE: tl.constexpr, Z: tl.constexpr
):
    """Write zeros behind ``used`` codes, up to ``room``, and behind starts and exponents."""
    zero = tl.zeros([SIZE], tl.int32).to(values.dtype.element_ty)
    place = used + this * (Z * SIZE)
    while place < room:
        for z in tl.static_range(Z):
            at = place + z * SIZE + index
            tl.store(values + at, zero, mask=at < room)
        place += programs * (Z * SIZE)
    if this == 0:
        pad = tl.arange(0, 64)
        tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
        tl.store(starts + tiles + pad, tl.zeros([64], tl.int32), mask=tiles + pad < (tiles + 15) // 16 * 16)
        tl.store(exponents + rows + pad, tl.zeros([64], tl.uint8), mask=rows + pad < (rows + 63) // 64 * 64)


@triton.jit
def pack_kernel(
    x, remainder, thresholds, status, values, words, starts, exponents,
    numel, rows, tiles, capacity, room, zeroing,
    x_stride, remainder_stride, values_stride, words_stride, exponents_stride,
    KEEP_REMAINDER: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    INTERPRET: tl.constexpr, R: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """An encode. A tile of R rows a program; ``status`` is a word a tile, see look_back.py, zero at first.

    The programs behind the tiles, ``zeroing`` of them, write zeros behind the last code, up to ``room``, Z
    times 32 R at a time, and behind starts and exponents. Programs wait for those of lower numbers, of their
    shard; they end because blocks are started in the order of their numbers, the first axis first, and
    whatever runs stays on its multiprocessor until it ends.
    """
    shard, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    status += shard * tiles
    values += shard * values_stride
    starts += shard * words_stride
    exponents += shard * exponents_stride
    index = tl.arange(0, R * LANES)
    lane = index & 31
    if tile < tiles:
        WORDS: tl.constexpr = WIDTH // LANES
        row = tile * R + (index >> 5)
        there = row < rows
        begin = row.to(tl.int64) * WIDTH
        left = tl.maximum(tl.minimum(numel - begin, WIDTH), 0).to(tl.int32) - lane
        of_shard = x + shard * x_stride
        found = load_each_word(of_shard + begin + lane, left, WORDS, INTERPRET)
        threshold = threshold_bits(thresholds, shard)
        most = found[0] & 0x7FFFFFFF
        for w in tl.static_range(1, WORDS):
            most = tl.maximum(most, found[w] & 0x7FFFFFFF)
        exponent = over_warp(most, True, R, INTERPRET) >> 23
        limit = limit_of(threshold, exponent, BITS, FLOOR)
        word = bitmap_of(found, limit, lane, WORDS, R, INTERPRET)
        size = bits_set(word, INTERPRET)
        count = tl.sum(size, axis=0)
        publish(status + tile, count, COUNTED)
        # what others need is told: the rest runs while they, and the tiles before, get on
        words_at = words + (shard * words_stride + row * LANES + lane)
        tl.store(words_at, word, mask=there)
        tl.store(exponents + row, exponent.to(tl.uint8), mask=there & (lane == 0))
        # 0 that only shows once the count is there: the compiler would do what follows before it is told, and
        # keep the remainders, codes and comparisons of all words in registers meanwhile
        zero = (count >> 31).to(tl.int32)
        exponent, left, threshold = exponent + zero, left + zero, threshold + zero
        limit = limit_of(threshold, exponent, BITS, FLOOR)
        step = step_of(exponent, BITS, FLOOR)
        inverse = ((252 + BITS - grid_exponent(exponent, FLOOR)) << 23).to(tl.float32, bitcast=True)
        rest_at = remainder + shard * remainder_stride + begin + lane
        for w in tl.static_range(WORDS):
            value = found[w].to(tl.float32, bitcast=True)
            code = (code_of(value, inverse, BITS),)
            if KEEP_REMAINDER:
                rest = value - sent_of(code[0], step)  # exact
                rest = tl.where(tl.abs(value) > limit, rest, value)
                put(rest_at + w * LANES, rest, left, w * LANES, INTERPRET)
            if w == 0:
                codes = code
            else:
                codes = codes + code
        place = tl.cumsum(size, axis=0) - size
        before = look_back(status, tile, index, R * LANES)
        reached = before + count
        publish(status + tile, tl.minimum(reached, capacity), REACHED)
        place += tl.minimum(before, capacity).to(tl.int32)
        tl.store(
            starts + row // TILE_ROWS,
            tl.minimum(place, capacity),
            mask=there & (lane == 0) & (row % TILE_ROWS == 0),
        )
        if reached > capacity:
            word = put_what_fits(values, codes, word, place, lane, rest_at, step, capacity,
                                 KEEP_REMAINDER, WORDS, R, INTERPRET)  # fmt: skip
            tl.store(words_at, word, mask=there)
        else:
            put_codes(values, codes, word, place, lane, WORDS, R, INTERPRET)
    else:
        used = tl.minimum(look_back(status, tiles, index, R * LANES), capacity).to(tl.int32)
        zero_behind(values, starts, exponents, rows, used, room, tile - tiles, zeroing, index, R * LANES, Z)
