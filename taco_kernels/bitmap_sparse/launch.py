"""Packing sparse rows and adding them up, in Triton. Same signatures as reference.py.

A program has a row: 1024 values as [32, 32], of which line w is word w of the row's bitmap, and
column i is bit i of each word. Packing takes two kernels, with a running sum of torch's between
them: the first counts what each row sends, so that the second knows where each row's values begin.
"""

import torch
import triton
import triton.language as tl

from taco_kernels.bitmap_sparse import reference
from taco_kernels.bitmap_sparse.reference import BitmapLayout
from taco_kernels.common.fast_launch import start
from taco_kernels.common.packing import MAGIC
from taco_kernels.common.reference import EXPONENT_FLOOR, NON_FINITE

FLOOR = tl.constexpr(EXPONENT_FLOOR)
WIDTH = tl.constexpr(reference.WIDTH)
TILE_ROWS = tl.constexpr(reference.TILE_ROWS)
LARGEST_EXPONENT = tl.constexpr(NON_FINITE - 1)
NAN_EXPONENT = tl.constexpr(NON_FINITE)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
"""All bits of an fp32 but its sign: as integers they are in the order of the magnitudes."""
ROW_WARPS = 1
"""Warps of a row of 1024 values: a single one shares nothing with another."""


@triton.jit
def offsets():
    """int32[32, 32]: numbers of the values of a row."""
    return (tl.arange(0, 32) * 32)[:, None] + tl.arange(0, 32)[None, :]


@triton.jit
def ranks_of(sent):
    """int32[32, 32]: how many of a row's values that are sent, 1 in int32[32, 32], come before
    each."""
    size = tl.sum(sent, axis=1)
    before_word = tl.cumsum(size, axis=0) - size
    return before_word[:, None] + tl.cumsum(sent, axis=1) - sent


