"""Bitmaps and codes of sparse rows in Triton, and the kernel that adds values of any width up.

A row of 1024 values is 32 words of a bitmap. The place of a value among those of its row is what the words
before its own hold, plus the bits below it in its word.
"""

import triton
import triton.language as tl

from taco_kernels.bitmap_sparse import layout
from taco_kernels.common.rounding import grid_exponent

LANES = tl.constexpr(32)
TILE_ROWS = tl.constexpr(layout.TILE_ROWS)
PREFETCH = tl.constexpr("prefetch.global.L2 [$1];\nmov.b32 $0, 0;")
LOOK_UP = tl.constexpr("shfl.sync.idx.b32 $0, $2, $4, 31, -1;\nshfl.sync.idx.b32 $1, $3, $4, 31, -1;")


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
def look_up(word, place, lane, PURE: tl.constexpr, R: tl.constexpr, INTERPRET: tl.constexpr):
    """Both of another lane of the warp, int32[R * 32], one element a thread.

    Not PURE: looked up where it stands, not kept in registers for the next who needs the same.
    """
    if INTERPRET:
        lane = tl.reshape(lane, [R, LANES])
        word = tl.reshape(tl.gather(tl.reshape(word, [R, LANES]), lane, axis=1), [R * LANES])
        place = tl.reshape(tl.gather(tl.reshape(place, [R, LANES]), lane, axis=1), [R * LANES])
    else:
        kinds: tl.constexpr = (tl.int32, tl.int32)
        inputs = (word, place, lane)
        word, place = tl.inline_asm_elementwise(LOOK_UP, "=&r,=&r,r,r,r", inputs, kinds, PURE, 1)
    return word, place


@triton.jit
def prefetch(where, INTERPRET: tl.constexpr):
    """Ask for what lies there to be fetched into the L2 cache."""
    if not INTERPRET:
        text: tl.constexpr = PREFETCH
        tl.inline_asm_elementwise(text, "=r,l", [where.to(tl.int64)], tl.int32, False, 1)


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
    """Add the senders' values of a row in fp32, one sender after the other. W: senders, if few, else 0.

    Of any number of bits, and of any number of senders; see sum_kernels.py for 16 bits and a few.
    """
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
