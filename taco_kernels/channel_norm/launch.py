"""Launching the kernels of normalised channels. Same signatures as reference.py."""

import torch

from taco_kernels.channel_norm.kernels import decode_kernel, encode_kernel, partial_kernel, statistics_kernel
from taco_kernels.channel_norm.layout import TILE_TOKENS, ChannelNormLayout
from taco_kernels.common.device import Tuning, device_for
from taco_kernels.common.fast_launch import start
from taco_kernels.common.sizes import ALIGNMENT, ceil_div
from taco_kernels.taco.launch import check_groups
from taco_kernels.taco.spec import make_flags, spec_of

TILE_CHANNELS = 64
"""And TILE_TOKENS tokens: values whose partial statistics a program finds. It holds them all."""
TILES = 64
"""Tiles that a program puts together at a time."""
JOINED_CHANNELS = 16
"""Channels that it does that for: few, so that enough programs run at once."""
TUNING = {"encode": Tuning(4096, 4, 1, 40, registers=80), "decode": Tuning(2048, 4, 1, 8, registers=64)}
"""No pipeline over tiles: it would hold the statistics of every value in shared memory, too."""


def _statistics(x: torch.Tensor, found: torch.Tensor, robust: bool) -> torch.Tensor:
    """Fill ``found``, bf16 [rows * channels], from a contiguous x; fp32 [channels]: 1 / rms."""
    tokens, channels = x.shape
    tiles = ceil_div(tokens, TILE_TOKENS)
    partials = torch.empty((tiles, 3 if robust else 2, channels), dtype=torch.float32, device=x.device)
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
        T=TILE_TOKENS,
        K=TILES,
        B=JOINED_CHANNELS,
        ROBUST=robust,
        num_warps=4,
    )
    return inverses


def _constants(operation: str, layout: ChannelNormLayout, x: torch.Tensor) -> tuple[tuple[int], tuple, dict]:
    """Grid, fixed arguments and constants of the codec's kernels."""
    config, device, tuning = layout.config, device_for(x), TUNING[operation]
    if config.outliers:
        tuning = tuning._replace(registers=128)
    spec = spec_of(config, device, tuning)
    groups = layout.numel // config.group_size
    check_groups(groups)
    constants = dict(FLAGS=make_flags(False, False, tuning.stages), C=spec, **tuning.options)
    grid = device.grid(ceil_div(groups, spec.R.value), tuning)
    return grid, (groups, layout.channels // config.group_size), constants


def encode(x: torch.Tensor, layout: ChannelNormLayout) -> torch.Tensor:
    """See reference.encode. Two passes over x: the statistics, then the codec."""
    layout.check_values(x)
    x = x.contiguous()
    wire = torch.empty(layout.wire_bytes, dtype=torch.uint8, device=x.device)
    found = wire[layout.statistics_at :].view(torch.bfloat16)
    inverses = _statistics(x, found, layout.config.outliers)
    grid, fixed, constants = _constants("encode", layout, x)
    start(encode_kernel, grid, (x, found, inverses, wire), fixed, **constants)
    return wire


def decode(wire: torch.Tensor, layout: ChannelNormLayout, dtype: torch.dtype) -> torch.Tensor:
    """See reference.decode, as one kernel."""
    layout.check_wire(wire)
    if wire.data_ptr() % ALIGNMENT or not wire.is_contiguous():
        wire = wire.clone(memory_format=torch.contiguous_format)
    x = torch.empty((layout.tokens, layout.channels), dtype=dtype, device=wire.device)
    found = wire[layout.statistics_at :].view(torch.bfloat16)
    grid, fixed, constants = _constants("decode", layout, x)
    start(decode_kernel, grid, (wire, found, x), fixed, **constants)
    return x
