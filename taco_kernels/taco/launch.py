"""The kernels, which read and write once, and their launches. Same signatures as reference.py.

A chunk is n groups, a tile R of them. A persistent kernel numbers the tiles of all chunks, and
program p of P takes tiles p, p + P, p + 2 P, ...::

    chunk          0                              1
    tile           0      1    ...   t - 1        t    ...     t = ceil(n / R)
    groups     0..R-1  R..2R-1 ...   ..n-1        0..R-1

Where chunks are shorter than a tile (tokens), a tile holds several whole chunks instead, and the
kernel sees one chunk of all groups (spec.Spec.ROW).

Sums are taken in the Hadamard domain, in the order of the senders; those of two senders outside.

A call is planned once for each configuration, shape and device (``Plan``), and a plan is looked up
by them.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from taco_kernels.common import addressable, ceil_div, check_counted, fast_launch
from taco_kernels.common.device import Device, as_tensor, device_number
from taco_kernels.common.hadamard import shuffle, sylvester, transform, unshuffle
from taco_kernels.taco.layout import CodecConfig, check_same_groups, check_wires
from taco_kernels.taco.outlier_kernels import (
    add_lists,
    any_list,
    empty_lists,
    rotate,
    split_and_rotate,
    store_lists,
    sum_lists,
)
from taco_kernels.taco.spec import make_flags, make_spec, tuning_for, tuning_in
from taco_kernels.taco.wire import (
    decode_groups,
    decode_two,
    encode_groups,
    load_tile,
    store_tile,
    sum_senders,
)

# Kernels


@triton.jit
def end_of(first, groups, C: tl.constexpr):
    """Number after the last group of the chunk; with C.ROW, after that of the tile, which is whole
    chunks.

    Args:
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    if C.ROW:
        end = tl.minimum(groups, first + C.USED)
    else:
        end = groups
    return end


