"""The collectives over one channel: argument checks and launches.

A launch is prepared once for each kernel, codec, size, dtype and layout (a ``Plan``), and kept with
the channel: what differs from call to call is two addresses.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from taco_kernels.common import addressable, ceil_div, check_tensor, fast_launch
from taco_kernels.common.device import Device, device_number
from taco_kernels.common.reference import hadamard
from taco_kernels.symmetric_memory.channel import WARPS, Channel, channel_shape, tile_of
from taco_kernels.symmetric_memory.kernels import (
    Extent,
    all_gather_kernel,
    all_reduce_kernel,
    reduce_scatter_kernel,
)
from taco_kernels.taco import launch
from taco_kernels.taco.layout import CodecConfig, check_same_groups
from taco_kernels.taco.spec import make_flags, make_spec

MAX_WORLD_SIZE = 8
"""Ranks of a channel: what one host has, and what its memory is measured for."""
OPTIONS = dict(num_warps=WARPS, num_stages=1, enable_fp_fusion=False)
"""Compiler options of every kernel. Without fusion, products are rounded as the codec's own kernels
round."""


def _device_of(device: torch.device) -> Device:
    """The description of a channel's device that launches look at."""
    return device_number(-1 if device.index is None else device.index)


def all_reduce(
    channel: Channel,
    x: torch.Tensor,
    config: CodecConfig,
    out: torch.Tensor | None = None,
    config_out: CodecConfig | None = None,
) -> torch.Tensor:
    """Sum x over the ranks: the bits of encode in W chunks, decode_sum_encode of each, decode.

    Of two ranks without a ``config_out`` it has the bits of encode, decode_sum of both: all that a
    rank has is as many bytes as the two pieces that it would send.

    Args:
        channel: this rank's end.
        x: any shape and stride, bf16, fp16 or fp32, not empty; the same shape and dtype on every
            rank.
        config: of the codec.
        out: contiguous, of x's shape and dtype; allocated if None.
        config_out: of the second encode, where it is another one (of the same groups).

    Returns:
        The sum, of x's shape and dtype; ``out`` if it was passed.

    Raises:
        SymmetricMemoryError: an earlier call gave up waiting for a peer.
        ValueError: ``out`` or ``config_out`` does not fit.
    """
    numel = x.numel()
    layout = launch.layout_of(x)
    # Keys are plain tuples: this is done in every call, and a tuple is made and hashed fastest.
    if channel.world_size == 2 and config_out is None:
        key = (reduce_scatter_kernel, config, config, numel, numel, x.dtype, layout)
    else:
        piece = config.chunk_numel(numel, channel.world_size)
        key = (all_reduce_kernel, config, config_out or config, numel, piece, x.dtype, layout)
    return _run(channel, x, out, x.shape, key)


def reduce_scatter(
    channel: Channel, x: torch.Tensor, config: CodecConfig, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum x over the ranks and return this rank's slice of the first dimension, which W divides.

    Args:
        channel: this rank's end.
        x: any shape and stride, bf16, fp16 or fp32, not empty; the same shape and dtype on every
            rank.
        config: of the codec.
        out: contiguous, of the slice's shape and x's dtype; allocated if None.

    Returns:
        The slice; ``out`` if it was passed.

    Raises:
        SymmetricMemoryError: an earlier call gave up waiting for a peer.
        ValueError: the first dimension does not divide, or ``out`` does not fit.
    """
    if x.shape[0] % channel.world_size:
        raise ValueError(
            f"the first dimension of {tuple(x.shape)} must divide by {channel.world_size} ranks"
        )
    shape = (x.shape[0] // channel.world_size, *x.shape[1:])
    numel = x.numel()
    piece = numel // channel.world_size
    key = (reduce_scatter_kernel, config, config, numel, piece, x.dtype, launch.layout_of(x))
    return _run(channel, x, out, shape, key)


def all_gather_encoded(
    channel: Channel,
    wire: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    config: CodecConfig,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather and decode every rank's tensor, one after the other along the first dimension.

    Args:
        channel: this rank's end.
        wire: uint8[1, wire_bytes], what ``taco_kernels.taco.encode`` made of this rank's tensor.
        shape: of each rank's tensor.
        dtype: of the result: bf16, fp16 or fp32.
        config: of the codec.
        out: contiguous, of the result's shape and dtype; allocated if None.

    Returns:
        ``[W * shape[0], *shape[1:]]`` in ``dtype``; ``out`` if it was passed.

    Raises:
        SymmetricMemoryError: an earlier call gave up waiting for a peer.
        ValueError: ``wire`` or ``out`` does not fit.
    """
    piece = torch.Size(shape).numel()
    check_tensor("wire", wire, torch.uint8, (1, config.wire_bytes(piece)))
    shape = (channel.world_size * shape[0], *shape[1:])
    numel = channel.world_size * piece
    key = (all_gather_kernel, config, config, numel, piece, dtype, None)
    return _run(channel, addressable(wire), out, shape, key)


def _run(
    channel: Channel, x: torch.Tensor, out: torch.Tensor | None, shape: Sequence[int], key: tuple
) -> torch.Tensor:
    """Launch a kernel by a plan that is made once for ``key``, the arguments of ``_plan`` after the
    channel.

    Returns:
        ``out``, or a new tensor of ``shape`` if it is None.
    """
    channel.check()
    dtype = key[5]
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=x.device)
    elif out.shape != torch.Size(shape) or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be a contiguous {dtype}{list(shape)}, not {out.dtype}{list(out.shape)}"
        )
    plan = channel.plans.get(key)
    if plan is None:
        if len(channel.plans) >= launch.PLANS:  # sizes that never come back
            channel.plans.clear()
        plan = _plan(channel, *key)
        channel.plans[key] = plan
    plan.launch((x if plan.walkable else x.contiguous(), out))
    return out


