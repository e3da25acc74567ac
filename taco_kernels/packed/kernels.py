"""Triton kernels that pack sparse values and add packed ones up.

A row of 1024 values is 32 words of a bitmap. The place of a value among those of its row is what the words
before its own hold, plus the bits below it in its word.
"""

import triton
import triton.language as tl

from taco_kernels.triton.rounding import MAGIC

LANES = tl.constexpr(32)


@triton.jit
def bits_set(word, INTERPRET: tl.constexpr):
    """int32: how many bits of int32 words are set."""
    if INTERPRET:
        word = word - ((word >> 1) & 0x55555555)
        word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
        count = (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24) & 63
    else:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], tl.int32, True, 1)
    return count


@triton.jit
def as_words(keep):
    """int32[32]: the words of keep[32, 32]."""
    return tl.sum(keep.to(tl.int32) << tl.arange(0, LANES)[None, :], axis=1)


@triton.jit
def bits_of(words):
    """Whether each bit of int32[32] is set, [32, 32]."""
    return ((words[:, None] >> tl.arange(0, LANES)[None, :]) & 1) != 0


@triton.jit
def ranks(words, INTERPRET: tl.constexpr):
    """Of a bitmap row int32[32]: its bits, and how many lie before each of them, [32, 32]."""
    size = bits_set(words, INTERPRET)
    before = tl.cumsum(size, axis=0) - size
    below = (1 << tl.arange(0, LANES)) - 1
    return tl.sum(size, axis=0), before[:, None] + bits_set(words[:, None] & below[None, :], INTERPRET)


