"""Triton kernels of normalised channels: statistics in two steps, and the codec's passes around them."""

import triton
import triton.language as tl

from taco_kernels.common.constants import as_tensor
from taco_kernels.taco.outlier_kernels import (
    THRESHOLD,
    add_lists,
    any_list,
    empty_lists,
    look_for_massive,
    store_lists,
    take_massive,
)
from taco_kernels.taco.tensor import load_tile, store_tile
from taco_kernels.taco.wire import decode_groups, encode_groups


@triton.jit
def partial_kernel(
    x, partials, tokens, channels, T: tl.constexpr, B: tl.constexpr, ROBUST: tl.constexpr
):  # fmt: skip
    """Of T tokens and B channels: the means, and sums of the squares about them. x is contiguous.

    About means of their own, so that nothing cancels, wherever the values lie. ROBUST: without massive
    tokens, and how many the others are.
    """
    row = tl.program_id(0) * T + tl.arange(0, T)
    column = tl.program_id(1) * B + tl.arange(0, B)
    inside = (row < tokens)[:, None] & (column < channels)[None, :]
    place = row.to(tl.int64)[:, None] * channels + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    count = tl.minimum(tokens - tl.program_id(0) * T, T).to(tl.float32)
    mean = tl.sum(value, axis=0) / count
    if ROBUST:
        distance = tl.where(inside, tl.abs(value - mean[None, :]), 0.0)
        limit = tl.sum(distance, axis=0) / count * THRESHOLD
        inside = inside & ((distance > limit[None, :]) == 0)
        counts = tl.sum(inside.to(tl.float32), axis=0)
        mean = tl.sum(tl.where(inside, value, 0.0), axis=0) / counts
    apart = tl.where(inside, value - mean[None, :], 0.0)
    at = partials + tl.program_id(0).to(tl.int64) * (3 if ROBUST else 2) * channels + column
    tl.store(at, mean, mask=column < channels)
    tl.store(at + channels, tl.sum(apart * apart, axis=0), mask=column < channels)
    if ROBUST:
        tl.store(at + 2 * channels, counts, mask=column < channels)


@triton.jit
def part_counts(
    partials, at, tokens, tiles, channels, column, T: tl.constexpr, K: tl.constexpr, ROBUST: tl.constexpr
):  # fmt: skip
    """Pointers to the means of K tiles from ``at`` on, which are there, and their tokens that count, fp32."""
    tile = at + tl.arange(0, K)
    if not ROBUST:
        count = tl.where(tile < tiles, tl.minimum(tokens - tile * T, T), 0).to(tl.float32)[:, None]
    place = partials + tile.to(tl.int64)[:, None] * (3 if ROBUST else 2) * channels + column[None, :]
    mask = (tile < tiles)[:, None] & (column < channels)[None, :]
    if ROBUST:
        count = tl.load(place + 2 * channels, mask=mask, other=0.0)
    return place, mask, count


@triton.jit
def statistics_kernel(
    partials, statistics, inverses, tokens, tiles, channels, T: tl.constexpr, K: tl.constexpr,
    B: tl.constexpr, ROBUST: tl.constexpr,
):  # fmt: skip
    """B channels' statistics, bf16, and fp32 inverses of the second, from the tiles' partial ones."""
    column = tl.program_id(0) * B + tl.arange(0, B)
    inside = column < channels
    total = tl.zeros([B], tl.float32)
    every = tl.zeros([B], tl.float32)
    at = 0
    while at < tiles:
        place, mask, count = part_counts(partials, at, tokens, tiles, channels, column, T, K, ROBUST)
        total += tl.sum(tl.load(place, mask=mask, other=0.0) * count, axis=0)
        if ROBUST:
            every += tl.sum(count, axis=0)
        at += K
    if not ROBUST:
        every = tl.full((), 1.0, tl.float32) * tokens
    centre = (total / every).to(tl.bfloat16)
    tl.store(statistics + column, centre, mask=inside)
    squares = tl.zeros([B], tl.float32)
    at = 0
    while at < tiles:
        place, mask, count = part_counts(partials, at, tokens, tiles, channels, column, T, K, ROBUST)
        apart = tl.load(place, mask=mask, other=0.0) - centre.to(tl.float32)[None, :]
        apart = tl.where(mask, apart, 0.0)
        own = tl.load(place + channels, mask=mask, other=0.0)
        squares += tl.sum(own + apart * apart * count, axis=0)
        at += K
    rms = tl.sqrt_rn(squares / every).to(tl.bfloat16)
    tl.store(statistics + channels + column, rms, mask=inside)
    rms = rms.to(tl.float32)
    one = tl.full([B], 1.0, tl.float32)
    inverse = tl.where(rms == 0.0, 0.0, tl.div_rn(one, rms))
    tl.store(inverses + column, inverse, mask=inside)


@triton.jit
def channels_of(first, width, C: tl.constexpr):
    """int32[R, G]: channels of groups first..., of ``width`` groups a token."""
    group = (first + tl.arange(0, C.R)) % width
    return (group * C.G)[:, None] + tl.arange(0, C.G)[None, :]


@triton.jit
def encode_kernel(
    x, statistics, inverses, out, groups, width, FLAGS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """out = wire of (x - mean) / rms. Persistent programs, R groups a step."""
    numel = tl.full((), C.G, tl.int64) * groups
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, C.R), tl.num_programs(0), num_stages=FLAGS.STAGES):
        first = as_tensor(tile) * C.R
        channel = channels_of(first, width, C)
        z = load_tile(x, first, numel, (1, 1, 0, 0), FLAGS, C).to(tl.float32)
        z = (z - tl.load(statistics + channel).to(tl.float32)) * tl.load(inverses + channel)
        if C.OUTLIERS:
            words = empty_lists(C)
            found, limit = look_for_massive(z, groups - first, C)
            if found:
                z, words = take_massive(z, limit, groups - first, C)
            store_lists(words, out, first, groups, C)
        encode_groups(z, out, first, groups, C)


@triton.jit
def decode_kernel(wire, statistics, x, groups, width, FLAGS: tl.constexpr, C: tl.constexpr):
    """x = q * step * rms + mean. Persistent programs, R groups a step."""
    numel = tl.full((), C.G, tl.int64) * groups
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, C.R), tl.num_programs(0), num_stages=FLAGS.STAGES):
        first = as_tensor(tile) * C.R
        channel = channels_of(first, width, C)
        z = decode_groups(wire, first, groups, 0, C)
        if C.OUTLIERS:
            z = add_lists(z, any_list(wire, 0, first, groups, 1, C), wire, 0, first, groups, 1, C)
        mean = tl.load(statistics + channel).to(tl.float32)
        z = z * tl.load(statistics + width * C.G + channel).to(tl.float32)
        store_tile(x, z + mean, first, numel, (1, 1, 0, 0), FLAGS, C)
