"""Bitmaps and codes of packed rows in Triton, and the kernel that adds any packed values up.

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
def over_warp(number, MAXIMUM: tl.constexpr, R: tl.constexpr, INTERPRET: tl.constexpr):
    """int32[R * 32], one element a thread: the maximum over a warp's lanes, or the sum, in all of them."""
    if INTERPRET:
        rows = tl.reshape(number, [R, LANES])
        found = tl.max(rows, axis=1) if MAXIMUM else tl.sum(rows, axis=1)
        result = tl.reshape(tl.broadcast_to(found[:, None], [R, LANES]), [R * LANES])
    else:
        text: tl.constexpr = "redux.sync.max.s32 $0, $1, -1;" if MAXIMUM else "redux.sync.add.s32 $0, $1, -1;"
        result = tl.inline_asm_elementwise(text, "=r,r", [number], tl.int32, is_pure=True, pack=1)
    return result


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
def start_of(sums, tile, N: tl.constexpr):
    """int32: the sum of what lies before a tile. N: most tiles; 0 if ``sums`` are running sums already."""
    if N > 0:
        other = tl.arange(0, N)
        start = tl.sum(tl.load(sums + other, mask=other < tile, other=0), axis=0)
    else:
        start = tl.load(sums + tile)
    return start


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
    values, words, exponents, before, sums, total,
    numel, rows, tiles, rows_log2, senders, values_stride, words_stride, exponents_stride,
    W: tl.constexpr, BITS: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, INTERPRET: tl.constexpr, N: tl.constexpr,
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
                start_of(sums + at * tiles, row >> rows_log2, N) + tl.load(before + at * rows + row),
                row, BITS, FLOOR, INTERPRET,
            )  # fmt: skip
    else:
        sender = 0
        while sender < senders:
            at = tl.full((), 0, tl.int64) + sender
            result += sent_values(
                values + at * values_stride, words + at * words_stride, exponents + at * exponents_stride,
                start_of(sums + at * tiles, row >> rows_log2, N) + tl.load(before + at * rows + row),
                row, BITS, FLOOR, INTERPRET,
            )  # fmt: skip
            sender += 1
    tl.store(total + row * WIDTH + offsets(WIDTH), result, mask=inside(row, numel, WHOLE, WIDTH))
