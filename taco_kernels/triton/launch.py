"""Launching the codec kernels: argument checks, strides, tile sizes. Same signatures as reference.py."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from taco_kernels.layout import (
    ALIGNMENT,
    CodecConfig,
    Stream,
    check_same_groups,
    check_stream,
    check_wires,
)
from taco_kernels.triton.decode import decode_kernel
from taco_kernels.triton.decode_sum import decode_sum_encode_kernel, decode_sum_kernel
from taco_kernels.triton.encode import encode_kernel
from taco_kernels.triton.spec import Spec, make_flags, make_spec


class Tuning(NamedTuple):
    """How a kernel is run; measured, see docs/benchmarks.md."""

    tile: int
    """Values a program holds at a time."""
    warps: int
    stages: int
    """Depth of the software pipeline over tiles."""
    programs: int
    """Programs a multiprocessor, of persistent kernels."""
    registers: int | None = None
    """Most registers a thread, where the compiler's own choice costs occupancy."""


TUNING = {
    "encode": Tuning(8192, 4, 4, 2),
    "decode": Tuning(8192, 4, 3, 3),
    "decode_sum": Tuning(8192, 4, 2, 2),
    "decode_sum_encode": Tuning(2048, 2, 1, 0, registers=96),
}
_INT64 = 2**63


class Device(NamedTuple):
    """What a launch needs to know of a device."""

    multiprocessors: int
    hardware_fp8: bool
    interpret: bool


class Rows(NamedTuple):
    """A tensor as rows of ``run`` groups; see tensor.py."""

    run: int
    inner: int
    stride_outer: int
    stride_inner: int
    strided: bool


@lru_cache
def device_of(index: int | None) -> Device:
    """Properties of a CUDA device, or of the interpreter (index None)."""
    if index is None:
        return Device(multiprocessors=4, hardware_fp8=False, interpret=True)
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return Device(properties.multi_processor_count, capability >= (8, 9), False)


def tuning_of(operation: str, config: CodecConfig) -> Tuning:
    """TUNING with what single configurations need."""
    tuning = TUNING[operation]
    if operation == "encode" and config.format == "int5":
        tuning = tuning._replace(stages=3)
    elif operation == "decode_sum" and config.format == "int8":
        tuning = tuning._replace(stages=1)
    elif operation == "decode_sum_encode" and config.bits == 8:
        tuning = tuning._replace(registers=128 if config.rounding == "dither" else 80)
    if config.group_size == 512 and tuning.tile == 8192:  # hadamard.to_blocks wants 128 rows of 128
        tuning = tuning._replace(tile=16384, stages=min(tuning.stages, 3), programs=2)
    if config.group_size == 512 and operation == "decode_sum":
        tuning = tuning._replace(stages=1)  # shared memory for one tile
    return tuning


