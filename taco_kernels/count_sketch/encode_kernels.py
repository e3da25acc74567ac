"""Triton kernels of the sender's side: row hashes, row exponents, the sketch, the bitmap and what is left."""

import triton
import triton.language as tl

from taco_kernels.common.rounding import MAGIC, grid_exponent, threshold_bits
from taco_kernels.count_sketch import philox

PHILOX_ROUNDS = tl.constexpr(philox.ROUNDS)


@triton.jit
def _word(c0, c1, c2, seed, WORD: tl.constexpr):
    """uint32: a word of hashing.philox of the counter c0, c1, c2, 0, of which the first is a tensor."""
    zero = tl.full((), 0, tl.uint32)
    counter = (c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), zero)
    return tl.philox(seed, counter[0], counter[1], counter[2], counter[3], PHILOX_ROUNDS)[WORD]


@triton.jit
def _moved(digit, d, e, third, block, round, seed, STREAM: tl.constexpr):
    """One round of hashing.row_hashes' network: ``digit`` moved by a hash of the other two."""
    word = _word(d * third + e, block, tl.full((), STREAM + 1, tl.int32) + round, seed, 0)
    return (digit + (word.to(tl.uint64) * third.to(tl.uint64) >> 32).to(tl.int32)) % third


@triton.jit(do_not_specialize=["seed", "third"])
def hash_kernel(
    hashes, rows, blocks, third, seed, STREAM: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """hashing.row_hashes: int32[rows, 4], T rows a program."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    seed = seed.to(tl.int64)
    block, number = row % blocks, row // blocks
    a, b, c = number % third, number // third % third, number // (third * third) % third
    for k in tl.range(0, ROUNDS, 3):
        a = _moved(a, b, c, third, block, k, seed, STREAM)
        b = _moved(b, c, a, third, block, k + 1, seed, STREAM)
        c = _moved(c, a, b, third, block, k + 2, seed, STREAM)
    last = _word(row, tl.full((), 0, tl.int32), tl.full((), STREAM, tl.int32), seed, 3)
    first = block * 3
    last = last.to(tl.int32) & (0x7FFC00 | (WIDTH - 1))
    mask = row < rows
    place = hashes + row * 4
    tl.store(place, first * third + a, mask)
    tl.store(place + 1, (first + 1) * third + b, mask)
    tl.store(place + 2, (first + 2) * third + c, mask)
    tl.store(place + 3, last, mask)


@triton.jit
def column_mask(last, j: tl.constexpr, WIDTH: tl.constexpr):
    """hashing.column_masks of the fourth hash word."""
    mask = last & (WIDTH - 1)
    if j > 0:
        mask = mask ^ ((last >> (5 + 5 * j)) & 31)
    return mask


@triton.jit
def sign_of(last, j: tl.constexpr):
    """hashing.signs of the fourth hash word."""
    return 1 - ((last >> (20 + j)) & 1) * 2


@triton.jit
def exponent_kernel(x, exponents, numel, rows, x_stride, WIDTH: tl.constexpr, T: tl.constexpr):
    """Largest magnitude bits of each of T rows, their exponent field as uint8."""
    shard = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * T + tl.arange(0, T)
    place = row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(x + shard * x_stride + place, mask=place < numel, other=0.0)
    largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    tl.store(exponents + shard * rows + row, (largest >> 23).to(tl.uint8), mask=row < rows)


@triton.jit
def _threshold_of(exponent, bits):
    """The threshold of a row; NaN, which nothing reaches, for those with exponent 255."""
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(value, inverse, threshold, MANTISSA: tl.constexpr):
    """q + MAGIC, fp32, where q = rint(value * inverse), or 0 if the value is not sent.

    A product with a power of two is exact, so that a fused multiply-add changes nothing.
    """
    LARGEST: tl.constexpr = 2**MANTISSA - 1
    q = value * inverse + MAGIC
    q = tl.minimum(tl.maximum(q, MAGIC - LARGEST), MAGIC + LARGEST)
    return tl.where(tl.abs(value) >= threshold, q, MAGIC)


@triton.jit
def encode_kernel(
    x, remainder, thresholds, exponents, hashes, cells, words, numel, rows, word_count, x_stride,
    remainder_stride, cells_stride, words_stride, MANTISSA: tl.constexpr, FLOOR: tl.constexpr,
    KEEP_REMAINDER: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """T rows of one shard: values to their cells, int32 and 0 before, which are sent into the bitmap, and
    what is left of x.

    The bitmap's words after the last row, up to ``word_count``, become 0. May overwrite x.
    """
    shard = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * T + tl.arange(0, T)
    inside = row < rows
    place = row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    valid = place < numel
    value = tl.load(x + shard * x_stride + place, mask=valid, other=0.0)
    exponent = tl.load(exponents + shard * rows + row, mask=inside, other=0).to(tl.int32)
    threshold = _threshold_of(exponent, threshold_bits(thresholds, shard))
    exponent = grid_exponent(exponent, FLOOR)
    inverse = ((253 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    q = _rounded(value, inverse[:, None], threshold[:, None], MANTISSA) - MAGIC
    if KEEP_REMAINDER:
        step = ((exponent + 1 - MANTISSA) << 23).to(tl.float32, bitcast=True)
        rest = value - q * step[:, None]  # exact, with or without a fused multiply-add
        tl.store(remainder + shard * remainder_stride + place, rest, mask=valid)
    sent = q != 0.0
    last = tl.load(hashes + row * 4 + 3, mask=inside, other=0)
    column = tl.arange(0, WIDTH)[None, :]
    cells += shard * cells_stride
    for j in tl.static_range(3):
        target = tl.load(hashes + row * 4 + j, mask=inside, other=0)
        cell = target.to(tl.int64)[:, None] * WIDTH + (column ^ column_mask(last, j, WIDTH)[:, None])
        value = q.to(tl.int32) * sign_of(last, j)[:, None]
        tl.atomic_add(cells + cell, value, mask=sent, sem="relaxed")
    lane = tl.reshape(sent.to(tl.int32), [T, WIDTH // 32, 32]) << tl.arange(0, 32)[None, None, :]
    word = row[:, None] * (WIDTH // 32) + tl.arange(0, WIDTH // 32)[None, :]
    tl.store(words + shard * words_stride + word, tl.sum(lane, axis=2), mask=word < word_count)