@triton.jit
def offsets(WIDTH: tl.constexpr):
    """int32[32, 32]: numbers of the values of a row."""
    return (tl.arange(0, WIDTH // LANES) * LANES)[:, None] + tl.arange(0, LANES)[None, :]


@triton.jit
def inside(row, numel, WHOLE: tl.constexpr, WIDTH: tl.constexpr):
    """Which values of a row lie below ``numel``, four alike where that is a multiple of 4 (WHOLE)."""
    offset = offsets(WIDTH)
    if WHOLE:
        offset = offset // 4 * 4
    return offset < tl.minimum(numel - row * WIDTH, WIDTH).to(tl.int32)


@triton.jit
def step_of(exponent, BITS: tl.constexpr, FLOOR: tl.constexpr):
    """fp32 grid step of a row with this int32 exponent, of integer values."""
    e = tl.minimum(tl.maximum(exponent, FLOOR), 254)
    return ((e + 2 - BITS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def number(code):
    """fp32 of int32 codes below 2^22: a sum, for conversions are slow."""
    return (code + 0x4B400000).to(tl.float32, bitcast=True) - MAGIC


@triton.jit
def kept(value, threshold, exponent, BITS: tl.constexpr, FLOOR: tl.constexpr):
    """int32 codes (the value's own bits where BITS is 32) and whether they are to be sent, [32, 32]."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    threshold = tl.where(exponent == 255, 0x7FFFFFFF, threshold)  # above infinity and every usual NaN
    keep = bits >= threshold
    if BITS < 32:
        e = tl.minimum(tl.maximum(exponent, FLOOR), 254)
        inverse = ((252 + BITS - e) << 23).to(tl.float32, bitcast=True)
        codes = (value * inverse + MAGIC).to(tl.int32, bitcast=True) - 0x4B400000  # the bits of MAGIC
        LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
        codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST)
        keep = keep & (codes != 0)
    else:
        codes = value.to(tl.int32, bitcast=True)
    return codes, keep & (exponent != 255)


@triton.jit
def squeeze_kernel(
    x, remainder, thresholds, codes_of_rows, counts, words, exponents,
    numel, rows, x_stride, remainder_stride, words_stride, exponents_stride,
    KEEP_REMAINDER: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """All of an encode but the place in the wire: a row's codes end to end at the row's own start.

    Reads x once; rows do not wait for those before them. One row a program.
    """
    shard, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    offset, mask = offsets(WIDTH), inside(row, numel, WHOLE, WIDTH)
    value = tl.load(x + shard * x_stride + row * WIDTH + offset, mask=mask, other=0.0)
    threshold = tl.maximum(tl.load(thresholds + shard).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.max(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0) >> 23
    codes, keep = kept(value, threshold, exponent, BITS, FLOOR)
    if KEEP_REMAINDER:
        if BITS < 32:
            rest = tl.where(keep, value - number(codes) * step_of(exponent, BITS, FLOOR), value)  # exact
        else:
            rest = tl.where(keep, 0.0, value)
        tl.store(remainder + shard * remainder_stride + row * WIDTH + offset, rest, mask=mask)
    bitmap = as_words(keep)
    count, rank = ranks(bitmap, INTERPRET)
    codes = codes.to(codes_of_rows.dtype.element_ty)
    tl.store(codes_of_rows + (shard * rows + row) * WIDTH + rank, codes, mask=keep)
    tl.store(words + shard * words_stride + row * LANES + tl.arange(0, LANES), bitmap)
    tl.store(counts + shard * rows + row, count)
    tl.store(exponents + shard * exponents_stride + row, exponent.to(tl.uint8))


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
    remainder, codes_of_rows, counts, ends, values, words, exponents,
    rows, row_tiles, capacity, room, remainder_stride, values_stride, words_stride, exponents_stride,
    KEEP_REMAINDER: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    INTERPRET: tl.constexpr, T: tl.constexpr, K: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """Rows' codes to behind those of the rows before; ``ends`` are running sums of the counts.

    What the capacity has no room for is taken back. Programs from ``row_tiles`` on write zeros behind the
    last code, up to ``room``, Z a program, and behind the exponents.
    """
    shard = tl.program_id(1).to(tl.int64)
    values += shard * values_stride
    exponents += shard * exponents_stride
    if tl.program_id(0) < row_tiles:
        row = tl.program_id(0) * T + tl.arange(0, T)
        count = tl.load(counts + shard * rows + row, mask=row < rows, other=0)
        start = tl.load(ends + shard * rows + row, mask=row < rows, other=0) - count
        sent = tl.maximum(tl.minimum(capacity - start, count), 0)
        begin = (shard * rows + row) * WIDTH
        most = tl.max(sent, axis=0)
        at = 0
        while at < most:
            k = at + tl.arange(0, K)[None, :]
            mask = k < sent[:, None]
            code = tl.load(codes_of_rows + (begin[:, None] + k), mask=mask, other=0)
            tl.store(values + (start[:, None] + k), code, mask=mask)
            at += K
        if tl.max(count - sent, axis=0) > 0:
            this = tl.program_id(0).to(tl.int64) * T
            last = tl.minimum(this + T, rows)
            while this < last:
                found = tl.load(counts + shard * rows + this)
                fit = tl.maximum(capacity - (tl.load(ends + shard * rows + this) - found), 0)
                if found > fit:
                    take_back(
                        remainder + shard * remainder_stride + this * WIDTH,
                        codes_of_rows + (shard * rows + this) * WIDTH,
                        words + shard * words_stride + this * LANES,
                        tl.load(exponents + this).to(tl.int32), fit,
                        KEEP_REMAINDER, BITS, FLOOR, WIDTH, INTERPRET,
                    )  # fmt: skip
                this += 1
    else:
        tile = tl.program_id(0) - row_tiles
        used = tl.minimum(tl.load(ends + shard * rows + rows - 1), capacity)
        if (tile + 1) * Z > used:
            place = tile * Z + tl.arange(0, Z)
            zero = tl.zeros([Z], tl.int32).to(values.dtype.element_ty)
            tl.store(values + place, zero, mask=(place >= used) & (place < room))
        if tile == 0:
            pad = rows + tl.arange(0, 64)
            tl.store(exponents + pad, tl.zeros([64], tl.uint8), mask=pad < (rows + 63) // 64 * 64)


@triton.jit
def sent_values(
    values, words, exponents, start, row, BITS: tl.constexpr, FLOOR: tl.constexpr, INTERPRET: tl.constexpr
):
    """fp32[32, 32]: what one sender has sent of a row, whose first code is number ``start``."""
    bitmap = tl.load(words + row * LANES + tl.arange(0, LANES))
    exponent = tl.load(exponents + row).to(tl.int32)
    _, rank = ranks(bitmap, INTERPRET)
    # the others load the next value that is there, cheaper than a mask; the bitmap lies behind the last one
    code = tl.load(values + start + rank).to(tl.int32)
    if BITS < 32:
        step = tl.where(exponent == 255, float("nan"), step_of(exponent, BITS, FLOOR))
        SIGN: tl.constexpr = 2 ** (BITS - 1)
        code = ((code & (2 * SIGN - 1)) ^ SIGN) | 0x4B000000  # 2^23 and the code plus SIGN
        value = code.to(tl.float32, bitcast=True) - (8388608.0 + SIGN)
        value = tl.where(bits_of(bitmap), value, 0.0) * step  # exact, as if added in one
    else:
        value = tl.where(bits_of(bitmap), code.to(tl.float32, bitcast=True), 0.0)
        value = tl.where(exponent == 255, float("nan"), value)
    return value


@triton.jit
def decode_sum_kernel(
    values, words, exponents, before, starts, total,
    numel, rows, tiles, senders, values_stride, words_stride, exponents_stride,
    W: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRET: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the senders' values of a row in fp32, one sender after the other. W: senders, if few, else 0.

    Of any number of bits, and of any number of senders; see sum_kernels.py for 16 bits and a few.
    """
    row = tl.program_id(0).to(tl.int64)
    result = tl.zeros([WIDTH // LANES, LANES], tl.float32)
    if W > 0:  # unrolled, so that the senders' loads are in flight together
        for w in tl.static_range(0, W):
            at = tl.full((), w, tl.int64)
            result += sent_values(
                values + at * values_stride, words + at * words_stride, exponents + at * exponents_stride,
                tl.load(starts + at * tiles + row // T) + tl.load(before + at * rows + row),
                row, BITS, FLOOR, INTERPRET,
            )  # fmt: skip
    else:
        sender = 0
        while sender < senders:
            at = tl.full((), 0, tl.int64) + sender
            result += sent_values(
                values + at * values_stride, words + at * words_stride, exponents + at * exponents_stride,
                tl.load(starts + at * tiles + row // T) + tl.load(before + at * rows + row),
                row, BITS, FLOOR, INTERPRET,
            )  # fmt: skip
            sender += 1
    tl.store(total + row * WIDTH + offsets(WIDTH), result, mask=inside(row, numel, WHOLE, WIDTH))
