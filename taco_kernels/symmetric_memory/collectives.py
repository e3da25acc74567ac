"""The collectives over one channel: argument checks and launches."""

from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from taco_kernels.common import addressable, ceil_div, check_tensor, fast_launch
from taco_kernels.common.device import Device, device_number
from taco_kernels.common.reference import hadamard
from taco_kernels.symmetric_memory.channel import WARPS, Channel, channel_shape, tile_of
from taco_kernels.symmetric_memory.kernels import (
    all_gather_kernel,
    all_reduce_kernel,
    reduce_scatter_kernel,
)
from taco_kernels.taco import launch
from taco_kernels.taco.layout import CodecConfig, check_same_groups
from taco_kernels.taco.spec import make_flags, make_spec

MAX_WORLD_SIZE = 8
OPTIONS = dict(num_warps=WARPS, num_stages=1, enable_fp_fusion=False)


def _own(device: torch.device) -> Device:
    """What a launch needs to know of a channel's device."""
    return device_number(-1 if device.index is None else device.index)


def all_reduce(
    channel: Channel,
    x: torch.Tensor,
    config: CodecConfig,
    out: torch.Tensor | None = None,
    config_out: CodecConfig | None = None,
) -> torch.Tensor:
    """Sum x over the ranks: the bits of encode in W chunks, decode_sum_encode of each, decode. Of two ranks
    without a ``config_out`` those of encode, decode_sum of both: all that a rank has is as many bytes as the
    two pieces that it would send.

    Args:
        channel: this rank's end.
        x: any shape and stride, bf16, fp16 or fp32, not empty; the same shape and dtype on every rank.
        config: of the codec.
        out: contiguous, of x's shape and dtype; allocated if None.
        config_out: of the second encode, where it is another one (of the same groups).
    """
    numel = x.numel()
    if channel.world_size == 2 and config_out is None:
        pieces = numel, numel, x.dtype, launch.layout_of(x)
        return _run(reduce_scatter_kernel, channel, x, out, x.shape, config, config, *pieces)
    pieces = numel, config.chunk_numel(numel, channel.world_size), x.dtype, launch.layout_of(x)
    return _run(all_reduce_kernel, channel, x, out, x.shape, config, config_out or config, *pieces)


def reduce_scatter(
    channel: Channel, x: torch.Tensor, config: CodecConfig, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum x over the ranks and return this rank's slice of the first dimension, which W divides.

    Arguments as for ``all_reduce``.
    """
    if x.shape[0] % channel.world_size:
        raise ValueError(
            f"the first dimension of {tuple(x.shape)} must divide by {channel.world_size} ranks"
        )
    shape = x.shape[0] // channel.world_size, *x.shape[1:]
    pieces = x.numel(), x.numel() // channel.world_size, x.dtype, launch.layout_of(x)
    return _run(reduce_scatter_kernel, channel, x, out, shape, config, config, *pieces)


def all_gather_encoded(
    channel: Channel,
    wire: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    config: CodecConfig,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every rank's tensor, decoded, one after the other along the first dimension; ``wire``, uint8[1,
    wire_bytes], is what ``taco_kernels.taco.encode`` made of a tensor of ``shape`` and ``dtype``."""
    numel = torch.Size(shape).numel()
    check_tensor("wire", wire, torch.uint8, (1, config.wire_bytes(numel)))
    shape = channel.world_size * shape[0], *shape[1:]
    pieces = channel.world_size * numel, numel, dtype, None
    return _run(all_gather_kernel, channel, addressable(wire), out, shape, config, config, *pieces)


def _run(
    kernel, channel, x, out, shape, config, config_out, numel, piece, dtype, layout
) -> torch.Tensor:
    """Launch ``kernel`` on ``x`` of ``layout``, ``numel`` values of ``dtype`` in pieces of ``piece``, by a
    plan that is made once; returns ``out``, new if None."""
    channel.check()
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=x.device)
    elif out.shape != torch.Size(shape) or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be a contiguous {dtype}{list(shape)}, not {out.dtype}{list(out.shape)}"
        )
    key = kernel, config, config_out, numel, piece, dtype, layout
    plan = channel.plans.get(key)
    if plan is None:
        if len(channel.plans) >= launch.PLANS:
            channel.plans.clear()
        plan = channel.plans[key] = _plan(channel, *key)
    plan.launch((x if plan.walkable else x.contiguous(), out))
    return out


def _plan(channel: Channel, kernel, config, config_out, numel, piece, dtype, layout) -> launch.Plan:
    check_same_groups(config, config_out)
    size, own = config.group_size, _own(channel.table.device)
    groups = ceil_div(piece, size)
    launch.check_groups(groups * channel.world_size)
    whole = (
        kernel is reduce_scatter_kernel and piece == numel and channel.world_size > 1
    )  # all want all of x
    uneven = piece % size and not whole
    rows = None if uneven and layout else launch.rows_of(layout, size)  # None: x is to be copied
    walkable = rows is not None
    rows = rows or launch.rows_of(None, size)
    tail = numel % size != 0 or piece % size != 0
    shape = channel.world_size, channel.programs
    to_wire, from_wire, constants = _constants(
        kernel, config, config_out, dtype, channel.table.device, shape, rows.strided, tail, whole
    )
    tiles = ceil_div(groups * size, tile_of(config, own) * (2 if whole else 1))  # of each step
    programs = ceil_div(tiles, ceil_div(tiles, channel.programs))  # as few as need no more steps
    end = channel.table, channel.steps, channel.memory, channel.rank
    waiting = channel.error_address, channel.timeout_ns
    fixed = to_wire, from_wire, *end, *waiting, numel, piece, piece, groups, *rows[:4]
    return launch.Plan(fast_launch.Launch(kernel, (programs,), fixed, constants), walkable)


@lru_cache(maxsize=1024)
def _constants(kernel, config, config_out, dtype, device, shape, strided, tail, whole):
    """The matrices and the keyword arguments of a launch; looked up, since making them takes longer."""
    own = _own(device)
    tile = tile_of(config, own)
    spec = partial(make_spec, device=own, merged=True)
    full = spec(config, tile)
    constants = dict(FLAGS=make_flags(strided, tail, 1), OUT_FLAGS=make_flags(False, tail, 1))
    constants |= dict(C=full, E=channel_shape(*shape), **OPTIONS)
    if kernel is all_reduce_kernel:
        constants |= dict(HALF=spec(config, tile // 2), D=spec(config_out, tile))
        constants["DHALF"] = spec(config_out, tile // 2)
    constants |= dict(WHOLE=whole) if kernel is reduce_scatter_kernel else {}
    sums = (
        kernel is reduce_scatter_kernel and shape[0] != 2
    )  # transforms of fp32 sums, not of codes
    points, half = full.POINT.value, torch.bfloat16 if dtype == torch.float32 else dtype
    to_wire = _matrix(points, 1 / config.group_size, True, half, device)
    from_wire = _matrix(points, 1.0, False, torch.bfloat16 if sums else torch.float16, device)
    return to_wire, from_wire, constants


@lru_cache
def _matrix(
    points: int, value: float, shuffled: bool, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``common.hadamard.sylvester`` in device memory, for all streams."""
    column = torch.arange(points)
    if shuffled and points >= 64:
        column = (column & ~62) | ((column & 6) << 3) | ((column >> 2) & 14)
    return (hadamard(torch.eye(points))[:, column].contiguous() * value).to(dtype).to(device)
