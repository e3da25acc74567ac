"""Triton kernels that pack sparse values, a warp a row of 1024.

Tensors have one element a thread. Word w of a row's bitmap is what the lanes of its warp vote on value 32 w
and their own number: so that what they store lies side by side. Codes are brought into place in two steps,
first to the row's own start, then to behind those of the rows before: no row waits for another.
"""

import triton
import triton.language as tl

from taco_kernels.packed.kernels import (
    as_words,
    bits_of,
    bits_set,
    kept,
    number,
    offsets,
    over_warp,
    ranks,
    start_of,
    step_of,
)

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


@triton.jit
def squeeze_kernel(
    x, remainder, thresholds, codes_of_rows, counts, sums, words, exponents,
    numel, rows, tiles, x_stride, remainder_stride, words_stride, exponents_stride,
    KEEP_REMAINDER: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    INTERPRET: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """All of an encode but the place in the wire: a row's codes end to end at the row's own start.

    Reads x once; rows do not wait for those before them. A tile of R rows a program, with its sum of counts.
    """
    shard = tl.program_id(1).to(tl.int64)
    index = tl.arange(0, R * LANES)
    lane, row = index & 31, tl.program_id(0) * R + (index >> 5)
    begin = row.to(tl.int64) * WIDTH
    left = tl.maximum(tl.minimum(numel - begin, WIDTH), 0).to(tl.int32) - lane
    at = x + shard * x_stride + begin + lane
    values = load_each_word(at, left, WIDTH // LANES, INTERPRET)
    most = values[0] & 0x7FFFFFFF
    for w in tl.static_range(1, WIDTH // LANES):
        most = tl.maximum(most, values[w] & 0x7FFFFFFF)
    threshold = tl.maximum(tl.load(thresholds + shard).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = over_warp(most, True, R, INTERPRET) >> 23
    step = step_of(exponent, BITS, FLOOR)
    out = codes_of_rows + (shard * rows * WIDTH + begin)
    rest_at = remainder + shard * remainder_stride + begin + lane
    before = (1 << lane) - 1
    count, word = tl.zeros([R * LANES], tl.int32), tl.zeros([R * LANES], tl.int32)
    for w in tl.static_range(WIDTH // LANES):
        value = values[w].to(tl.float32, bitcast=True)
        codes, keep = kept(value, threshold, exponent, BITS, FLOOR)
        if KEEP_REMAINDER:
            if BITS < 32:
                rest = tl.where(keep, value - number(codes) * step, value)  # exact
            else:
                rest = tl.where(keep, 0.0, value)
            put(rest_at + w * LANES, rest, left, w * LANES, INTERPRET)
        vote = ballot(keep, lane, R, INTERPRET)
        rank = count + bits_set(vote & before, INTERPRET)
        put(out + rank, codes, keep.to(tl.int32), 0, INTERPRET)
        word = tl.where(lane == w, vote, word)
        count += bits_set(vote, INTERPRET)
    there = row < rows
    tl.store(words + shard * words_stride + row * LANES + lane, word, mask=there)
    tl.store(counts + shard * rows + row, count, mask=there & (lane == 0))
    tl.store(exponents + shard * exponents_stride + row, exponent.to(tl.uint8), mask=there & (lane == 0))
    tl.store(sums + shard * tiles + tl.program_id(0), tl.sum(tl.where(lane == 0, count, 0), axis=0))


@triton.jit
def take_back(
    remainder, codes, words, exponent, sent,
    KEEP_REMAINDER: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Out of a row's bitmap and into its remainder with all codes from number ``sent`` on."""
    lane = tl.arange(0, LANES)
    bitmap = tl.load(words + lane)
    tl.debug_barrier()  # other threads' loads come before these words are written
    member = bits_of(bitmap)
    _, rank = ranks(bitmap, INTERPRET)
    tl.store(words + lane, as_words(member & (rank < sent)))
    if KEEP_REMAINDER:
        back = member & (rank >= sent)
        code = tl.load(codes + rank, mask=back, other=0)
        pointers = remainder + offsets(WIDTH)
        if BITS < 32:  # exact again: the value was split without rounding
            rest = tl.load(pointers, mask=back, other=0.0)
            value = rest + number(code.to(tl.int32)) * step_of(exponent, BITS, FLOOR)
        else:
            value = code.to(tl.float32, bitcast=True)
        tl.store(pointers, value, mask=back)


@triton.jit
def move_kernel(
    remainder, codes_of_rows, counts, sums, values, words, exponents,
    rows, tiles, capacity, room, remainder_stride, values_stride, words_stride, exponents_stride,
    KEEP_REMAINDER: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    INTERPRET: tl.constexpr, R: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Rows' codes to behind those of the rows before; ``sums`` are of tiles of R rows, N as start_of has it.

    What the capacity has no room for is taken back. Programs from ``tiles`` on write zeros behind the last
    code, up to ``room``, Z times 32 R a program, and behind the exponents. K codes a lane are under way.
    """
    shard = tl.program_id(1).to(tl.int64)
    values += shard * values_stride
    exponents += shard * exponents_stride
    counts += shard * rows
    sums += shard * tiles
    index = tl.arange(0, R * LANES)
    lane = index & 31
    if tl.program_id(0) < tiles:
        first = tl.program_id(0) * R
        row = first + (index >> 5)
        count = tl.load(counts + row, mask=row < rows, other=0)
        start = tl.zeros([R * LANES], tl.int32)
        for r in tl.static_range(R - 1):
            size = tl.load(counts + first + r, mask=first + r < rows, other=0)
            start += tl.where(first + r < row, size, 0)
        start_of_tile = start_of(sums, tl.program_id(0), N)  # behind the other loads: it waits for its own
        start += start_of_tile
        sent = tl.maximum(tl.minimum(capacity - start, count), 0)
        source = codes_of_rows + (shard * rows + row) * WIDTH + lane
        target = values + start.to(tl.int64) + lane
        left = sent - lane
        at = 0
        most = tl.max(sent, axis=0)
        while at < most:
            for k in tl.static_range(K):
                code = (tl.load(source + k * LANES, mask=left > k * LANES, other=0),)
                if k == 0:
                    held = code
                else:
                    held = held + code
            for k in tl.static_range(K):
                tl.store(target + k * LANES, held[k], mask=left > k * LANES)
            source += K * LANES
            target += K * LANES
            left -= K * LANES
            at += K * LANES
        if tl.max(count - sent, axis=0) > 0:
            start_of_this = start_of_tile
            this = first.to(tl.int64)
            last = tl.minimum(this + R, rows)
            while this < last:
                found = tl.load(counts + this)
                fit = tl.maximum(capacity - start_of_this, 0)
                if found > fit:
                    take_back(
                        remainder + shard * remainder_stride + this * WIDTH,
                        codes_of_rows + (shard * rows + this) * WIDTH,
                        words + shard * words_stride + this * LANES,
                        tl.load(exponents + this).to(tl.int32), fit,
                        KEEP_REMAINDER, BITS, FLOOR, WIDTH, INTERPRET,
                    )  # fmt: skip
                start_of_this += found
                this += 1
    else:
        tile = tl.program_id(0) - tiles
        used = start_of(sums, tiles - 1, N)
        last = (tiles - 1) * R
        for r in tl.static_range(R):
            used += tl.load(counts + last + r, mask=last + r < rows, other=0)
        used = tl.minimum(used, capacity)
        SIZE: tl.constexpr = Z * R * LANES
        if (tile + 1) * SIZE > used:
            place = tile * SIZE + tl.arange(0, SIZE)
            zero = tl.zeros([SIZE], tl.int32).to(values.dtype.element_ty)
            tl.store(values + place, zero, mask=(place >= used) & (place < room))
        if tile == 0:
            pad = rows + tl.arange(0, 64)
            tl.store(exponents + pad, tl.zeros([64], tl.uint8), mask=pad < (rows + 63) // 64 * 64)
