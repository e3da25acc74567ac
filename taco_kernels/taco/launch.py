"""The kernels, which read and write once, and their launches. Same signatures as reference.py.

Sums are taken in the Hadamard domain, in the order of the senders; those of two senders outside.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from taco_kernels.common import addressable, ceil_div, check_counted, fast_launch
from taco_kernels.common.device import as_tensor, device_number
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
    for number in tl.range(
        tl.program_id(0), per_chunk * chunks, tl.num_programs(0), num_stages=FLAGS.STAGES
    ):
        tile = as_tensor(number)
        chunk, first = tile // per_chunk, (tile % per_chunk) * C.USED
        end = end_of(first, groups, C)
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
    """x = WHT(q) * step of ``chunks`` chunks of ``groups`` groups. Persistent programs, R groups a step."""
    rows = (run, inner, stride_outer, stride_inner)
    matrix = sylvester(C, 1.0, False, tl.float16)
    per_chunk = tl.cdiv(groups, C.USED)
    for number in tl.range(
        tl.program_id(0), per_chunk * chunks, tl.num_programs(0), num_stages=FLAGS.STAGES
    ):
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
    """x = WHT(sum of q * step), of two senders the sum of WHT(q) * step. Persistent programs, R groups a
    step."""
    rows = (run, inner, stride_outer, stride_inner)
    matrix = sylvester(C, 1.0, False, tl.float16 if W == 2 else tl.bfloat16)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(groups, C.R), tl.num_programs(0), num_stages=FLAGS.STAGES
    ):
        first = as_tensor(tile) * C.R
        if C.OUTLIERS:
            found = any_list(wires, wire_stride, first, groups, W, C)
        if W == 2:
            h = decode_two(wires, wire_stride, first, groups, matrix, C)
        else:
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


class Plan(NamedTuple):
    """What calls share whose arguments differ in addresses alone."""

    launch: fast_launch.Launch | None
    """None: there is nothing to do."""
    walkable: bool = True
    """False: the kernel cannot walk the tensor in its strides and needs a contiguous one."""
    wire: tuple[int, ...] = ()
    """Shape of the wire that is returned."""


def layout_of(x: torch.Tensor) -> Layout:
    """What ``rows_of`` needs to know of x: sizes and strides, or None where x is contiguous."""
    return None if x.is_contiguous() else (x.shape, x.stride())


def rows_of(layout: Layout, group_size: int) -> Rows | None:
    """How a kernel walks a tensor in row-major order without a copy, or None if it cannot: after merging
    dimensions it is contiguous, or three at most, the last one contiguous and whole groups."""
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
    """Raise ValueError where kernels, which count groups in 32 bits, cannot count so many."""
    check_counted("groups", groups, "use a larger group_size or smaller messages")


def encode(x: torch.Tensor, config: CodecConfig, chunks: int = 1) -> torch.Tensor:
    """reference.encode as one kernel."""
    plan = _plan("encode", config, x.numel(), layout_of(x), (chunks,), x.dtype, 0, x.get_device())
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
    """reference.decode or reference.decode_sum as one kernel."""
    numel, wires = math.prod(shape), addressable(wires)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=wires.device)
    elif out.numel() != numel:
        raise ValueError(f"out has {out.numel()} values, not those of shape {tuple(shape)}")
    like = wires.shape, wires.dtype, wires.stride(0), wires.get_device()
    plan = _plan(operation, config, numel, layout_of(out), *like)
    if plan.launch is not None:
        into = out if plan.walkable else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        plan.launch((wires, into))
        if into is not out:
            out.copy_(into)
    return out


decode, decode_sum = partial(_decoded, "decode"), partial(_decoded, "decode_sum")


@lru_cache(PLANS)
def _plan(
    operation: str, config: CodecConfig, numel: int, layout: Layout,
    shape: tuple[int, ...], dtype: torch.dtype, stride: int, index: int,
) -> Plan:  # fmt: skip
    """The launch between a tensor of ``layout`` and wires of ``shape``, ``dtype`` and ``stride`` bytes a row.

    To encode, ``shape`` is the number of chunks and ``dtype`` the tensor's.
    """
    senders, chunks = (shape[0], 1) if operation == "decode_sum" else (0, shape[0])
    chunk = config.chunk_numel(numel, chunks if operation == "encode" else max(chunks, 1))
    if operation == "encode":
        stride = config.wire_bytes(chunk)
    else:
        check_wires(shape, dtype, config, chunk)
        if numel and not shape[0]:
            raise ValueError(f"wires of shape {tuple(shape)} hold nothing to decode")
    rows = rows_of(layout, config.group_size)
    walkable = rows is not None
    rows = rows or rows_of(None, config.group_size)
    if numel == 0:
        return Plan(None, walkable, (chunks, stride))
    groups, row = chunk // config.group_size, 0
    check_groups(groups * chunks)
    device = device_number(index)
    whole = (
        chunks > 1
        and not config.outliers
        and (numel, stride) == (chunks * chunk, config.wire_bytes(chunk))
    )
    if whole and 2 * chunk <= tuning_in(operation, config, device, groups * chunks, 1).tile:
        groups, chunks, row = (
            groups * chunks,
            1,
            groups,
        )  # tiles hold several whole chunks, such as tokens
    tuning = tuning_in(operation, config, device, groups, chunks)
    if (
        operation == "encode" and dtype == torch.float32
    ):  # takes twice the registers: no limit on them
        tuning = tuning._replace(registers=None)
    spec = make_spec(config, tuning.tile, device, row=row)
    flags = make_flags(rows.strided, numel % config.group_size != 0, tuning.stages)
    launch = fast_launch.Launch(
        {"encode": encode_kernel, "decode": decode_kernel, "decode_sum": decode_sum_kernel}[
            operation
        ],
        device.grid(ceil_div(groups, spec.USED.value) * chunks, tuning),
        (numel, groups, *([] if senders else [chunks]), stride, *rows[:4]),
        dict(FLAGS=flags, C=spec, **tuning.options) | (dict(W=senders) if senders else {}),
    )
    return Plan(launch, walkable, (shape[0], stride))


def decode_sum_encode(
    wires: torch.Tensor, config: CodecConfig, numel: int, config_out: CodecConfig | None = None
) -> torch.Tensor:
    """reference.decode_sum_encode as one kernel."""
    wires = addressable(wires)
    like = wires.shape, wires.dtype, wires.stride(0), wires.get_device()
    plan = _plan_decode_sum_encode(config, config_out or config, numel, *like)
    out = torch.empty(plan.wire, dtype=torch.uint8, device=wires.device)
    if plan.launch is not None:
        plan.launch((wires, out))
    return out


@lru_cache(PLANS)
def _plan_decode_sum_encode(
    config: CodecConfig, config_out: CodecConfig, numel: int,
    shape: tuple[int, ...], dtype: torch.dtype, stride: int, index: int,
) -> Plan:  # fmt: skip
    check_same_groups(config, config_out)
    chunk, wire = config.chunk_numel(numel), (config_out.wire_bytes(numel),)
    check_wires(shape, dtype, config, chunk)
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
