"""Triton kernels of normalised channels, and their launches. Same signatures as reference.py.

::

    partial_kernel      x -> partials      each tile of TILE_TOKENS tokens: means, squares about them, counts
    statistics_kernel   partials -> mean, rms, 1 / rms of each channel
    encode_kernel       x, statistics -> the codec's wire
    decode_kernel       the codec's wire, statistics -> x

Statistics take one pass over x. Normalisation takes none: it happens where the codec loads and
stores.
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
"""Channels of a tile, by TILE_TOKENS tokens: values whose partial statistics a program has. It
holds them all."""
TILES = 64
"""Tiles whose statistics a program puts together at a time."""
JOINED_CHANNELS = 16
"""Channels that it does that for: few, so that enough programs run at once."""
TUNING = {
    "encode": Tuning(4096, 4, 1, 40, registers=80),
    "decode": Tuning(2048, 4, 1, 8, registers=64),
}
"""No pipeline over tiles: it would hold the statistics of every value in shared memory, too."""
OUTLIER_REGISTERS = 128
"""Registers a thread where the codec stores outliers separately, which takes more."""

# Rows of ``partials``, fp32 [tiles, 4, channels]: what partial_kernel has of each channel of a
# tile.
MEANS = tl.constexpr(0)
SQUARES = tl.constexpr(1)  # sum over the tokens that count, about their own mean
COUNTS = tl.constexpr(2)  # tokens that count
OUTSIDE = tl.constexpr(3)  # sum of the outliers' squares, about that mean too
PARTS = tl.constexpr(4)


@triton.jit
def partial_kernel(
    x,
    partials,
    tokens,
    channels,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROBUST: tl.constexpr,
):
    """Find the statistics of a tile of TOKENS tokens and CHANNELS channels; grid (tiles, channels /
    CHANNELS).

    Squares are about the tile's own means, so that nothing cancels, wherever the values lie: the
    sum of squares less the square of the sum would lose all digits where a mean is large.

    Args:
        x: [tokens, channels], contiguous, of any floating-point type.
        partials: fp32 [tiles, PARTS, channels].
        tokens: rows of x.
        channels: columns of x.
        TOKENS: tokens of a tile.
        CHANNELS: channels of a program.
        ROBUST: leave out tokens whose distance from the mean exceeds THRESHOLD mean distances.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row < tokens)[:, None] & (column < channels)[None, :]
    # 64 bits: a message may have more than 2^31 values.
    index = row.to(tl.int64)[:, None] * channels + column[None, :]
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    count = tl.minimum(tokens - tl.program_id(0) * TOKENS, TOKENS).to(tl.float32)
    count = tl.full([CHANNELS], 1.0, tl.float32) * count
    # IEEE divisions throughout: `/` may be off by 2 ulp on a GPU.
    mean = tl.div_rn(tl.sum(value, axis=0), count)
    counting = inside
    counts = tl.sum(inside.to(tl.float32), axis=0)
    if ROBUST:
        distance = tl.where(inside, tl.abs(value - mean[None, :]), 0.0)
        limit = tl.div_rn(tl.sum(distance, axis=0), count) * THRESHOLD
        # "not greater", so that a NaN counts and makes the channel's statistics NaN
        counting = inside & ((distance > limit[None, :]) == 0)
        counts = tl.sum(counting.to(tl.float32), axis=0)
        mean = tl.div_rn(tl.sum(tl.where(counting, value, 0.0), axis=0), counts)
    squares = (value - mean[None, :]) * (value - mean[None, :])
    outside = tl.sum(tl.where(inside & (counting == 0), squares, 0.0), axis=0)
    means_at = partials + tl.program_id(0).to(tl.int64) * PARTS * channels + column
    tl.store(means_at + MEANS * channels, mean, mask=column < channels)
    counted_squares = tl.sum(tl.where(counting, squares, 0.0), axis=0)
    tl.store(means_at + SQUARES * channels, counted_squares, mask=column < channels)
    tl.store(means_at + COUNTS * channels, counts, mask=column < channels)
    tl.store(means_at + OUTSIDE * channels, outside, mask=column < channels)


@triton.jit
def partials_of(partials, first, tiles, channels, column, TILES: tl.constexpr):
    """Find the partial statistics of TILES tiles.

    Args:
        partials: fp32 [tiles, PARTS, channels].
        first: number of the first tile.
        tiles: how many there are.
        channels: how many there are.
        column: int32[B], numbers of the channels.
        TILES: tiles at a time.

    Returns:
        Pointers [TILES, B] to the means; which of them exist; the numbers of tokens that count,
        fp32.
    """
    tile = first + tl.arange(0, TILES)
    pointers = partials + tile.to(tl.int64)[:, None] * PARTS * channels + column[None, :]
    mask = (tile < tiles)[:, None] & (column < channels)[None, :]
    return pointers, mask, tl.load(pointers + COUNTS * channels, mask=mask, other=0.0)


