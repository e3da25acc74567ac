"""Packing sparse rows and adding them up, in Triton. Same signatures as reference.py.

A row of 1024 values is 32 words of a bitmap. Packing takes two kernels: the first counts what each row sends,
so that the second knows where each row's values begin.
"""

import torch
import triton
import triton.language as tl

from taco_kernels.bitmap_sparse import reference
from taco_kernels.bitmap_sparse.reference import BitmapLayout
from taco_kernels.common.fast_launch import start
from taco_kernels.common.packing import MAGIC
from taco_kernels.common.reference import EXPONENT_FLOOR

FLOOR = tl.constexpr(EXPONENT_FLOOR)
WIDTH = tl.constexpr(reference.WIDTH)
TILE_ROWS = tl.constexpr(reference.TILE_ROWS)
ROW_WARPS = 1
"""Warps of a row of 1024 values: one shares nothing with another."""


@triton.jit
def offsets():
    """int32[32, 32]: numbers of the values of a row."""
    return (tl.arange(0, 32) * 32)[:, None] + tl.arange(0, 32)[None, :]


@triton.jit
def places(sent):
    """int32[32, 32]: how many of a row's values that are sent, 1 in int32[32, 32], come before each."""
    size = tl.sum(sent, axis=1)
    return (tl.cumsum(size, axis=0) - size)[:, None] + tl.cumsum(sent, axis=1) - sent


@triton.jit
def step_of(exponent, BITS: tl.constexpr):
    """fp32 grid step of a row with this int32 exponent, of integer values."""
    return ((tl.minimum(tl.maximum(exponent, FLOOR), 254) + 2 - BITS) << 23).to(
        tl.float32, bitcast=True
    )


@triton.jit
def row_of(x, thresholds, row, shard, numel, BITS: tl.constexpr):
    """A row's values and their codes, fp32[32, 32], which of them are to be sent, step and int32 exponent."""
    value = tl.load(x + row * WIDTH + offsets(), mask=offsets() < numel - row * WIDTH, other=0.0)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.max(bits) >> 23
    inverse = ((252 + BITS - tl.minimum(tl.maximum(exponent, FLOOR), 254)) << 23).to(
        tl.float32, bitcast=True
    )
    LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
    code = tl.minimum(tl.maximum(value * inverse + MAGIC - MAGIC, -LARGEST), LARGEST)
    finite = tl.where(exponent == 255, 0.0, code)
    threshold = tl.maximum(tl.load(thresholds + shard).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    sent = (bits >= threshold) & (finite != 0.0)
    return value, code, sent, step_of(exponent, BITS), exponent


@triton.jit
def count_kernel(x, thresholds, counts, numel, rows, x_stride, BITS: tl.constexpr):
    """How many values of a row are to be sent, int32."""
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sent = row_of(x + shard * x_stride, thresholds, row, shard, numel, BITS)[2]
    tl.store(counts + shard * rows + row, tl.sum(sent.to(tl.int32)))


@triton.jit
def pack_kernel(
    x, remainder, thresholds, begins, values, words, exponents,
    numel, rows, capacity, x_stride, remainder_stride, values_stride, words_stride, exponents_stride,
    KEEP_REMAINDER: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A row's codes from its place in ``begins`` on, as far as there is room; its bitmap and its exponent.

    May overwrite x by the remainder: each program reads its own row only.
    """
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    value, code, sent, step, exponent = row_of(
        x + shard * x_stride, thresholds, row, shard, numel, BITS
    )
    place = tl.load(begins + shard * rows + row) + places(sent.to(tl.int32))
    sent = sent & (place < capacity)
    tl.store(values + shard * values_stride + place, code.to(values.dtype.element_ty), mask=sent)
    bit = tl.arange(0, 32)
    word = tl.sum(sent.to(tl.int32) << bit[None, :], axis=1)
    tl.store(words + shard * words_stride + row * 32 + bit, word)
    tl.store(exponents + shard * exponents_stride + row, exponent.to(tl.uint8))
    if KEEP_REMAINDER:
        left = tl.where(
            sent, value - code * step, value
        )  # exact, with or without a fused multiply-add
        at = remainder + shard * remainder_stride + row * WIDTH + offsets()
        tl.store(at, left, mask=offsets() < numel - row * WIDTH)


@triton.jit
def ones(word):
    """int32: how many bits of int32 words are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24) & 63


@triton.jit
def decode_sum_kernel(
    values, words, starts, exponents, total,
    numel, rows, senders, values_stride, words_stride, exponents_stride, BITS: tl.constexpr,
):  # fmt: skip
    """Add the senders' values of a row in fp32, one sender after the other."""
    row = tl.program_id(0).to(tl.int64)
    bit, first = tl.arange(0, 32), row // TILE_ROWS * TILE_ROWS
    index = tl.arange(0, TILE_ROWS * 32)
    result = tl.zeros([32, 32], tl.float32)
    for sender in range(senders):
        at = tl.full((), 0, tl.int64) + sender
        own = words + at * words_stride
        present = (tl.load(own + row * 32 + bit)[:, None] >> bit[None, :]) & 1
        earlier = tl.load(own + first * 32 + index, mask=index < (row - first) * 32, other=0)
        start = tl.load(starts + at * words_stride + row // TILE_ROWS) + tl.sum(
            ones(earlier), axis=0
        )
        exponent = tl.load(exponents + at * exponents_stride + row).to(tl.int32)
        code = tl.load(
            values + at * values_stride + start + places(present), mask=present != 0, other=0
        )
        step = tl.where(exponent == 255, float("nan"), step_of(exponent, BITS))
        result += code.to(tl.float32) * step  # the product is exact
    tl.store(total + row * WIDTH + offsets(), result, mask=offsets() < numel - row * WIDTH)


def _parts(
    wires: torch.Tensor, layout: BitmapLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, words, starts and exponents of wires as typed views."""
    values = wires.view(torch.int8 if layout.bits == 8 else torch.int16)
    words, starts = (wires[:, at:].view(torch.int32) for at in (layout.words_at, layout.starts_at))
    return values, words, starts, wires[:, layout.exponents_at :]


def encode(
    x: torch.Tensor,
    thresholds: torch.Tensor,
    layout: BitmapLayout,
    remainder: torch.Tensor | None = None,
) -> torch.Tensor:
    """See reference.encode."""
    layout.check_values(x, remainder)
    thresholds, constants = thresholds.contiguous(), dict(BITS=layout.bits, num_warps=ROW_WARPS)
    numel, rows, grid = layout.numel, layout.rows, (layout.rows, len(x))
    counts = torch.empty((len(x), rows), dtype=torch.int32, device=x.device)
    start(count_kernel, grid, (x, thresholds, counts), (numel, rows, x.stride(0)), **constants)
    begins = (counts.cumsum(1) - counts).clamp(max=layout.capacity).int()
    wires = torch.zeros((len(x), layout.wire_bytes), dtype=torch.uint8, device=x.device)
    values, words, starts, exponents = _parts(wires, layout)
    starts[:, : layout.tiles] = begins[:, :: reference.TILE_ROWS]
    target = x if remainder is None else remainder
    start(
        pack_kernel,
        grid,
        (x, target, thresholds, begins, values, words, exponents),
        (
            *(numel, rows, layout.capacity, x.stride(0), target.stride(0)),
            *(values.stride(0), words.stride(0), exponents.stride(0)),
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
