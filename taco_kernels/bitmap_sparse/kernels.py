"""Packing sparse rows and adding them up, in Triton.

A row of 1024 values is 32 words of a bitmap. The place of a value among those of its row is what the words
before its own hold, plus the bits below it in its word. Packing takes two kernels: the first counts what each
row sends, so that the second knows where each row's values begin.
"""

import triton
import triton.language as tl

from taco_kernels.bitmap_sparse import layout
from taco_kernels.common.rounding import MAGIC, grid_exponent, threshold_bits

LANES = tl.constexpr(32)
TILE_ROWS = tl.constexpr(layout.TILE_ROWS)


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
def ranks(words, INTERPRET: tl.constexpr):
    """Of a bitmap row int32[32]: how many bits lie before each of its own, [32, 32]."""
    size = bits_set(words, INTERPRET)
    before = tl.cumsum(size, axis=0) - size
    below = (1 << tl.arange(0, LANES)) - 1
    return before[:, None] + bits_set(words[:, None] & below[None, :], INTERPRET)


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
    return ((grid_exponent(exponent, FLOOR) + 2 - BITS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_of(
    x, thresholds, row, shard, numel,
    BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A row's values and their codes, fp32[32, 32], which of them are to be sent, step and int32 exponent."""
    mask = inside(row, numel, WHOLE, WIDTH)
    value = tl.load(x + row * WIDTH + offsets(WIDTH), mask=mask, other=0.0)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.max(bits) >> 23
    inverse = ((252 + BITS - grid_exponent(exponent, FLOOR)) << 23).to(tl.float32, bitcast=True)
    LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
    code = tl.minimum(tl.maximum(value * inverse + MAGIC - MAGIC, -LARGEST), LARGEST)
    finite = tl.where(exponent == 255, 0.0, code)
    sent = (bits >= threshold_bits(thresholds, shard)) & (finite != 0.0)
    return value, code, sent, step_of(exponent, BITS, FLOOR), exponent


@triton.jit
def count_kernel(
    x, thresholds, counts, numel, rows, x_stride,
    BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """How many values of a row are to be sent, int32."""
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sent = row_of(x + shard * x_stride, thresholds, row, shard, numel, BITS, FLOOR, WIDTH, WHOLE)[2]
    tl.store(counts + shard * rows + row, tl.sum(sent.to(tl.int32)))


@triton.jit
def pack_kernel(
    x, remainder, thresholds, begins, values, words, exponents,
    numel, rows, capacity, x_stride, remainder_stride, values_stride, words_stride, exponents_stride,
    KEEP_REMAINDER: tl.constexpr,
    BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A row's codes from its place in ``begins`` on, as far as there is room; its bitmap and its exponent.

    May overwrite x by the remainder: each program reads its own row only.
    """
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    value, code, sent, step, exponent = row_of(
        x + shard * x_stride, thresholds, row, shard, numel, BITS, FLOOR, WIDTH, WHOLE
    )
    one = sent.to(tl.int32)
    size = tl.sum(one, axis=1)
    before = tl.load(begins + shard * rows + row) + tl.cumsum(size, axis=0) - size
    place = before[:, None] + tl.cumsum(one, axis=1) - one
    sent = sent & (place < capacity)
    tl.store(values + shard * values_stride + place, code.to(values.dtype.element_ty), mask=sent)
    lane = tl.arange(0, LANES)
    word = tl.sum(sent.to(tl.int32) << lane[None, :], axis=1)
    tl.store(words + shard * words_stride + row * LANES + lane, word)
    tl.store(exponents + shard * exponents_stride + row, exponent.to(tl.uint8))
    if KEEP_REMAINDER:
        rest = tl.where(sent, value - code * step, value)  # exact, with or without a fused multiply-add
        place = remainder + shard * remainder_stride + row * WIDTH + offsets(WIDTH)
        tl.store(place, rest, mask=inside(row, numel, WHOLE, WIDTH))


@triton.jit
def sent_values(
    values, words, starts, exponents, row, BITS: tl.constexpr, FLOOR: tl.constexpr, INTERPRET: tl.constexpr
):
    """fp32[32, 32]: what one sender has sent of a row."""
    bitmap = tl.load(words + row * LANES + tl.arange(0, LANES))
    first = row // TILE_ROWS * TILE_ROWS
    index = tl.arange(0, TILE_ROWS * LANES)
    others = tl.load(words + first * LANES + index, mask=index < (row - first) * LANES, other=0)
    start = tl.load(starts + row // TILE_ROWS) + tl.sum(bits_set(others, INTERPRET), axis=0)
    exponent = tl.load(exponents + row).to(tl.int32)
    rank = ranks(bitmap, INTERPRET)
    # the others load the next value that is there, cheaper than a mask; the bitmap lies behind the last one
    code = tl.load(values + start + rank).to(tl.int32)
    step = tl.where(exponent == 255, float("nan"), step_of(exponent, BITS, FLOOR))
    SIGN: tl.constexpr = 2 ** (BITS - 1)
    code = ((code & (2 * SIGN - 1)) ^ SIGN) | 0x4B000000  # 2^23 and the code plus SIGN
    value = code.to(tl.float32, bitcast=True) - (8388608.0 + SIGN)
    present = ((bitmap[:, None] >> tl.arange(0, LANES)[None, :]) & 1) != 0
    return tl.where(present, value, 0.0) * step  # exact, as if added in one


@triton.jit
def decode_sum_kernel(
    values, words, starts, exponents, total,
    numel, rows, senders, values_stride, words_stride, exponents_stride,
    W: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Add the senders' values of a row in fp32, one sender after the other. W: senders, if few, else 0."""
    row = tl.program_id(0).to(tl.int64)
    result = tl.zeros([WIDTH // LANES, LANES], tl.float32)
    if W > 0:  # unrolled, so that the senders' loads are in flight together
        for w in tl.static_range(0, W):
            at = tl.full((), w, tl.int64)
            result += sent_values(
                values + at * values_stride, words + at * words_stride, starts + at * words_stride,
                exponents + at * exponents_stride, row, BITS, FLOOR, INTERPRET,
            )  # fmt: skip
    else:
        sender = 0
        while sender < senders:
            at = tl.full((), 0, tl.int64) + sender
            result += sent_values(
                values + at * values_stride, words + at * words_stride, starts + at * words_stride,
                exponents + at * exponents_stride, row, BITS, FLOOR, INTERPRET,
            )  # fmt: skip
            sender += 1
    tl.store(total + row * WIDTH + offsets(WIDTH), result, mask=inside(row, numel, WHOLE, WIDTH))