@triton.jit
def statistics_kernel(
    partials,
    statistics,
    inverses,
    tokens,
    tiles,
    channels,
    TILES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Put the tiles' statistics together; grid (channels / CHANNELS,). Two passes over
    ``partials``.

    With n_t, m_t and s_t a tile's tokens that count, their mean and squares about it::

        mean = sum(n_t m_t) / sum(n_t), rounded to bf16
        rms  = sqrt(sum(s_t + n_t (m_t - mean)^2) / sum(n_t)), rounded to bf16

    The squares are about the mean that is sent, so that rms has what its rounding leaves.

    Args:
        partials: fp32 [tiles, PARTS, channels].
        statistics: bf16 [2, channels]: means, then rms.
        inverses: fp32 [channels]: 1 / rms, 0 where that is 0.
        tokens: of the message.
        tiles: of TILE_TOKENS tokens.
        channels: of the message.
        TILES: tiles at a time.
        CHANNELS: channels of a program.
    """
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    # First pass: the mean of the tokens that count. TILES rows of partials are in flight together.
    total = tl.zeros([CHANNELS], tl.float32)
    counted = tl.zeros([CHANNELS], tl.float32)
    first = 0
    while first < tiles:
        pointers, mask, count = partials_of(partials, first, tiles, channels, column, TILES)
        total += tl.sum(tl.load(pointers, mask=mask, other=0.0) * count, axis=0)
        counted += tl.sum(count, axis=0)
        first += TILES
    mean = tl.div_rn(total, counted).to(tl.bfloat16)
    tl.store(statistics + column, mean, mask=inside)

    # Second pass: squares about the mean as it is sent.
    squares = tl.zeros([CHANNELS], tl.float32)
    outside = tl.zeros([CHANNELS], tl.float32)
    first = 0
    while first < tiles:
        pointers, mask, count = partials_of(partials, first, tiles, channels, column, TILES)
        offset = tl.load(pointers, mask=mask, other=0.0) - mean.to(tl.float32)[None, :]
        offset = tl.where(mask, offset, 0.0)
        tile_squares = tl.load(pointers + SQUARES * channels, mask=mask, other=0.0)
        squares += tl.sum(tile_squares + offset * offset * count, axis=0)
        outside += tl.sum(tl.load(pointers + OUTSIDE * channels, mask=mask, other=0.0), axis=0)
        first += TILES
    rms = tl.sqrt_rn(tl.div_rn(squares, counted)).to(tl.bfloat16)

    # A channel whose values are equal but for outliers takes the rms of all tokens (reference.py).
    # Its tiles all have the mean that is sent, so the outliers' squares are about it.
    all_tokens = tl.full([CHANNELS], 1.0, tl.float32) * tokens
    rms_of_all = tl.sqrt_rn(tl.div_rn(squares + outside, all_tokens)).to(tl.bfloat16)
    # A rounding of the mean alone is no spread: see EQUAL.
    is_equal = rms.to(tl.float32) <= tl.abs(mean.to(tl.float32)) * EQUAL
    rms = tl.where(is_equal, rms_of_all, rms)
    tl.store(statistics + channels + column, rms, mask=inside)
    rms = rms.to(tl.float32)
    inverse = tl.where(rms == 0.0, 0.0, tl.div_rn(tl.full([CHANNELS], 1.0, tl.float32), rms))
    tl.store(inverses + column, inverse, mask=inside)


@triton.jit
def channels_of(first, groups_per_token, SPEC: tl.constexpr):
    """int32[R, G]: the channel of every value in groups first..., which lie inside tokens.

    Args:
        first: number of the tile's first group.
        groups_per_token: channels / G.
        SPEC: ``Spec`` of the codec.
    """
    group = (first + tl.arange(0, SPEC.R)) % groups_per_token
    return (group * SPEC.G)[:, None] + tl.arange(0, SPEC.G)[None, :]


@triton.jit
def encode_kernel(
    x,
    statistics,
    inverses,
    out,
    groups,
    groups_per_token,
    FLAGS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """out = the codec's wire of (x - mean) / rms. Persistent programs, R groups a step.

    Args:
        x: [tokens, channels], contiguous.
        statistics: bf16 [2, channels]: means, then rms.
        inverses: fp32 [channels]: 1 / rms.
        out: uint8, the wire.
        groups: in the message.
        groups_per_token: channels / G.
        FLAGS: ``Flags`` of the launch.
        SPEC: ``Spec`` of the codec.
    """
    numel = tl.full((), SPEC.G, tl.int64) * groups
    # With outliers nothing is computed ahead of the loop: it would not fit in OUTLIER_REGISTERS.
    for tile in tl.range(
        tl.program_id(0),
        tl.cdiv(groups, SPEC.R),
        tl.num_programs(0),
        num_stages=FLAGS.STAGES,
        disable_licm=SPEC.OUTLIERS,
    ):
        first = as_tensor(tile) * SPEC.R
        channel = channels_of(first, groups_per_token, SPEC)
        z = load_tile(x, first, numel, (1, 1, 0, 0), FLAGS, SPEC).to(tl.float32)
        mean = tl.load(statistics + channel).to(tl.float32)
        z = (z - mean) * tl.load(inverses + channel)
        # Outliers of the normalised values, which need not be those that the statistics leave out.
        if SPEC.OUTLIERS:
            words = empty_lists(SPEC)
            has_outliers, limit = find_outliers(z, groups - first, SPEC)
            if has_outliers:
                z, words = split_outliers(z, limit, groups - first, SPEC)
            store_lists(words, out, first, groups, SPEC)
        encode_groups(z, out, first, groups, SPEC)


@triton.jit
def decode_kernel(
    wire, statistics, x, groups, groups_per_token, FLAGS: tl.constexpr, SPEC: tl.constexpr
):
    """x = q * step * rms + mean. Persistent programs, R groups a step.

    Args:
        wire: uint8, the codec's.
        statistics: bf16 [2, channels]: means, then rms.
        x: [tokens, channels], contiguous.
        groups: in the message.
        groups_per_token: channels / G.
        FLAGS: ``Flags`` of the launch.
        SPEC: ``Spec`` of the codec.
    """
    numel = tl.full((), SPEC.G, tl.int64) * groups
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(groups, SPEC.R), tl.num_programs(0), num_stages=FLAGS.STAGES
    ):
        first = as_tensor(tile) * SPEC.R
        channel = channels_of(first, groups_per_token, SPEC)
        z = decode_groups(wire, first, groups, 0, SPEC)
        if SPEC.OUTLIERS:
            lists = any_list(wire, 0, first, groups, 1, SPEC)
            z = add_lists(z, lists, wire, 0, first, groups, 1, SPEC)
        # A product and a sum, each rounded: no fused multiply-add, as in the reference.
        mean = tl.load(statistics + channel).to(tl.float32)
        z = z * tl.load(statistics + groups_per_token * SPEC.G + channel).to(tl.float32)
        store_tile(x, z + mean, first, numel, (1, 1, 0, 0), FLAGS, SPEC)


def _statistics(x: torch.Tensor, statistics: torch.Tensor, robust: bool) -> torch.Tensor:
    """Fill ``statistics``, bf16 [2 * channels], from a contiguous x [tokens, channels].

    Returns:
        fp32 [channels]: 1 / rms.
    """
    tokens, channels = x.shape
    tiles = ceil_div(tokens, TILE_TOKENS)
    shape = (tiles, PARTS.value, channels)
    partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    inverses = torch.empty(channels, dtype=torch.float32, device=x.device)
    start(
        partial_kernel,
        (tiles, ceil_div(channels, TILE_CHANNELS)),
        (x, partials),
        (tokens, channels),
        TOKENS=TILE_TOKENS,
        CHANNELS=TILE_CHANNELS,
        ROBUST=robust,
        num_warps=4,
    )
    start(
        statistics_kernel,
        (ceil_div(channels, JOINED_CHANNELS),),
        (partials, statistics, inverses),
        (tokens, tiles, channels),
        TILES=TILES,
        CHANNELS=JOINED_CHANNELS,
        num_warps=4,
    )
    return inverses


def _constants(
    operation: str, layout: ChannelNormLayout, x: torch.Tensor
) -> tuple[tuple[int], tuple, dict]:
    """Grid, fixed arguments and constants of the codec's kernels.

    Raises:
        ValueError: the message has more groups than kernels can count.
    """
    config = layout.config
    device = device_for(x)
    tuning = TUNING[operation]
    if config.outliers:
        tuning = tuning._replace(registers=OUTLIER_REGISTERS)
    spec = make_spec(config, tuning.tile, device)
    groups = layout.numel // config.group_size
    check_groups(groups)
    flags = make_flags(False, False, tuning.stages)
    grid = device.grid(ceil_div(groups, spec.R.value), tuning)
    fixed = (groups, layout.channels // config.group_size)
    return grid, fixed, dict(FLAGS=flags, SPEC=spec, **tuning.options)


def encode(x: torch.Tensor, layout: ChannelNormLayout) -> torch.Tensor:
    """See reference.encode. Two passes over x: the statistics, then the codec."""
    check_tensor("x", x, x.dtype, (layout.tokens, layout.channels))
    x = x.contiguous()
    wire = torch.empty(layout.wire_bytes, dtype=torch.uint8, device=x.device)
    statistics = wire[layout.statistics_at :].view(torch.bfloat16)
    grid, fixed, constants = _constants("encode", layout, x)  # refuses what kernels cannot count
    inverses = _statistics(x, statistics, layout.config.outliers)
    start(encode_kernel, grid, (x, statistics, inverses, wire), fixed, **constants)
    return wire


def decode(wire: torch.Tensor, layout: ChannelNormLayout, dtype: torch.dtype) -> torch.Tensor:
    """See reference.decode; one kernel.

    Args:
        wire: uint8 ``[wire_bytes]``.
        layout: of the message.
        dtype: of the result.
    """
    check_tensor("wire", wire, torch.uint8, (layout.wire_bytes,))
    wire = addressable(wire)
    x = torch.empty((layout.tokens, layout.channels), dtype=dtype, device=wire.device)
    statistics = wire[layout.statistics_at :].view(torch.bfloat16)
    grid, fixed, constants = _constants("decode", layout, x)
    start(decode_kernel, grid, (wire, statistics, x), fixed, **constants)
    return x
