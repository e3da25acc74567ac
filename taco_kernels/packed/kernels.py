"""Triton kernels that pack sparse values and add packed ones up."""

import triton
import triton.language as tl

from taco_kernels.triton.rounding import MAGIC


@triton.jit
def kept(value, threshold, exponent, BITS: tl.constexpr, FLOOR: tl.constexpr):
    """int32 codes (the value's own bits where BITS is 32) and whether they are to be sent, [T, width]."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    keep = (bits >= threshold) & (exponent != 255)[:, None]
    if BITS < 32:
        e = tl.minimum(tl.maximum(exponent, FLOOR), 254)
        inverse = ((252 + BITS - e) << 23).to(tl.float32, bitcast=True)
        scaled = tl.where(keep, value * inverse[:, None], 0.0)
        codes = (scaled + MAGIC).to(tl.int32, bitcast=True) - 0x4B400000  # the bits of MAGIC
        LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
        codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST)
        keep = codes != 0
    else:
        codes = value.to(tl.int32, bitcast=True)
    return codes, keep


@triton.jit
def survey_kernel(
    x,
    thresholds,
    counts,
    exponents,
    numel,
    rows,
    x_stride,
    exponents_stride,
    BITS: tl.constexpr,
    FLOOR: tl.constexpr,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
):
    """Exponent of every row and how many of its values are to be sent."""
    shard = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * T + tl.arange(0, T)
    place = row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(x + shard * x_stride + place, mask=place < numel, other=0.0)
    threshold = tl.maximum(tl.load(thresholds + shard).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1) >> 23
    _, keep = kept(value, threshold, exponent, BITS, FLOOR)
    tl.store(counts + shard * rows + row, tl.sum(keep.to(tl.int32), axis=1), mask=row < rows)
    tl.store(exponents + shard * exponents_stride + row, exponent.to(tl.uint8), mask=row < rows)


@triton.jit
def pack_kernel(
    x,
    remainder,
    thresholds,
    exponents,
    ends,
    values,
    words,
    numel,
    rows,
    capacity,
    x_stride,
    remainder_stride,
    exponents_stride,
    values_stride,
    words_stride,
    KEEP_REMAINDER: tl.constexpr,
    BITS: tl.constexpr,
    FLOOR: tl.constexpr,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
):
    """Write what is to be sent behind what the rows before send; ``ends`` are running sums of the counts."""
    shard = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * T + tl.arange(0, T)
    inside = row < rows
    place = row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    valid = place < numel
    value = tl.load(x + shard * x_stride + place, mask=valid, other=0.0)
    threshold = tl.maximum(tl.load(thresholds + shard).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.load(exponents + shard * exponents_stride + row, mask=inside, other=0).to(tl.int32)
    codes, keep = kept(value, threshold, exponent, BITS, FLOOR)
    rank = tl.cumsum(keep.to(tl.int32), axis=1)
    count = tl.sum(keep.to(tl.int32), axis=1)
    end = tl.load(ends + shard * rows + row, mask=inside, other=0)
    position = (end - count)[:, None] + rank - 1
    keep = keep & (position < capacity)
    target = values + shard * values_stride + position
    tl.store(target, codes.to(values.dtype.element_ty), mask=keep)
    lane = tl.reshape(keep.to(tl.int32), [T, WIDTH // 32, 32]) << tl.arange(0, 32)[None, None, :]
    word = row[:, None] * (WIDTH // 32) + tl.arange(0, WIDTH // 32)[None, :]
    tl.store(words + shard * words_stride + word, tl.sum(lane, axis=2), mask=inside[:, None])
    if KEEP_REMAINDER:
        if BITS < 32:
            e = tl.minimum(tl.maximum(exponent, FLOOR), 254)
            step = ((e + 2 - BITS) << 23).to(tl.float32, bitcast=True)
            rest = value - codes.to(tl.float32) * step[:, None]  # exact
        else:
            rest = tl.zeros_like(value)
        rest = tl.where(keep, rest, value)
        tl.store(remainder + shard * remainder_stride + place, rest, mask=valid)


@triton.jit
def members(words, row, inside, WIDTH: tl.constexpr, T: tl.constexpr):
    """int32 [T, WIDTH]: bits of T rows of a bitmap."""
    column = tl.arange(0, WIDTH)
    word = tl.load(
        words + row[:, None] * (WIDTH // 32) + (column // 32)[None, :], mask=inside[:, None], other=0
    )
    return (word >> (column % 32)[None, :]) & 1


@triton.jit
def count_kernel(words, counts, rows, words_stride, WIDTH: tl.constexpr, T: tl.constexpr):
    """Values that each sender has sent of every row."""
    sender = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * T + tl.arange(0, T)
    bit = members(words + sender * words_stride, row, row < rows, WIDTH, T)
    tl.store(counts + sender * rows + row, tl.sum(bit, axis=1), mask=row < rows)


@triton.jit
def decode_sum_kernel(
    values,
    words,
    exponents,
    ends,
    total,
    numel,
    rows,
    senders,
    values_stride,
    words_stride,
    exponents_stride,
    BITS: tl.constexpr,
    FLOOR: tl.constexpr,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
):
    """Add the senders' values in fp32, one sender after the other."""
    row = tl.program_id(0) * T + tl.arange(0, T)
    inside = row < rows
    place = row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    result = tl.zeros([T, WIDTH], tl.float32)
    sender = 0
    while sender < senders:
        at = tl.full((), 0, tl.int64) + sender
        bit = members(words + at * words_stride, row, inside, WIDTH, T)
        end = tl.load(ends + at * rows + row, mask=inside, other=0)
        position = (end - tl.sum(bit, axis=1))[:, None] + tl.cumsum(bit, axis=1) - 1
        code = tl.load(values + at * values_stride + position, mask=bit != 0, other=0)
        exponent = tl.load(exponents + at * exponents_stride + row, mask=inside, other=0).to(tl.int32)
        if BITS < 32:
            e = tl.minimum(tl.maximum(exponent, FLOOR), 254)
            step = ((e + 2 - BITS) << 23).to(tl.float32, bitcast=True)
            value = code.to(tl.float32) * step[:, None]  # exact, so a fused multiply-add changes nothing
        else:
            value = code.to(tl.float32, bitcast=True)
        result += tl.where((exponent == 255)[:, None], float("nan"), value)
        sender += 1
    tl.store(total + place, result, mask=place < numel)
