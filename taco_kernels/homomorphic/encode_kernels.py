"""Triton kernels of the sender's side: row hashes, row exponents, the sketch."""

import triton
import triton.language as tl

from taco_kernels.triton.rounding import MAGIC, philox


@triton.jit
def _moved(digit, d, e, third, block, round, seed, STREAM: tl.constexpr):
    """One round of hashing.row_hashes' network: ``digit`` moved by a hash of the other two."""
    counter = (block.to(tl.int64) << 32) + d * third + e
    word, _, _, _ = philox(counter, tl.full((), STREAM + 1, tl.int64) + round, seed)
    return (digit + (word.to(tl.uint64) * third.to(tl.uint64) >> 32).to(tl.int32)) % third


@triton.jit(do_not_specialize=["seed", "third"])
def hash_kernel(
    hashes,
    rows,
    blocks,
    third,
    seed,
    STREAM: tl.constexpr,
    ROUNDS: tl.constexpr,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
):
    """hashing.row_hashes: int32[rows, 4], T rows a program."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    seed = seed.to(tl.int64)
    block, number = row % blocks, row // blocks
    a, b, c = number % third, number // third % third, number // (third * third) % third
    for k in tl.range(0, ROUNDS, 3):
        a = _moved(a, b, c, third, block, k, seed, STREAM)
        b = _moved(b, c, a, third, block, k + 1, seed, STREAM)
        c = _moved(c, a, b, third, block, k + 2, seed, STREAM)
    _, _, _, last = philox(row.to(tl.int64), tl.full((), STREAM, tl.int64), seed)
    first = block * 3
    mask = row < rows
    place = hashes + row * 4
    tl.store(place, first * third + a, mask)
    tl.store(place + 1, (first + 1) * third + b, mask)
    tl.store(place + 2, (first + 2) * third + c, mask)
    tl.store(place + 3, last.to(tl.int32) & (0x7FFC00 | (WIDTH - 1)), mask)


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
def encode_kernel(
    x,
    remainder,
    thresholds,
    exponents,
    hashes,
    cells,
    words,
    numel,
    rows,
    x_stride,
    remainder_stride,
    cells_stride,
    words_stride,
    MANTISSA: tl.constexpr,
    FLOOR: tl.constexpr,
    KEEP_REMAINDER: tl.constexpr,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
):
    """T rows of one shard: q = rint(x / step) into the bitmap and, by integer atomics, into three cells each.

    ``cells`` must be zero. Integer sums modulo 2^32 do not depend on the order of the atomics.
    """
    shard = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * T + tl.arange(0, T)
    inside = row < rows
    column = tl.arange(0, WIDTH)
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    valid = place < numel
    value = tl.load(x + shard * x_stride + place, mask=valid, other=0.0)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    threshold = tl.maximum(tl.load(thresholds + shard).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.load(exponents + shard * rows + row, mask=inside, other=0).to(tl.int32)
    keep = (bits >= threshold) & (exponent != 255)[:, None]
    exponent = tl.minimum(tl.maximum(exponent, FLOOR), 254)
    inverse = ((253 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(keep, value * inverse[:, None], 0.0)
    q = (scaled + MAGIC).to(tl.int32, bitcast=True) - 0x4B400000  # the bits of MAGIC
    LARGEST: tl.constexpr = 2**MANTISSA - 1
    q = tl.minimum(tl.maximum(q, -LARGEST), LARGEST)
    if KEEP_REMAINDER:
        step = ((exponent + 1 - MANTISSA) << 23).to(tl.float32, bitcast=True)
        rest = value - q.to(tl.float32) * step[:, None]  # exact, with or without a fused multiply-add
        tl.store(remainder + shard * remainder_stride + place, rest, mask=valid)
    some = q != 0
    lane = tl.reshape(some.to(tl.int32), [T, WIDTH // 32, 32]) << tl.arange(0, 32)[None, None, :]
    word = row[:, None] * (WIDTH // 32) + tl.arange(0, WIDTH // 32)[None, :]
    tl.store(words + shard * words_stride + word, tl.sum(lane, axis=2), mask=inside[:, None])
    last = tl.load(hashes + row * 4 + 3, mask=inside, other=0)
    for j in tl.static_range(3):
        target = tl.load(hashes + row * 4 + j, mask=inside, other=0)
        mask = last & (WIDTH - 1)
        if j > 0:
            mask = mask ^ ((last >> (5 + 5 * j)) & 31)
        sign = 1 - ((last >> (20 + j)) & 1) * 2
        cell = target.to(tl.int64)[:, None] * WIDTH + (column[None, :] ^ mask[:, None])
        tl.atomic_add(cells + shard * cells_stride + cell, q * sign[:, None], mask=some, sem="relaxed")


@triton.jit
def narrow_kernel(cells, wires, count, wires_stride, T: tl.constexpr):
    """int32 cells to the int16 cells of a wire."""
    shard = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    value = tl.load(cells + shard * count + place, mask=place < count)
    tl.store(wires + shard * wires_stride + place, value.to(tl.int16), mask=place < count)
