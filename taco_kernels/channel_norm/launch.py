"""Triton kernels of normalised channels, and their launches. Same signatures as reference.py.

Statistics take two steps over tiles of tokens; normalisation happens where the codec loads and stores.
"""

import torch
import triton
import triton.language as tl

from taco_kernels.channel_norm import reference
from taco_kernels.channel_norm.reference import TILE_TOKENS, ChannelNormLayout
from taco_kernels.common import addressable, ceil_div, check_tensor
from taco_kernels.common.device import Tuning, as_tensor, device_for
from taco_kernels.common.fast_launch import start
from taco_kernels.taco.launch import check_groups
from taco_kernels.taco.outlier_kernels import (
    THRESHOLD,
    add_lists,
    any_list,
    empty_lists,
    find_outliers,
    split_outliers,
    store_lists,
)
from taco_kernels.taco.spec import make_flags, make_spec
from taco_kernels.taco.wire import decode_groups, encode_groups, load_tile, store_tile

EQUAL = tl.constexpr(reference.EQUAL)
TILE_CHANNELS = 64
"""And TILE_TOKENS tokens: values whose partial statistics a program finds. It holds them all."""
TILES = 64
"""Tiles that a program puts together at a time."""
JOINED_CHANNELS = 16
"""Channels that it does that for: few, so that enough programs run at once."""
TUNING = {
    "encode": Tuning(4096, 4, 1, 40, registers=80),
    "decode": Tuning(2048, 4, 1, 8, registers=64),
}
"""No pipeline over tiles: it would hold the statistics of every value in shared memory, too."""


@triton.jit
def partial_kernel(
    x, partials, tokens, channels, T: tl.constexpr, B: tl.constexpr, ROBUST: tl.constexpr
):  # fmt: skip
    """Of T tokens and B channels, without outliers if ROBUST: means, sums of the squares about them, numbers
    of tokens; then the outliers' sum of squares. x is contiguous.

    About means of their own, so that nothing cancels, wherever the values lie.
    """
    row = tl.program_id(0) * T + tl.arange(0, T)
    column = tl.program_id(1) * B + tl.arange(0, B)
    inside = (row < tokens)[:, None] & (column < channels)[None, :]
    place = row.to(tl.int64)[:, None] * channels + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    count = tl.minimum(tokens - tl.program_id(0) * T, T).to(tl.float32)
    mean = tl.sum(value, axis=0) / count
    every = inside
    counts = tl.sum(inside.to(tl.float32), axis=0)
    if ROBUST:
        distance = tl.where(inside, tl.abs(value - mean[None, :]), 0.0)
        limit = tl.sum(distance, axis=0) / count * THRESHOLD
        inside = inside & ((distance > limit[None, :]) == 0)
        counts = tl.sum(inside.to(tl.float32), axis=0)
        mean = tl.sum(tl.where(inside, value, 0.0), axis=0) / counts
    squares = (value - mean[None, :]) * (value - mean[None, :])
    outside = tl.sum(tl.where(every & (inside == 0), squares, 0.0), axis=0)
    at = partials + tl.program_id(0).to(tl.int64) * 4 * channels + column
    tl.store(at, mean, mask=column < channels)
    tl.store(at + channels, tl.sum(tl.where(inside, squares, 0.0), axis=0), mask=column < channels)
    tl.store(at + 2 * channels, counts, mask=column < channels)
    tl.store(at + 3 * channels, outside, mask=column < channels)


@triton.jit
def partials_of(partials, at, tiles, channels, column, K: tl.constexpr):
    """Pointers to the means of K tiles from ``at`` on, which are there, and their tokens that count, fp32."""
    tile = at + tl.arange(0, K)
    place = partials + tile.to(tl.int64)[:, None] * 4 * channels + column[None, :]
    mask = (tile < tiles)[:, None] & (column < channels)[None, :]
    return place, mask, tl.load(place + 2 * channels, mask=mask, other=0.0)


@triton.jit
def statistics_kernel(
    partials, statistics, inverses, tokens, tiles, channels, K: tl.constexpr, B: tl.constexpr
):
    """B channels' statistics, bf16, and fp32 inverses of the second, from the tiles' partial ones."""
    column = tl.program_id(0) * B + tl.arange(0, B)
    inside = column < channels
    total = tl.zeros([B], tl.float32)
    every = tl.zeros([B], tl.float32)
    at = 0
    while at < tiles:
        place, mask, count = partials_of(partials, at, tiles, channels, column, K)
        total += tl.sum(tl.load(place, mask=mask, other=0.0) * count, axis=0)
        every += tl.sum(count, axis=0)
        at += K
    centre = (total / every).to(tl.bfloat16)
    tl.store(statistics + column, centre, mask=inside)
    squares = tl.zeros([B], tl.float32)
    outside = tl.zeros([B], tl.float32)
    at = 0
    while at < tiles:
        place, mask, count = partials_of(partials, at, tiles, channels, column, K)
        offset = tl.load(place, mask=mask, other=0.0) - centre.to(tl.float32)[None, :]
        offset = tl.where(mask, offset, 0.0)
        own = tl.load(place + channels, mask=mask, other=0.0)
        squares += tl.sum(own + offset * offset * count, axis=0)
        outside += tl.sum(tl.load(place + 3 * channels, mask=mask, other=0.0), axis=0)
        at += K
    rms = tl.sqrt_rn(squares / every).to(tl.bfloat16)
    # tiles of equal values have the mean that is sent, so the outliers' squares are about it
    whole = tl.sqrt_rn((squares + outside) / (tl.full((), 1.0, tl.float32) * tokens)).to(
        tl.bfloat16
    )
    rms = tl.where(rms.to(tl.float32) <= EQUAL * tl.abs(centre.to(tl.float32)), whole, rms)
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
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(groups, C.R), tl.num_programs(0), num_stages=FLAGS.STAGES
    ):
        first = as_tensor(tile) * C.R
        channel = channels_of(first, width, C)
        z = load_tile(x, first, numel, (1, 1, 0, 0), FLAGS, C).to(tl.float32)
        z = (z - tl.load(statistics + channel).to(tl.float32)) * tl.load(inverses + channel)
        if C.OUTLIERS:
            words = empty_lists(C)
            found, limit = find_outliers(z, groups - first, C)
            if found:
                z, words = split_outliers(z, limit, groups - first, C)
            store_lists(words, out, first, groups, C)
        encode_groups(z, out, first, groups, C)


