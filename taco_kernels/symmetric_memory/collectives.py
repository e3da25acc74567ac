"""The collectives over one channel: argument checks and launches."""

from collections.abc import Callable, Sequence
from functools import lru_cache

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
from taco_kernels.taco.spec import Spec, make_flags, make_spec

MAX_WORLD_SIZE = 8
OPTIONS = dict(num_warps=WARPS, num_stages=1, enable_fp_fusion=False)


def _own(device: torch.device) -> Device:
    """What a launch needs to know of a channel's device."""
    return device_number(-1 if device.index is None else device.index)


def _check_no_lists(*configs: CodecConfig) -> None:
    """Raise ValueError for what these kernels would leave out."""
    if any(config.outliers for config in configs):
        raise ValueError("outliers: collectives over symmetric memory send no lists; use taco_kernels.taco")


def all_reduce(
    channel: Channel,
    x: torch.Tensor,
    config: CodecConfig,
    out: torch.Tensor | None = None,
    config_out: CodecConfig | None = None,
) -> torch.Tensor:
    """Sum x over the ranks: the bits of encode in W chunks, decode_sum_encode of each, decode.

    Args:
        channel: this rank's end.
        x: any shape and stride, bf16, fp16 or fp32, not empty; the same shape and dtype on every rank.
        config: of the codec.
        out: contiguous, of x's shape and dtype; allocated if None.
        config_out: of the second encode, where it is another one (of the same groups).
    """
    channel.check()
    out = _output(out, x.shape, x)
    like = x.numel(), x.dtype, launch.layout_of(x)
    return _run(x, out, channel, _plan_all_reduce, config, config_out, *like)


def _plan_all_reduce(channel, config, config_out, numel, dtype, layout) -> launch.Plan:
    config_out = config_out or config
    check_same_groups(config, config_out)
    _check_no_lists(config, config_out)
    groups = config.chunk_numel(numel, channel.world_size) // config.group_size
    values = groups * config.group_size
    tiles = ceil_div(values, tile_of(config, _own(channel.table.device)))
    rows = launch.rows_of(layout, config.group_size)
    tail = numel % config.group_size != 0
    message = (numel, values, values, groups)
    return _prepare(all_reduce_kernel, channel, tiles, message, rows, tail, dtype, config, config_out)


def reduce_scatter(
    channel: Channel, x: torch.Tensor, config: CodecConfig, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum x over the ranks and return this rank's slice of the first dimension, which W divides.

    Arguments as for ``all_reduce``.
    """
    channel.check()
    if x.shape[0] % channel.world_size:
        raise ValueError(f"the first dimension of {tuple(x.shape)} must divide by {channel.world_size} ranks")
    out = _output(out, (x.shape[0] // channel.world_size, *x.shape[1:]), x)
    like = x.numel() // channel.world_size, x.dtype, launch.layout_of(x)
    return _run(x, out, channel, _plan_shards, reduce_scatter_kernel, config, *like)


def all_gather_encoded(
    channel: Channel,
    wire: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    config: CodecConfig,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every rank's tensor, decoded, one after the other along the first dimension.

    Args:
        channel, config, out: as for ``all_reduce``.
        wire: uint8[1, wire_bytes], what ``taco_kernels.taco.encode`` made of a tensor of ``shape`` and
            ``dtype``.
    """
    channel.check()
    numel = torch.Size(shape).numel()
    check_tensor("wire", wire, torch.uint8, (1, config.wire_bytes(numel)))
    wire = addressable(wire)
    out = _output(out, (channel.world_size * shape[0], *shape[1:]), wire, dtype)
    return _run(wire, out, channel, _plan_shards, all_gather_kernel, config, numel, dtype, None)


def _plan_shards(channel, kernel, config, shard, dtype, layout) -> launch.Plan:
    """Of the two whose pieces are slices of ``shard`` values."""
    _check_no_lists(config)
    groups = config.chunk_numel(shard) // config.group_size
    tail = shard % config.group_size != 0
    copied = tail and layout and kernel is reduce_scatter_kernel  # pieces of it that are no whole groups
    rows = None if copied else launch.rows_of(layout, config.group_size)
    tiles = ceil_div(groups * config.group_size, tile_of(config, _own(channel.table.device)))
    message = (channel.world_size * shard, shard, shard, groups)
    return _prepare(kernel, channel, tiles, message, rows, tail, dtype, config)


def _output(out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor, dtype=None) -> torch.Tensor:
    dtype = dtype or like.dtype
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if out.shape != torch.Size(shape) or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous {dtype}{list(shape)}, not {out.dtype}{list(out.shape)}")
    return out


def _run(
    x: torch.Tensor, out: torch.Tensor, channel: Channel, make: Callable[..., launch.Plan], *arguments
) -> torch.Tensor:
    """Launch ``make(channel, *arguments)``, made once, on ``x`` and ``out``; returns ``out``."""
    key = (make, *arguments)
    plan = channel.plans.get(key)
    if plan is None:
        if len(channel.plans) >= launch.PLANS:
            channel.plans.clear()
        plan = channel.plans[key] = make(channel, *arguments)
    plan.launch((x if plan.walkable else x.contiguous(), out))
    return out


def _prepare(kernel, channel, tiles, message, rows, tail, dtype, config, config_out=None) -> launch.Plan:
    """The launch of ``kernel`` on ``tiles`` tiles a piece; ``rows`` is None where x is to be copied."""
    launch.check_groups(message[3] * channel.world_size)
    walkable = rows is not None
    rows = rows or launch.rows_of(None, config.group_size)
    shape = channel.world_size, channel.programs
    to_wire, from_wire, constants = _constants(
        kernel, config, config_out, dtype, channel.table.device, shape, rows.strided, tail
    )
    programs = ceil_div(tiles, ceil_div(tiles, channel.programs))  # as few as need no more steps
    own = (
        channel.table,
        channel.steps,
        channel.memory,
        channel.rank,
        channel.error_address,
        channel.timeout_ns,
    )
    fixed = to_wire, from_wire, *own, *message, *rows[:4]
    return launch.Plan(fast_launch.Launch(kernel, (programs,), fixed, constants), walkable)


@lru_cache(maxsize=1024)
def _constants(kernel, config, config_out, dtype, device, shape, strided, tail):
    """The matrices and the keyword arguments of a launch; looked up, since making them takes longer."""
    own = _own(device)

    def spec(config: CodecConfig, tile: int) -> Spec:
        return make_spec(config, tile // config.group_size, own, merged=True)

    tile = tile_of(config, own)
    full = spec(config, tile)
    constants = dict(FLAGS=make_flags(strided, tail, 1), OUT_FLAGS=make_flags(False, tail, 1))
    constants |= dict(C=full, E=channel_shape(*shape), **OPTIONS)
    if kernel is all_reduce_kernel:
        constants |= dict(HALF=spec(config, tile // 2), D=spec(config_out, tile))
        constants["DHALF"] = spec(config_out, tile // 2)
    sums = kernel is reduce_scatter_kernel  # it transforms sums, the others codes
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