@triton.jit
def encode_kernel(
    x, out, numel, groups, chunks, out_stride, run, inner, stride_outer, stride_inner,
    FLAGS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """out[chunk] = wire of ``groups`` groups, for every chunk of x. Persistent programs, a tile a
    step.

    Args:
        x: pointer to the tensor, bf16, fp16 or fp32.
        out: pointer to the wires, uint8.
        numel: values of the tensor.
        groups: of each chunk.
        chunks: how many there are.
        out_stride: bytes from one chunk's wire to the next.
        run, inner, stride_outer, stride_inner: how a strided tensor lies in memory, see wire.py.
        FLAGS: spec.Flags.
        C: spec.Spec.
    """
    rows = (run, inner, stride_outer, stride_inner)
    # An fp32 value is rotated as three bf16 values.
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    matrix = sylvester(C, 1.0 / C.G, True, dot_type)
    tiles_per_chunk = tl.cdiv(groups, C.USED)
    for number in tl.range(
        tl.program_id(0), tiles_per_chunk * chunks, tl.num_programs(0), num_stages=FLAGS.STAGES
    ):
        tile = as_tensor(number)
        chunk = tile // tiles_per_chunk
        first = (tile % tiles_per_chunk) * C.USED
        end = end_of(first, groups, C)
        # Chunks follow each other in x without a gap, so groups count on through them.
        x_tile = load_tile(x, chunk * groups + first, numel, rows, FLAGS, C)
        if C.OUTLIERS:
            h, words = split_and_rotate(x_tile, groups - first, matrix, C)
            store_lists(words, out + chunk.to(tl.int64) * out_stride, first, groups, C)
        else:
            h = rotate(x_tile, matrix, C)
        encode_groups(h, out + chunk.to(tl.int64) * out_stride, first, end, C)


@triton.jit
def decode_kernel(
    wires, x, numel, groups, chunks, wire_stride, run, inner, stride_outer, stride_inner,
    FLAGS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x = WHT(q) * step of every chunk of wires. Persistent programs, a tile a step.

    Args:
        wires: pointer to the wires, uint8.
        x: pointer to the tensor.
        numel: values of the tensor.
        groups: of each chunk.
        chunks: how many there are.
        wire_stride: bytes from one chunk's wire to the next.
        run, inner, stride_outer, stride_inner: how a strided tensor lies in memory, see wire.py.
        FLAGS: spec.Flags.
        C: spec.Spec.
    """
    rows = (run, inner, stride_outer, stride_inner)
    matrix = sylvester(C, 1.0, False, tl.float16)
    tiles_per_chunk = tl.cdiv(groups, C.USED)
    for number in tl.range(
        tl.program_id(0), tiles_per_chunk * chunks, tl.num_programs(0), num_stages=FLAGS.STAGES
    ):
        tile = as_tensor(number)
        chunk = tile // tiles_per_chunk
        first = (tile % tiles_per_chunk) * C.USED
        end = end_of(first, groups, C)
        group = chunk * groups + first
        wire = wires + chunk.to(tl.int64) * wire_stride
        # Whether there are lists is loaded early, so that it is known when the groups are decoded.
        if C.OUTLIERS:
            words = any_list(wire, wire_stride, first, groups, 1, C)
        h = decode_groups(wire, first, end, matrix, C)
        if C.OUTLIERS:
            h = add_lists(h, words, wire, wire_stride, first, groups, 1, C)
        # The tile may reach into the next chunk's values, which another tile stores.
        if C.ROW:
            last = tl.minimum(numel, end.to(tl.int64) * C.G)
        else:
            last = tl.minimum(numel, (chunk + 1).to(tl.int64) * groups * C.G)
        store_tile(x, h, group, last, rows, FLAGS, C)


@triton.jit
def decode_sum_kernel(
    wires, x, numel, groups, wire_stride, run, inner, stride_outer, stride_inner, W: tl.constexpr,
    FLAGS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x = WHT(sum of q * step), of two senders the sum of WHT(q) * step. Persistent programs, a
    tile a step.

    Args:
        wires: pointer to the first sender's wire, uint8.
        x: pointer to the tensor.
        numel: values of the tensor.
        groups: of each wire.
        wire_stride: bytes from one sender's wire to the next.
        run, inner, stride_outer, stride_inner: how a strided tensor lies in memory, see wire.py.
        W: senders.
        FLAGS: spec.Flags.
        C: spec.Spec.
    """
    rows = (run, inner, stride_outer, stride_inner)
    # Codes are exact in fp16; a sum in fp32 is split into three bf16.
    matrix = sylvester(C, 1.0, False, tl.float16 if W == 2 else tl.bfloat16)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(groups, C.R), tl.num_programs(0), num_stages=FLAGS.STAGES
    ):
        first = as_tensor(tile) * C.R
        if C.OUTLIERS:
            words = any_list(wires, wire_stride, first, groups, W, C)
        if W == 2:
            h = decode_two(wires, wire_stride, first, groups, matrix, C)
        else:
            h = sum_senders(wires, wire_stride, first, groups, W, C)
            if C.HADAMARD:
                h = unshuffle(transform(shuffle(h, C), matrix, C), C)
        if C.OUTLIERS:
            h = add_lists(h, words, wires, wire_stride, first, groups, W, C)
        store_tile(x, h, first, numel, rows, FLAGS, C)


@triton.jit
def decode_sum_encode_kernel(
    wires, out, groups, wire_stride, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """out = wire, by D, of the sum of q * step, without leaving the Hadamard domain. A tile a
    program.

    Args:
        wires: pointer to the first sender's wire, uint8.
        out: pointer to the wire of the sum.
        groups: of each wire.
        wire_stride: bytes from one sender's wire to the next.
        W: senders.
        C: spec.Spec of the senders' wires.
        D: spec.Spec of the sum's.
    """
    first = tl.program_id(0) * C.R
    if C.OUTLIERS:
        any_words = any_list(wires, wire_stride, first, groups, W, C)
    # No transform: sums of codes times steps are linear, and the next wire is in the same domain.
    h = sum_senders(wires, wire_stride, first, groups, W, C)
    if C.OUTLIERS:
        words = empty_lists(C)
        if tl.max(any_words, axis=0) > 0:
            h, words = sum_lists(h, wires, wire_stride, first, groups, W, C)
        store_lists(words, out, first, groups, D)
    encode_groups(h, out, first, groups, D)


# Plans

PLANS = 1024
"""Kept for each operation; sizes that come back find theirs."""


class Rows(NamedTuple):
    """How a kernel walks a tensor: as rows of ``run`` groups; see wire.py."""

    run: int
    """Groups a row."""
    inner: int
    """Rows after which ``stride_outer`` is taken once."""
    stride_outer: int
    """Values from one ``inner`` rows to the next."""
    stride_inner: int
    """Values from one row to the next."""
    strided: bool
    """False: the tensor is contiguous, and the numbers mean nothing."""


CONTIGUOUS = Rows(run=1, inner=1, stride_outer=0, stride_inner=0, strided=False)

Layout = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Sizes and strides of a tensor, None of a contiguous one."""


class Plan(NamedTuple):
    """What calls share whose arguments differ in addresses alone."""

    launch: fast_launch.Launch | None
    """None: there is nothing to do."""
    walkable: bool = True
    """False: the kernel cannot walk the tensor in its strides and needs a contiguous one."""
    wire: tuple[int, ...] = ()
    """Shape of the wire that is returned."""


def layout_of(x: torch.Tensor) -> Layout:
    """Return what ``rows_of`` needs to know of x."""
    return None if x.is_contiguous() else (x.shape, x.stride())


def merged_dimensions(layout: Layout) -> list[tuple[int, int]]:
    """Return the fewest (size, stride) that walk a tensor in row-major order.

    A dimension whose stride is the size times the stride of the next one continues it: both become
    one.
    """
    dims: list[tuple[int, int]] = []
    for size, stride in zip(*layout or ((), ()), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


def rows_of(layout: Layout, group_size: int) -> Rows | None:
    """Return how a kernel walks a tensor in row-major order without a copy, or None if it cannot.

    It can when the tensor, after merging dimensions, is contiguous, or has at most three
    dimensions, the last one contiguous and a multiple of the group size.
    """
    dims = merged_dimensions(layout)
    if not dims or (len(dims) == 1 and dims[0][1] == 1):
        return CONTIGUOUS
    if not 2 <= len(dims) <= 3:
        return None
    size, stride = dims[-1]
    if stride != 1 or size % group_size:
        return None
    stride_outer = dims[0][1] if len(dims) == 3 else 0
    inner, stride_inner = dims[-2]
    return Rows(size // group_size, inner, stride_outer, stride_inner, strided=True)


def check_groups(groups: int) -> None:
    """Refuse more groups than kernels, which count them in 32 bits, can count (ValueError)."""
    check_counted("groups", groups, "use a larger group_size or smaller messages")


KERNELS = {"encode": encode_kernel, "decode": decode_kernel, "decode_sum": decode_sum_kernel}


@lru_cache(PLANS)
def _plan(
    operation: str, config: CodecConfig, numel: int, layout: Layout,
    shape: tuple[int, ...], dtype: torch.dtype, stride: int, index: int,
) -> Plan:  # fmt: skip
    """Return the launch between a tensor and wires.

    Args:
        operation: ``encode``, ``decode`` or ``decode_sum``.
        config: of the codec.
        numel: values of the tensor.
        layout: of the tensor.
        shape: of the wires; to encode, (chunks,).
        dtype: of the wires; to encode, of the tensor.
        stride: bytes from one wire to the next; to encode, anything.
        index: of the device.
    """
    encodes = operation == "encode"
    sums = operation == "decode_sum"
    chunks = 1 if sums else shape[0]
    # Wires without a row hold nothing. A number of chunks to encode is checked by chunk_numel.
    chunk = config.chunk_numel(numel, chunks if encodes else max(chunks, 1))
    if encodes:
        stride = config.wire_bytes(chunk)
    else:
        check_wires(shape, dtype, config, chunk)
        if numel and not shape[0]:
            raise ValueError(f"wires of shape {tuple(shape)} hold nothing to decode")
    # Where the kernel cannot walk the tensor, the call passes a contiguous one, and the plan is for
    # that.
    rows = rows_of(layout, config.group_size)
    walkable = rows is not None
    if numel == 0:
        return Plan(None, walkable, (chunks, stride))

    groups = chunk // config.group_size
    check_groups(groups * chunks)
    device = device_number(index)
    row = 0
    if _together(operation, config, device, numel, chunk, chunks, stride):
        # The kernel sees one chunk of all groups; C.ROW says how many make a chunk.
        row = groups
        groups = groups * chunks
        chunks = 1
    tuning = tuning_in(operation, config, device, groups, chunks)
    if encodes and dtype == torch.float32:
        # fp32 takes twice the registers of bf16: no limit on them.
        tuning = tuning._replace(registers=None)

    rows = rows or CONTIGUOUS
    spec = make_spec(config, tuning.tile, device, row=row)
    flags = make_flags(rows.strided, numel % config.group_size != 0, tuning.stages)
    constants = dict(FLAGS=flags, C=spec, **tuning.options)
    if sums:
        fixed = (numel, groups, stride, *rows[:4])
        constants["W"] = shape[0]
    else:
        fixed = (numel, groups, chunks, stride, *rows[:4])
    grid = device.grid(ceil_div(groups, spec.USED.value) * chunks, tuning)
    launch = fast_launch.Launch(KERNELS[operation], grid, fixed, constants)
    return Plan(launch, walkable, (shape[0], stride))


def _together(
    operation: str, config: CodecConfig, device: Device,
    numel: int, chunk: int, chunks: int, stride: int,
) -> bool:  # fmt: skip
    """Return True if tiles are to hold several whole chunks: all chunks are full, next to each
    other, short."""
    full = numel == chunks * chunk and stride == config.wire_bytes(chunk)
    if chunks == 1 or config.outliers or not full:
        return False
    tile = tuning_in(operation, config, device, chunks * chunk // config.group_size, 1).tile
    return 2 * chunk <= tile


@lru_cache(PLANS)
def _plan_decode_sum_encode(
    config: CodecConfig, config_out: CodecConfig, numel: int,
    shape: tuple[int, ...], dtype: torch.dtype, stride: int, index: int,
) -> Plan:  # fmt: skip
    """Return the launch from the senders' wires to that of their sum.

    Args:
        config: of the senders' wires.
        config_out: of the sum's.
        numel: values of each wire.
        shape: of the wires.
        dtype: of the wires.
        stride: bytes from one wire to the next.
        index: of the device.
    """
    check_same_groups(config, config_out)
    chunk = config.chunk_numel(numel)
    check_wires(shape, dtype, config, chunk)
    wire = (config_out.wire_bytes(numel),)
    if numel == 0:
        return Plan(None, wire=wire)
    groups = chunk // config.group_size
    check_groups(groups)
    device = device_number(index)
    tuning = tuning_for("decode_sum_encode", config, device)
    spec = make_spec(config, tuning.tile, device)
    launch = fast_launch.Launch(
        decode_sum_encode_kernel,
        (ceil_div(groups, spec.R.value),),
        (groups, stride),
        dict(W=shape[0], C=spec, D=make_spec(config_out, tuning.tile, device), **tuning.options),
    )
    return Plan(launch, wire=wire)


# Operations


def encode(
    x: torch.Tensor, config: CodecConfig, chunks: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Encode a tensor by one kernel; see reference.encode.

    Args:
        x: of any shape and stride, bf16, fp16 or fp32.
        config: of the codec.
        chunks: equal pieces of x.
        out: contiguous uint8[chunks, wire_bytes], at a multiple of 16 bytes; None: a new tensor.

    Returns:
        uint8[chunks, wire_bytes].
    """
    plan = _plan("encode", config, x.numel(), layout_of(x), (chunks,), x.dtype, 0, x.get_device())
    if out is None:
        out = torch.empty(plan.wire, dtype=torch.uint8, device=x.device)
    if plan.launch is not None:
        plan.launch((x if plan.walkable else x.contiguous(), out))
    return out


def _decoded(
    operation: str,
    wires: torch.Tensor,
    config: CodecConfig,
    shape: Sequence[int],
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode or sum wires by one kernel; see reference.decode and reference.decode_sum."""
    numel = math.prod(shape)
    wires = addressable(wires)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=wires.device)
    elif out.numel() != numel:
        raise ValueError(f"out has {out.numel()} values, not those of shape {tuple(shape)}")
    # Everything but addresses: calls of the same sizes share a plan.
    like = wires.shape, wires.dtype, wires.stride(0), wires.get_device()
    plan = _plan(operation, config, numel, layout_of(out), *like)
    if plan.launch is None:
        return out
    if plan.walkable:
        plan.launch((wires, out))
    else:
        contiguous = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        plan.launch((wires, contiguous))
        out.copy_(contiguous)
    return out


decode = partial(_decoded, "decode")
decode_sum = partial(_decoded, "decode_sum")


def decode_sum_encode(
    wires: torch.Tensor, config: CodecConfig, numel: int, config_out: CodecConfig | None = None
) -> torch.Tensor:
    """Encode the sum of the senders' wires by one kernel; see reference.decode_sum_encode.

    Args:
        wires: uint8[W, wire_bytes(numel)], a row a sender.
        config: of the senders' wires.
        numel: values of each.
        config_out: of the sum's wire, if that is not ``config``.

    Returns:
        uint8[wire_bytes(numel)] of ``config_out``.
    """
    wires = addressable(wires)
    like = wires.shape, wires.dtype, wires.stride(0), wires.get_device()
    plan = _plan_decode_sum_encode(config, config_out or config, numel, *like)
    out = torch.empty(plan.wire, dtype=torch.uint8, device=wires.device)
    if plan.launch is not None:
        plan.launch((wires, out))
    return out