@triton.jit
def step_of(exponent, BITS: tl.constexpr):
    """fp32 grid step 2^(e - 125 - BITS) of a row whose largest value has the biased int32 exponent
    e."""
    clamped = tl.minimum(tl.maximum(exponent, FLOOR), LARGEST_EXPONENT)
    return ((clamped + 2 - BITS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_of(x, thresholds, row, shard, numel, BITS: tl.constexpr):
    """Load a row and quantise it.

    Args:
        x: pointer to the shard, fp32.
        thresholds: fp32[S], a threshold a shard.
        row: number of the row in the shard.
        shard: number of the shard.
        numel: values in the shard; zeros are loaded beyond.
        BITS: of a code, 8 or 16.

    Returns:
        The values and their codes, both fp32[32, 32]; which of them are to be sent; the row's step,
        fp32; its biased exponent, int32.
    """
    value = tl.load(x + row * WIDTH + offsets(), mask=offsets() < numel - row * WIDTH, other=0.0)
    bits = value.to(tl.int32, bitcast=True) & MAGNITUDE_BITS
    exponent = tl.max(bits) >> 23
    clamped = tl.minimum(tl.maximum(exponent, FLOOR), LARGEST_EXPONENT)
    inverse = ((252 + BITS - clamped) << 23).to(tl.float32, bitcast=True)  # 1 / step, exactly
    LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
    code = value * inverse + MAGIC - MAGIC  # to the nearest integer, ties to even
    code = tl.minimum(tl.maximum(code, -LARGEST), LARGEST)
    # Nothing of a row with a NaN or an infinity is sent, and no value whose code is 0.
    finite = tl.where(exponent == NAN_EXPONENT, 0.0, code)
    # At least the smallest magnitude there is: zeros are never sent.
    threshold = tl.load(thresholds + shard).to(tl.int32, bitcast=True) & MAGNITUDE_BITS
    sent = (bits >= tl.maximum(threshold, 1)) & (finite != 0.0)
    return value, code, sent, step_of(exponent, BITS), exponent


@triton.jit
def count_kernel(x, thresholds, counts, numel, rows, x_stride, BITS: tl.constexpr):
    """counts[shard, row] = how many values of a row are to be sent; grid (rows, shards).

    Args:
        x: fp32 [S, numel].
        thresholds: fp32 [S].
        counts: int32 [S, rows].
        numel: values in a shard.
        rows: rows in a shard.
        x_stride: values from one shard to the next.
        BITS: of a code.
    """
    row = tl.program_id(0).to(tl.int64)
    shard = tl.program_id(1).to(tl.int64)
    sent = row_of(x + shard * x_stride, thresholds, row, shard, numel, BITS)[2]
    tl.store(counts + shard * rows + row, tl.sum(sent.to(tl.int32)))


@triton.jit
def pack_kernel(
    x, remainder, thresholds, begins, values, words, exponents,
    numel, rows, capacity, x_stride, remainder_stride, values_stride, words_stride, exponents_stride,
    KEEP_REMAINDER: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write a row's codes, as far as there is room, its bitmap and its exponent; grid (rows,
    shards).

    May overwrite x by the remainder: each program reads its own row only.

    Args:
        x: fp32 [S, numel].
        remainder: fp32 [S, numel], may be x.
        thresholds: fp32 [S].
        begins: int32 [S, rows]: how many values of the shard are sent before each row's.
        values: codes, int8 or int16 [S, capacity].
        words: bitmaps, int32 [S, 32 rows].
        exponents: uint8 [S, rows].
        numel: values in a shard.
        rows: rows in a shard.
        capacity: codes that a shard has room for.
        x_stride: values from one shard to the next.
        remainder_stride: values from one shard to the next.
        values_stride: codes from one wire to the next.
        words_stride: words from one wire to the next.
        exponents_stride: bytes from one wire to the next.
        KEEP_REMAINDER: write x less what is sent to ``remainder``.
        BITS: of a code.
    """
    row = tl.program_id(0).to(tl.int64)
    shard = tl.program_id(1).to(tl.int64)
    value, code, sent, step, exponent = row_of(
        x + shard * x_stride, thresholds, row, shard, numel, BITS
    )
    # Each value's index among the shard's codes; the first ``capacity`` are sent.
    index = tl.load(begins + shard * rows + row) + ranks_of(sent.to(tl.int32))
    sent = sent & (index < capacity)
    tl.store(values + shard * values_stride + index, code.to(values.dtype.element_ty), mask=sent)
    bit = tl.arange(0, 32)
    word = tl.sum(sent.to(tl.int32) << bit[None, :], axis=1)
    tl.store(words + shard * words_stride + row * 32 + bit, word)
    tl.store(exponents + shard * exponents_stride + row, exponent.to(tl.uint8))
    if KEEP_REMAINDER:
        # Exact, with or without a fused multiply-add: the product is, and so is the difference.
        rest = tl.where(sent, value - code * step, value)
        target = remainder + shard * remainder_stride + row * WIDTH + offsets()
        tl.store(target, rest, mask=offsets() < numel - row * WIDTH)


@triton.jit
def ones(word):
    """int32: how many bits of int32 words are set, added up in pairs, nibbles, bytes, and over the
    bytes."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24) & 63


@triton.jit
def decode_sum_kernel(
    values, words, starts, exponents, total,
    numel, rows, senders, values_stride, words_stride, exponents_stride, BITS: tl.constexpr,
):  # fmt: skip
    """total = the senders' values of a row, added in fp32 in their order; grid (rows,).

    A row's codes begin where its tile's do, plus the set bits of the tile's earlier rows, at most
    3.

    Args:
        values: codes, int8 or int16 [W, capacity].
        words: bitmaps, int32 [W, 32 rows].
        starts: int32 [W, tiles]: how many codes come before each tile of TILE_ROWS rows.
        exponents: uint8 [W, rows].
        total: fp32 [numel].
        numel: values in the tensor.
        rows: rows in it.
        senders: W.
        values_stride: codes from one wire to the next.
        words_stride: words from one wire to the next; also for starts.
        exponents_stride: bytes from one wire to the next.
        BITS: of a code.
    """
    row = tl.program_id(0).to(tl.int64)
    bit = tl.arange(0, 32)
    first_row = row // TILE_ROWS * TILE_ROWS
    index = tl.arange(0, TILE_ROWS * 32)
    result = tl.zeros([32, 32], tl.float32)
    for w in range(senders):
        sender = tl.full((), 0, tl.int64) + w
        bitmap = words + sender * words_stride
        present = (tl.load(bitmap + row * 32 + bit)[:, None] >> bit[None, :]) & 1
        # The tile's earlier rows, as bitmap words: their set bits are the codes before this row's.
        is_earlier = index < (row - first_row) * 32
        earlier = tl.load(bitmap + first_row * 32 + index, mask=is_earlier, other=0)
        start = tl.load(starts + sender * words_stride + row // TILE_ROWS)
        start += tl.sum(ones(earlier), axis=0)
        exponent = tl.load(exponents + sender * exponents_stride + row).to(tl.int32)
        codes = values + sender * values_stride + start + ranks_of(present)
        code = tl.load(codes, mask=present != 0, other=0)
        step = tl.where(exponent == NAN_EXPONENT, float("nan"), step_of(exponent, BITS))
        result += code.to(tl.float32) * step  # the product is exact
    tl.store(total + row * WIDTH + offsets(), result, mask=offsets() < numel - row * WIDTH)


def _parts(
    wires: torch.Tensor, layout: BitmapLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, words, starts and exponents of wires as typed views."""
    values = wires.view(torch.int8 if layout.bits == 8 else torch.int16)
    words = wires[:, layout.words_at :].view(torch.int32)
    starts = wires[:, layout.starts_at :].view(torch.int32)
    exponents = wires[:, layout.exponents_at :]
    return values, words, starts, exponents


def encode(
    x: torch.Tensor,
    thresholds: torch.Tensor,
    layout: BitmapLayout,
    remainder: torch.Tensor | None = None,
) -> torch.Tensor:
    """See reference.encode.

    Args:
        x: fp32 ``[S, numel]``.
        thresholds: fp32 ``[S]``, >= 0.
        layout: of a shard.
        remainder: fp32 ``[S, numel]``, may be x itself: gets x less what was sent, exactly.
    """
    layout.check_values(x, remainder)
    thresholds = thresholds.contiguous()
    numel = layout.numel
    rows = layout.rows
    grid = (rows, len(x))
    constants = dict(BITS=layout.bits, num_warps=ROW_WARPS)

    counts = torch.empty((len(x), rows), dtype=torch.int32, device=x.device)
    start(count_kernel, grid, (x, thresholds, counts), (numel, rows, x.stride(0)), **constants)
    # Where each row's codes begin. A row beyond the capacity begins at its end, and stores nothing.
    begins = (counts.cumsum(1) - counts).clamp(max=layout.capacity).int()

    # Zeros: the padding, and codes up to the capacity, are part of the wire.
    wires = torch.zeros((len(x), layout.wire_bytes), dtype=torch.uint8, device=x.device)
    values, words, starts, exponents = _parts(wires, layout)
    starts[:, : layout.tiles] = begins[:, :: reference.TILE_ROWS]
    target = x if remainder is None else remainder
    start(
        pack_kernel,
        grid,
        (x, target, thresholds, begins, values, words, exponents),
        (
            numel,
            rows,
            layout.capacity,
            x.stride(0),
            target.stride(0),
            values.stride(0),
            words.stride(0),
            exponents.stride(0),
        ),
        KEEP_REMAINDER=remainder is not None,
        **constants,
    )
    return wires


def decode_sum(wires: torch.Tensor, layout: BitmapLayout) -> torch.Tensor:
    """See reference.decode_sum."""
    layout.check_wires(wires)
    values, words, starts, exponents = _parts(wires, layout)
    total = torch.empty(layout.numel, dtype=torch.float32, device=wires.device)
    start(
        decode_sum_kernel,
        (layout.rows,),
        (values, words, starts, exponents, total),
        (
            layout.numel,
            layout.rows,
            len(wires),
            values.stride(0),
            words.stride(0),
            exponents.stride(0),
        ),
        BITS=layout.bits,
        num_warps=ROW_WARPS,
    )
    return total