def _plan(
    channel: Channel,
    kernel,
    config: CodecConfig,
    config_out: CodecConfig,
    numel: int,
    piece: int,
    dtype: torch.dtype,
    layout: launch.Layout,
) -> launch.Plan:
    """Prepare the launches of ``kernel`` on a tensor of a layout, ``numel`` values in pieces of
    ``piece``."""
    check_same_groups(config, config_out)
    size = config.group_size
    groups = ceil_div(piece, size)
    launch.check_groups(groups * channel.world_size)
    # An all-reduce of two ranks in one exchange: both want the sum of all of x.
    one_piece = kernel is reduce_scatter_kernel and piece == numel and channel.world_size > 1

    # A strided tensor is walked in place if its rows are whole groups, and so are the pieces, as
    # groups are counted from the tensor's start there. Else x is copied before each call.
    rows = launch.rows_of(layout, size)
    if layout and piece % size and not one_piece:
        rows = None
    walkable = rows is not None
    if not walkable:
        rows = launch.rows_of(None, size)
    # The last group of the tensor, or of each piece, is not whole.
    tail = numel % size != 0 or piece % size != 0

    device = channel.table.device
    shape = (channel.world_size, channel.programs)
    to_wire, from_wire, constants = _constants(
        kernel, config, config_out, dtype, device, shape, rows.strided, tail, one_piece
    )
    step_values = tile_of(config, _device_of(device))
    if one_piece:
        step_values *= 2  # a step has two tiles
    steps = ceil_div(groups * size, step_values)
    # As few programs as need no more steps each: the others would leave their peers less room.
    programs = ceil_div(steps, ceil_div(steps, channel.programs))
    fixed = (
        to_wire,
        from_wire,
        channel.table,
        channel.steps,
        channel.memory,
        channel.rank,
        channel.error_address,
        channel.timeout_ns,
        Extent(numel, stride=piece, length=piece),
        groups,
        tuple(rows[:4]),
    )
    return launch.Plan(fast_launch.Launch(kernel, (programs,), fixed, constants), walkable)


@lru_cache(maxsize=1024)
def _constants(
    kernel,
    config: CodecConfig,
    config_out: CodecConfig,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int],
    strided: bool,
    tail: bool,
    one_piece: bool,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """The matrices and the keyword arguments of a launch; looked up, since making them takes
    longer.

    ``shape`` is (ranks, programs) of the channel.
    """
    launched_on = _device_of(device)
    tile = tile_of(config, launched_on)
    spec = make_spec(config, tile, launched_on, merged=True)
    constants = dict(
        FLAGS=make_flags(strided, tail, 1),
        OUT_FLAGS=make_flags(False, tail, 1),
        SPEC=spec,
        CHANNEL=channel_shape(*shape),
        **OPTIONS,
    )
    if kernel is all_reduce_kernel:
        constants["HALF"] = make_spec(config, tile // 2, launched_on, merged=True)
        constants["SUM_SPEC"] = make_spec(config_out, tile, launched_on, merged=True)
        constants["HALF_SUM"] = make_spec(config_out, tile // 2, launched_on, merged=True)
    if kernel is reduce_scatter_kernel:
        constants["ONE_PIECE"] = one_piece

    # x is rotated in its own dtype, fp32 in bf16 parts. Codes are exact in fp16, so a transform of
    # codes is done in fp16; the reduce-scatter of more than two ranks transforms fp32 sums, again
    # in bf16 parts.
    points = spec.POINT.value
    to_wire_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    transforms_sums = kernel is reduce_scatter_kernel and shape[0] != 2
    from_wire_dtype = torch.bfloat16 if transforms_sums else torch.float16
    to_wire = _matrix(points, 1 / config.group_size, True, to_wire_dtype, device)
    from_wire = _matrix(points, 1.0, False, from_wire_dtype, device)
    return to_wire, from_wire, constants


@lru_cache
def _matrix(
    points: int, value: float, shuffled: bool, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``common.hadamard.sylvester`` in device memory, for all streams.

    Args:
        points: rows and columns, a power of two.
        value: magnitude of every element.
        shuffled: columns in the order in which a tile lies in the registers
            (``common.hadamard.shuffle``).
        dtype: of the elements.
        device: where it is used.
    """
    column = torch.arange(points)
    if shuffled and points >= 64:
        # bits 1 and 2 of a column's number move up to bits 4 and 5, and bits 3 to 5 down to bits 1
        # to 3
        column = (column & ~62) | ((column & 6) << 3) | ((column >> 2) & 14)
    matrix = hadamard(torch.eye(points))[:, column].contiguous()
    return (matrix * value).to(dtype).to(device)
