"""The kernels, which read and write once, and their launches. Same signatures as reference.py.

Sums are taken in the Hadamard domain, in the order of the senders.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from taco_kernels.common import fast_launch
from taco_kernels.common.device import Device, as_tensor, device_number
from taco_kernels.common.hadamard import shuffle, sylvester, transform, unshuffle
from taco_kernels.common.sizes import ALIGNMENT, ceil_div
from taco_kernels.taco.layout import CodecConfig, check_same_groups, check_wire_shape
from taco_kernels.taco.outlier_kernels import (
    add_lists,
    any_list,
    empty_lists,
    find_outliers,
    store_lists,
    sum_lists,
    take_outliers,
)
from taco_kernels.taco.spec import make_flags, spec_of, tuning_for, tuning_in
from taco_kernels.taco.wire import (
    decode_groups,
    encode_groups,
    load_tile,
    store_tile,
    sum_senders,
)


@triton.jit
def end_of(first, groups, C: tl.constexpr):
    """After the last group of a tile that holds whole chunks alone (C.ROW), else of the chunk."""
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
    """out[chunk] = wire of ``groups`` groups, for ``chunks`` chunks. Persistent programs, R groups a step."""
    rows = (run, inner, stride_outer, stride_inner)
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    matrix = sylvester(C, 1.0 / C.G, True, dot_type)
    per_chunk = tl.cdiv(groups, C.USED)
    for number in tl.range(tl.program_id(0), per_chunk * chunks, tl.num_programs(0), num_stages=FLAGS.STAGES):
        tile = as_tensor(number)
        chunk, first = tile // per_chunk, (tile % per_chunk) * C.USED
        end = end_of(first, groups, C)
        h = load_tile(x, chunk * groups + first, numel, rows, FLAGS, C)
        if C.OUTLIERS:  # the transform reads x where it was copied to; what changes x takes another one
            x_tile, words = h, empty_lists(C)
            found, limit = find_outliers(x_tile, groups - first, C)
        if C.HADAMARD:
            h = unshuffle(transform(h, matrix, C), C)
        else:
            h = h.to(tl.float32)
        if C.OUTLIERS:
            if found:
                rest, words = take_outliers(x_tile, limit, groups - first, C)
                if C.HADAMARD:
                    h = unshuffle(transform(rest, matrix, C), C)
                else:
                    h = rest.to(tl.float32)
            store_lists(words, out + chunk.to(tl.int64) * out_stride, first, groups, C)
        encode_groups(h, out + chunk.to(tl.int64) * out_stride, first, end, C)


@triton.jit
def decode_kernel(
    wires, x, numel, groups, chunks, wire_stride, run, inner, stride_outer, stride_inner,
    FLAGS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x = WHT(q) * step of ``chunks`` chunks of ``groups`` groups. Persistent programs, R groups a step."""
    rows = (run, inner, stride_outer, stride_inner)
    matrix = sylvester(C, 1.0, False, tl.float16)
    per_chunk = tl.cdiv(groups, C.USED)
    for number in tl.range(tl.program_id(0), per_chunk * chunks, tl.num_programs(0), num_stages=FLAGS.STAGES):
        tile = as_tensor(number)
        chunk, first = tile // per_chunk, (tile % per_chunk) * C.USED
        end = end_of(first, groups, C)
        group = chunk * groups + first
        wire = wires + chunk.to(tl.int64) * wire_stride
        if C.OUTLIERS:
            found = any_list(wire, wire_stride, first, groups, 1, C)
        h = decode_groups(wire, first, end, matrix, C)
        if C.OUTLIERS:
            h = add_lists(h, found, wire, wire_stride, first, groups, 1, C)
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
    """x = WHT(sum of q * step). Persistent programs, R groups a step."""
    rows = (run, inner, stride_outer, stride_inner)
    matrix = sylvester(C, 1.0, False, tl.bfloat16)
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, C.R), tl.num_programs(0), num_stages=FLAGS.STAGES):
        first = as_tensor(tile) * C.R
        if C.OUTLIERS:
            found = any_list(wires, wire_stride, first, groups, W, C)
        h = sum_senders(wires, wire_stride, first, groups, W, C)
        if C.HADAMARD:
            h = unshuffle(transform(shuffle(h, C), matrix, C), C)
        if C.OUTLIERS:
            h = add_lists(h, found, wires, wire_stride, first, groups, W, C)
        store_tile(x, h, first, numel, rows, FLAGS, C)