@triton.jit
def decode_kernel(wire, statistics, x, groups, width, FLAGS: tl.constexpr, C: tl.constexpr):
    """x = q * step * rms + mean. Persistent programs, R groups a step."""
    numel = tl.full((), C.G, tl.int64) * groups
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(groups, C.R), tl.num_programs(0), num_stages=FLAGS.STAGES
    ):
        first = as_tensor(tile) * C.R
        channel = channels_of(first, width, C)
        z = decode_groups(wire, first, groups, 0, C)
        if C.OUTLIERS:
            z = add_lists(z, any_list(wire, 0, first, groups, 1, C), wire, 0, first, groups, 1, C)
        mean = tl.load(statistics + channel).to(tl.float32)
        z = z * tl.load(statistics + width * C.G + channel).to(tl.float32)
        store_tile(x, z + mean, first, numel, (1, 1, 0, 0), FLAGS, C)


def _statistics(x: torch.Tensor, found: torch.Tensor, robust: bool) -> torch.Tensor:
    """Fill ``found``, bf16 [rows * channels], from a contiguous x; fp32 [channels]: 1 / rms."""
    tokens, channels = x.shape
    tiles = ceil_div(tokens, TILE_TOKENS)
    partials = torch.empty((tiles, 4, channels), dtype=torch.float32, device=x.device)
    inverses = torch.empty(channels, dtype=torch.float32, device=x.device)
    start(
        partial_kernel,
        (tiles, ceil_div(channels, TILE_CHANNELS)),
        (x, partials),
        (tokens, channels),
        T=TILE_TOKENS,
        B=TILE_CHANNELS,
        ROBUST=robust,
        num_warps=4,
    )
    start(
        statistics_kernel,
        (ceil_div(channels, JOINED_CHANNELS),),
        (partials, found, inverses),
        (tokens, tiles, channels),
        K=TILES,
        B=JOINED_CHANNELS,
        num_warps=4,
    )
    return inverses


def _constants(
    operation: str, layout: ChannelNormLayout, x: torch.Tensor
) -> tuple[tuple[int], tuple, dict]:
    """Grid, fixed arguments and constants of the codec's kernels."""
    config, device, tuning = layout.config, device_for(x), TUNING[operation]
    if config.outliers:
        tuning = tuning._replace(registers=128)
    spec = make_spec(config, tuning.tile, device)
    groups = layout.numel // config.group_size
    check_groups(groups)
    constants = dict(FLAGS=make_flags(False, False, tuning.stages), C=spec, **tuning.options)
    grid = device.grid(ceil_div(groups, spec.R.value), tuning)
    return grid, (groups, layout.channels // config.group_size), constants


def encode(x: torch.Tensor, layout: ChannelNormLayout) -> torch.Tensor:
    """See reference.encode. Two passes over x: the statistics, then the codec."""
    check_tensor("x", x, x.dtype, (layout.tokens, layout.channels))
    x = x.contiguous()
    wire = torch.empty(layout.wire_bytes, dtype=torch.uint8, device=x.device)
    found = wire[layout.statistics_at :].view(torch.bfloat16)
    grid, fixed, constants = _constants("encode", layout, x)  # refuses what kernels cannot count
    inverses = _statistics(x, found, layout.config.outliers)
    start(encode_kernel, grid, (x, found, inverses, wire), fixed, **constants)
    return wire


def decode(wire: torch.Tensor, layout: ChannelNormLayout, dtype: torch.dtype) -> torch.Tensor:
    """See reference.decode, as one kernel."""
    check_tensor("wire", wire, torch.uint8, (layout.wire_bytes,))
    wire = addressable(wire)
    x = torch.empty((layout.tokens, layout.channels), dtype=dtype, device=wire.device)
    found = wire[layout.statistics_at :].view(torch.bfloat16)
    grid, fixed, constants = _constants("decode", layout, x)
    start(decode_kernel, grid, (wire, found, x), fixed, **constants)
    return x