def spec_of(config: CodecConfig, device: Device, tuning: Tuning) -> Spec:
    """Constants of a kernel."""
    return make_spec(config, tuning.tile // config.group_size, device.hardware_fp8, device.interpret)


def programs(tiles: int, tuning: Tuning, device: Device) -> int:
    """Grid size of a persistent kernel."""
    return tiles if device.interpret else min(tiles, tuning.programs * device.multiprocessors)


def device_for(tensor: torch.Tensor) -> Device:
    """The device a tensor's kernel runs on."""
    return device_of(tensor.device.index if tensor.is_cuda else None)


def rows_of(x: torch.Tensor, group_size: int) -> Rows | None:
    """How a kernel walks x in row-major order without a copy, or None if it cannot.

    It can when x, after merging dimensions, is contiguous, or has at most three dimensions, the last one
    contiguous and a multiple of the group size.
    """
    dims: list[tuple[int, int]] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
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


def stream_arguments(random: Stream | None) -> tuple[int, int, int]:
    """Key, stream and first sixteen elements as the kernels take them: signed 64-bit integers."""
    if random is None:
        return 0, 0, 0
    wrap = lambda value: (value + _INT64) % (2 * _INT64) - _INT64  # noqa: E731
    return wrap(random.key), wrap(random.stream), wrap(random.offset // 16)


def aligned(wires: torch.Tensor) -> bool:
    """Whether kernels can read and write every row: contiguous, at multiples of ALIGNMENT."""
    stride = wires.stride(0) if wires.dim() > 1 and wires.shape[0] > 1 else 0
    return wires.stride(-1) == 1 and (wires.data_ptr() | stride) % ALIGNMENT == 0


def check_groups(groups: int) -> None:
    """Kernels number groups with 32 bits."""
    if groups >= 2**31 - 2**15:
        raise ValueError(f"{groups} groups in one call; use a larger group_size or fewer than 2^31 groups")


def encode(
    x: torch.Tensor,
    config: CodecConfig,
    chunks: int = 1,
    random: Stream | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """reference.encode as one kernel."""
    check_stream(random, config, "random")
    numel = x.numel()
    chunk = config.chunk_numel(numel, chunks)
    if out is None:
        out = torch.empty(chunks, config.wire_bytes(chunk), dtype=torch.uint8, device=x.device)
    check_wires(out, config, chunk)
    if chunk == 0:
        return out
    if not aligned(out):
        return out.copy_(encode(x, config, chunks, random))
    rows = rows_of(x, config.group_size)
    if rows is None:
        x = x.contiguous()
        rows = rows_of(x, config.group_size)
    groups = chunk // config.group_size
    check_groups(groups * chunks)
    device = device_for(x)
    tuning = tuning_of("encode", config)
    spec = spec_of(config, device, tuning)
    tiles = triton.cdiv(groups, spec.R.value) * chunks
    encode_kernel[(programs(tiles, tuning, device),)](
        x,
        out,
        numel,
        groups,
        chunks,
        out.stride(0),
        *rows[:4],
        *stream_arguments(random),
        FLAGS=make_flags(rows.strided, numel % config.group_size != 0, tuning.stages),
        C=spec,
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
        enable_fp_fusion=False,
    )
    return out


def decode(
    wires: torch.Tensor,
    config: CodecConfig,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    random: Stream | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """reference.decode as one kernel."""
    check_stream(random, config, "random", decoding=True)
    numel, chunks = math.prod(shape), wires.shape[0]
    chunk = config.chunk_numel(numel, max(chunks, 1))
    check_wires(wires, config, chunk)
    target = torch.empty(shape, dtype=dtype, device=wires.device) if out is None else out
    rows = rows_of(target, config.group_size)
    if rows is None:
        return out.copy_(decode(wires, config, shape, dtype, random))
    if numel == 0:
        return target
    if not aligned(wires):
        wires = wires.clone(memory_format=torch.contiguous_format)
    groups = chunk // config.group_size
    check_groups(groups * chunks)
    device = device_for(wires)
    tuning = tuning_of("decode", config)
    spec = spec_of(config, device, tuning)
    tiles = triton.cdiv(groups, spec.R.value) * chunks
    decode_kernel[(programs(tiles, tuning, device),)](
        wires,
        target,
        numel,
        groups,
        chunks,
        wires.stride(0),
        *rows[:4],
        *stream_arguments(random),
        FLAGS=make_flags(rows.strided, numel % config.group_size != 0, tuning.stages),
        C=spec,
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
        enable_fp_fusion=False,
    )
    return target


def decode_sum(
    wires: torch.Tensor,
    config: CodecConfig,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    random: Stream | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """reference.decode_sum as one kernel."""
    check_stream(random, config, "random", decoding=True)
    numel = math.prod(shape)
    chunk = config.chunk_numel(numel)
    check_wires(wires, config, chunk)
    target = torch.empty(shape, dtype=dtype, device=wires.device) if out is None else out
    rows = rows_of(target, config.group_size)
    if rows is None:
        return out.copy_(decode_sum(wires, config, shape, dtype, random))
    if numel == 0:
        return target
    if not aligned(wires):
        wires = wires.clone(memory_format=torch.contiguous_format)
    groups = chunk // config.group_size
    check_groups(groups)
    device = device_for(wires)
    tuning = tuning_of("decode_sum", config)
    spec = spec_of(config, device, tuning)
    decode_sum_kernel[(programs(triton.cdiv(groups, spec.R.value), tuning, device),)](
        wires,
        target,
        numel,
        groups,
        wires.stride(0),
        *rows[:4],
        *stream_arguments(random),
        W=wires.shape[0],
        FLAGS=make_flags(rows.strided, numel % config.group_size != 0, tuning.stages),
        C=spec,
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
        enable_fp_fusion=False,
    )
    return target


def decode_sum_encode(
    wires: torch.Tensor,
    config: CodecConfig,
    numel: int,
    random_in: Stream | None = None,
    random_out: Stream | None = None,
    out: torch.Tensor | None = None,
    config_out: CodecConfig | None = None,
) -> torch.Tensor:
    """reference.decode_sum_encode as one kernel."""
    config_out = config_out or config
    check_same_groups(config, config_out)
    check_stream(random_in, config, "random_in", decoding=True)
    check_stream(random_out, config_out, "random_out")
    chunk = config.chunk_numel(numel)
    check_wires(wires, config, chunk)
    if out is None:
        out = torch.empty(config_out.wire_bytes(numel), dtype=torch.uint8, device=wires.device)
    check_wires(out[None], config_out, chunk)
    if numel == 0:
        return out
    if not aligned(out):
        return out.copy_(
            decode_sum_encode(wires, config, numel, random_in, random_out, config_out=config_out)
        )
    if not aligned(wires):
        wires = wires.clone(memory_format=torch.contiguous_format)
    groups = chunk // config.group_size
    check_groups(groups)
    tuning = tuning_of("decode_sum_encode", config)
    device = device_for(wires)
    spec = spec_of(config, device, tuning)
    decode_sum_encode_kernel[(triton.cdiv(groups, spec.R.value),)](
        wires,
        out,
        groups,
        wires.stride(0),
        *stream_arguments(random_in),
        *stream_arguments(random_out),
        W=wires.shape[0],
        C=spec,
        D=spec_of(config_out, device, tuning),
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
        enable_fp_fusion=False,
    )
    return out