@triton.jit
def decode_sum_encode_kernel(
    wires, out, groups, wire_stride, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """out = wire, by D, of sum of q * step, without leaving the Hadamard domain. R groups a program."""
    first = tl.program_id(0) * C.R
    if C.OUTLIERS:
        found = any_list(wires, wire_stride, first, groups, W, C)
    h = sum_senders(wires, wire_stride, first, groups, W, C)
    if C.OUTLIERS:
        words = empty_lists(C)
        if tl.max(found, axis=0) > 0:
            h, words = sum_lists(h, wires, wire_stride, first, groups, W, C)
        store_lists(words, out, first, groups, D)
    encode_groups(h, out, first, groups, D)


PLANS = 1024
"""Kept for each operation; sizes that come back find theirs."""


class Rows(NamedTuple):
    """A tensor as rows of ``run`` groups; see wire.py."""

    run: int
    inner: int
    stride_outer: int
    stride_inner: int
    strided: bool


Layout = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Sizes and strides of a tensor, None of a contiguous one."""


def _in_one_tile(
    operation: str, config: CodecConfig, device: Device, groups: int, chunks: int, numel: int, stride: int
) -> bool:
    """Whether tiles hold several whole chunks, such as tokens, as if they were one chunk.

    Args:
        groups: of a chunk.
        numel: values of all chunks, without what they are padded with.
        stride: bytes from one chunk of the wire to the next.
    """
    chunk = groups * config.group_size
    if chunks == 1 or config.outliers or numel != chunks * chunk or stride != config.wire_bytes(chunk):
        return False
    return 2 * chunk <= tuning_in(operation, config, device, groups * chunks, 1).tile


def layout_of(x: torch.Tensor) -> Layout:
    """What ``rows_of`` needs to know of x: sizes and strides, or None where x is contiguous."""
    return None if x.is_contiguous() else (x.shape, x.stride())


def rows_of(layout: Layout, group_size: int) -> Rows | None:
    """How a kernel walks a tensor in row-major order without a copy, or None if it cannot.

    It can when the tensor, after merging dimensions, is contiguous, or has at most three dimensions, the last
    one contiguous and a multiple of the group size.
    """
    dims: list[tuple[int, int]] = []
    for size, stride in zip(*layout or ((), ()), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if not dims or (len(dims) == 1 and dims[0][1] == 1):
        return Rows(1, 1, 0, 0, False)
    if len(dims) > 3 or len(dims) < 2 or dims[-1][1] != 1 or dims[-1][0] % group_size:
        return None
    outer = dims[0][1] if len(dims) == 3 else 0
    return Rows(dims[-1][0] // group_size, dims[-2][0], outer, dims[-2][1], True)


def check_groups(groups: int) -> None:
    """Kernels number groups with 32 bits."""
    if groups >= 2**31 - 2**15:
        raise ValueError(f"{groups} groups in one call; use a larger group_size or fewer than 2^31 groups")


class Wires(NamedTuple):
    """What a plan needs to know of a wire."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stride(self) -> int:
        """Bytes from one row to the next, as the kernels take it."""
        return self.strides[0]

    @property
    def aligned(self) -> bool:
        """Whether kernels can read and write every row, if they can the first: contiguous, in steps of 16."""
        apart = self.strides[0] if len(self.shape) > 1 and self.shape[0] > 1 else 0
        return self.strides[-1] == 1 and apart % ALIGNMENT == 0


def wires_of(wires: torch.Tensor) -> Wires:
    """The layout of a wire."""
    return Wires(wires.shape, wires.stride(), wires.dtype)


class Plan(NamedTuple):
    """What is to be done for all calls whose arguments are alike but for addresses."""

    wire: tuple[int, ...]
    """Shape of the wire that is returned, or ()."""
    launch: fast_launch.Launch | None
    """None: there is nothing to do."""
    reads: bool = True
    """False: kernels cannot read the input in its strides. A wire must also be at a multiple of ALIGNMENT."""
    writes: bool = True
    """The same of the output."""


def encode(
    x: torch.Tensor, config: CodecConfig, chunks: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """reference.encode as one kernel."""
    given = None if out is None else wires_of(out)
    wide = x.dtype == torch.float32
    plan = _plan_encode(config, x.numel(), layout_of(x), chunks, given, x.get_device(), wide)
    if out is None:
        out = torch.empty(plan.wire, dtype=torch.uint8, device=x.device)
    if plan.launch is None:
        return out
    if not plan.writes or out.data_ptr() % ALIGNMENT:
        return out.copy_(encode(x, config, chunks))
    plan.launch((x if plan.reads else x.contiguous(), out))
    return out


@lru_cache(PLANS)
def _plan_encode(
    config: CodecConfig, numel: int, layout: Layout, chunks: int, out: Wires | None, index: int, wide: bool
) -> Plan:
    chunk = config.chunk_numel(numel, chunks)
    wire = (chunks, config.wire_bytes(chunk))
    if out is None:
        out = Wires(wire, (wire[1], 1), torch.uint8)
    check_wire_shape(out.shape, out.dtype, config, chunk)
    if out.shape[0] != chunks:
        raise ValueError(f"out has {out.shape[0]} rows for {chunks} chunks; give it one a chunk")
    if chunk == 0:
        return Plan(wire, None)
    rows = rows_of(layout, config.group_size)
    reads = rows is not None
    rows = rows or rows_of(None, config.group_size)
    groups, row = chunk // config.group_size, 0
    check_groups(groups * chunks)
    device = device_number(index)
    if _in_one_tile("encode", config, device, groups, chunks, numel, out.stride):
        groups, chunks, row = groups * chunks, 1, groups
    tuning = tuning_in("encode", config, device, groups, chunks)
    tuning = tuning._replace(registers=None) if wide else tuning  # values of twice the registers: no limit
    spec = spec_of(config, device, tuning, row)
    tiles = ceil_div(groups, spec.USED.value) * chunks
    launch = fast_launch.Launch(
        encode_kernel,
        device.grid(tiles, tuning),
        (numel, groups, chunks, out.stride, *rows[:4]),
        dict(
            FLAGS=make_flags(rows.strided, numel % config.group_size != 0, tuning.stages),
            C=spec,
            **tuning.options,
        ),
    )
    return Plan(wire, launch, reads, out.aligned)


def decode(
    wires: torch.Tensor,
    config: CodecConfig,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """reference.decode as one kernel."""
    layout = None if out is None else layout_of(out)
    plan = _plan_decode("decode", config, math.prod(shape), layout, wires_of(wires), wires.get_device())
    return _decoded(plan, wires, config, shape, dtype, out, decode)


def decode_sum(
    wires: torch.Tensor,
    config: CodecConfig,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """reference.decode_sum as one kernel."""
    layout = None if out is None else layout_of(out)
    plan = _plan_decode("decode_sum", config, math.prod(shape), layout, wires_of(wires), wires.get_device())
    return _decoded(plan, wires, config, shape, dtype, out, decode_sum)


def _decoded(plan, wires, config, shape, dtype, out, operation) -> torch.Tensor:
    """Do what ``plan`` says; ``operation`` is the caller."""
    if out is not None and out.numel() != math.prod(shape):
        raise ValueError(f"out has {out.numel()} values, not those of shape {tuple(shape)}")
    if not plan.writes:
        return out.copy_(operation(wires, config, shape, dtype))
    target = torch.empty(shape, dtype=dtype, device=wires.device) if out is None else out
    if plan.launch is None:
        return target
    if not plan.reads or wires.data_ptr() % ALIGNMENT:
        wires = wires.clone(memory_format=torch.contiguous_format)
        return operation(wires, config, shape, dtype, target)
    plan.launch((wires, target))
    return target


@lru_cache(PLANS)
def _plan_decode(
    operation: str, config: CodecConfig, numel: int, layout: Layout, wires: Wires, index: int
) -> Plan:
    summed = operation == "decode_sum"
    chunks = 1 if summed else wires.shape[0]
    chunk = config.chunk_numel(numel, max(chunks, 1))
    check_wire_shape(wires.shape, wires.dtype, config, chunk)
    rows = rows_of(layout, config.group_size)
    if numel and not wires.shape[0]:
        raise ValueError(f"wires of shape {tuple(wires.shape)} hold nothing to decode")
    if rows is None or numel == 0:
        return Plan((), None, writes=rows is not None)
    groups, row = chunk // config.group_size, 0
    check_groups(groups * chunks)
    device = device_number(index)
    if not summed and _in_one_tile(operation, config, device, groups, chunks, numel, wires.stride):
        groups, chunks, row = groups * chunks, 1, groups
    tuning = tuning_in(operation, config, device, groups, chunks)
    spec = spec_of(config, device, tuning, row)
    flags = make_flags(rows.strided, numel % config.group_size != 0, tuning.stages)
    constants = dict(FLAGS=flags, C=spec, **tuning.options)
    if summed:
        constants["W"] = wires.shape[0]
    launch = fast_launch.Launch(
        decode_sum_kernel if summed else decode_kernel,
        device.grid(ceil_div(groups, spec.USED.value) * chunks, tuning),
        (numel, groups, *([] if summed else [chunks]), wires.stride, *rows[:4]),
        constants,
    )
    return Plan((), launch, wires.aligned)


def decode_sum_encode(
    wires: torch.Tensor,
    config: CodecConfig,
    numel: int,
    out: torch.Tensor | None = None,
    config_out: CodecConfig | None = None,
) -> torch.Tensor:
    """reference.decode_sum_encode as one kernel."""
    config_out = config_out or config
    check_same_groups(config, config_out)
    given = None if out is None else wires_of(out)
    plan = _plan_decode_sum_encode(config, config_out, numel, wires_of(wires), given, wires.get_device())
    if out is None:
        out = torch.empty(plan.wire, dtype=torch.uint8, device=wires.device)
    if plan.launch is None:
        return out
    if not plan.writes or out.data_ptr() % ALIGNMENT:
        return out.copy_(decode_sum_encode(wires, config, numel, config_out=config_out))
    if not plan.reads or wires.data_ptr() % ALIGNMENT:
        wires = wires.clone(memory_format=torch.contiguous_format)
        return decode_sum_encode(wires, config, numel, out, config_out)
    plan.launch((wires, out))
    return out


@lru_cache(PLANS)
def _plan_decode_sum_encode(
    config: CodecConfig, config_out: CodecConfig, numel: int, wires: Wires, out: Wires | None, index: int
) -> Plan:
    chunk = config.chunk_numel(numel)
    check_wire_shape(wires.shape, wires.dtype, config, chunk)
    wire = (config_out.wire_bytes(numel),)
    if out is None:
        out = Wires(wire, (1,), torch.uint8)
    check_wire_shape((1, *out.shape), out.dtype, config_out, chunk)
    if numel == 0:
        return Plan(wire, None)
    groups = chunk // config.group_size
    check_groups(groups)
    device = device_number(index)
    tuning = tuning_for("decode_sum_encode", config, device)
    spec = spec_of(config, device, tuning)
    launch = fast_launch.Launch(
        decode_sum_encode_kernel,
        (ceil_div(groups, spec.R.value),),
        (groups, wires.stride),
        dict(W=wires.shape[0], C=spec, D=spec_of(config_out, device, tuning), **tuning.options),
    )
    return Plan(wire, launch, wires.aligned, out.aligned)
