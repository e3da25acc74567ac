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


@triton.jit
def _hash(row, blocks, third, seed, STREAM: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr):
    """hashing.row_hashes of some rows: three sketch rows, and the word with column masks and signs."""
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
    return first * third + a, (first + 1) * third + b, (first + 2) * third + c, last


@triton.jit(do_not_specialize=["seed", "third"])
def hash_kernel(
    hashes, rows, blocks, third, seed, STREAM: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """hashing.row_hashes: int32[rows, 4], T rows a program."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    a, b, c, last = _hash(row, blocks, third, seed, STREAM, ROUNDS, WIDTH)
    mask = row < rows
    place = hashes + row * 4
    tl.store(place, a, mask)
    tl.store(place + 1, b, mask)
    tl.store(place + 2, c, mask)
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


@triton.jit(do_not_specialize=["seed", "third"])
def list_kernel(
    heads, links, rows, blocks, third, seed, STREAM: tl.constexpr, ROUNDS: tl.constexpr,
    WIDTH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The inverse of hashing.row_hashes: a linked list of members for each sketch row, T rows a program.

    ``heads`` int64[sketch_rows], zero before, has the first members, ``links`` int64[rows, 3] what follows a
    row in its list of each subtable: 0 at the end, or a row's number plus one in the lower 32 bits, its
    column mask in this subtable in bits 32-41 and its sign in bit 42 (set: minus). Lists are in any order.
    """
    row = tl.program_id(0) * T + tl.arange(0, T)
    a, b, c, last = _hash(row, blocks, third, seed, STREAM, ROUNDS, WIDTH)
    mask = row < rows
    for j in tl.static_range(3):
        target = a if j == 0 else (b if j == 1 else c)
        moves = column_mask(last, j, WIDTH) | ((last >> (20 + j)) & 1) << 10
        entry = (moves.to(tl.int64) << 32) + row + 1
        entry = tl.atomic_xchg(heads + target, entry, mask=mask, sem="relaxed")
        tl.store(links + row * 3 + j, entry, mask)


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
def _four(x):
    """The columns of x[G, 4]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _member(x, exponents, links, entry, j, numel, WIDTH: tl.constexpr):
    """Of the member that a list's ``entry`` names: values, fours of them moved, exponent and successor."""
    some = entry != 0
    row = tl.where(some, entry.to(tl.int32) - 1, 0)
    four = tl.arange(0, WIDTH // 4) ^ ((entry >> 34).to(tl.int32) & (WIDTH // 4 - 1))
    place = row.to(tl.int64) * WIDTH + (four[:, None] * 4 + tl.arange(0, 4)[None, :])
    successor = tl.load(links + row * 3 + j, mask=some, other=0)
    exponent = tl.load(exponents + row, mask=some, other=0).to(tl.int32)
    value = tl.load(x + place, mask=some & (place < numel), other=0.0)
    return value, exponent, successor


@triton.jit
def sketch_kernel(
    x, thresholds, exponents, heads, links, cells, numel, rows, third, x_stride, cells_stride,
    MANTISSA: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A row of one shard's sketch: the signed sum of its members' q, modulo 2^32 or 2^16 as ``cells`` says.

    Reads every row of x three times, from L2 but for the first, as neighbours have the same block: no
    atomics, which would take a cell for each value that is sent, and nothing to be zeroed or narrowed. The
    next member is fetched while one is added. Masks move columns in fours, which are loaded at once, and
    inside a four.
    """
    sketch_row = tl.program_id(0)
    shard = tl.program_id(1).to(tl.int64)
    j = sketch_row // third % 3
    x += shard * x_stride
    exponents += shard * rows
    # of columns 4 n, 4 n + 1, 4 n + 2 and 4 n + 3, with MAGIC's bits a member
    sum_a = tl.zeros([WIDTH // 4], tl.int32)
    sum_b = sum_a
    sum_c = sum_a
    sum_d = sum_a
    members = 0
    bits = threshold_bits(thresholds, shard)
    entry = tl.load(heads + sketch_row)
    value, exponent, successor = _member(x, exponents, links, entry, j, numel, WIDTH)
    while entry != 0:
        ahead = _member(x, exponents, links, successor, j, numel, WIDTH)
        threshold = _threshold_of(exponent, bits)
        inverse = ((253 + MANTISSA - grid_exponent(exponent, FLOOR)) << 23).to(tl.float32, bitcast=True)
        inverse = tl.where((entry >> 42) != 0, -inverse, inverse)
        a, b, c, d = _four(_rounded(value, inverse, threshold, MANTISSA).to(tl.int32, bitcast=True))
        swap = ((entry >> 32) & 1) != 0
        a, b = tl.where(swap, b, a), tl.where(swap, a, b)
        c, d = tl.where(swap, d, c), tl.where(swap, c, d)
        swap = ((entry >> 33) & 1) != 0
        sum_a += tl.where(swap, c, a)
        sum_b += tl.where(swap, d, b)
        sum_c += tl.where(swap, a, c)
        sum_d += tl.where(swap, b, d)
        members += 1
        entry = successor
        value, exponent, successor = ahead
    total = tl.join(tl.join(sum_a, sum_c), tl.join(sum_b, sum_d)) - members * 0x4B400000
    total = tl.reshape(total, [WIDTH // 4, 4]).to(cells.dtype.element_ty)
    place = tl.arange(0, WIDTH // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(cells + shard * cells_stride + sketch_row.to(tl.int64) * WIDTH + place, total)


@triton.jit
def encode_kernel(
    x, remainder, thresholds, exponents, words, numel, rows, word_count, x_stride, remainder_stride,
    words_stride, MANTISSA: tl.constexpr, FLOOR: tl.constexpr, KEEP_REMAINDER: tl.constexpr,
    WIDTH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """T rows of one shard: which values are sent into the bitmap, and what is left of x.

    The bitmap's words after the last row, up to ``word_count``, become 0. May overwrite x: after the sketch.
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
    lane = tl.reshape((q != 0.0).to(tl.int32), [T, WIDTH // 32, 32]) << tl.arange(0, 32)[None, None, :]
    word = row[:, None] * (WIDTH // 32) + tl.arange(0, WIDTH // 32)[None, :]
    tl.store(words + shard * words_stride + word, tl.sum(lane, axis=2), mask=word < word_count)
