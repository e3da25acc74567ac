"""The kernels, each of which reads its input once and writes its output once, and their launches.

Same signatures as reference.py. Rows are split into tiles. Where tiles are many and small, each has a
program; where they are pipelined, ``tile`` counts through all rows and a persistent program takes every
num_programs-th one.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from taco_kernels.common import addressable, ceil_div, check_counted, check_tensor
from taco_kernels.common.device import Constants, Device, Tuning, as_tensor, device_for
from taco_kernels.common.fast_launch import start
from taco_kernels.common.hadamard import transform, unshuffle
from taco_kernels.sdp4bit import reference
from taco_kernels.sdp4bit.groups import (
    BLOCK,
    decoded_groups,
    rotated_blocks,
    rotation_matrix,
    sum_blocks,
    write_groups,
)
from taco_kernels.sdp4bit.reference import FLOOR, HADAMARD_POINTS, GroupFormat, check_rows

POINT = 64
"""Values in a row of a rotation: two blocks of 32, as many as ``taco_kernels.common.hadamard.shuffle`` needs
for 16 consecutive values in a thread."""


@dataclass(frozen=True, repr=False, eq=False)
class Tile(Constants):
    """One argument for all constants; what common/packing.py reads has its names."""

    R: tl.constexpr
    """Groups a tile, if these are whole."""
    G: tl.constexpr
    """Values a group."""
    N: tl.constexpr
    """Blocks of HADAMARD_POINTS values a tile."""
    FORMAT: tl.constexpr
    BITS: tl.constexpr
    QMAX: tl.constexpr
    FLOOR: tl.constexpr
    PAYLOAD: tl.constexpr
    """Bytes of a group's codes."""
    HADAMARD: tl.constexpr
    ROW: tl.constexpr
    """0: a tile lies in one chunk."""
    INTERPRET: tl.constexpr
    """Running under TRITON_INTERPRET=1."""


@dataclass(frozen=True, repr=False, eq=False)
class Rotation(Constants):
    """A tile as rows of POINT values, for taco_kernels.common.hadamard."""

    R: tl.constexpr
    G: tl.constexpr
    POINT: tl.constexpr
    BLOCKS: tl.constexpr
    BLOCK: tl.constexpr
    """Points of the transform."""
    INTERPRET: tl.constexpr


@lru_cache
def make_tile(format: GroupFormat, values: int, interpret: bool) -> Tile:
    """Constants of a tile of ``values`` values; cached, as launches hash and compare them."""
    return Tile.of(
        R=values // format.group_size,
        G=format.group_size,
        N=values // HADAMARD_POINTS,
        FORMAT=f"int{format.bits}",
        BITS=format.bits,
        QMAX=float(format.qmax),
        FLOOR=FLOOR,
        PAYLOAD=format.group_size * format.bits // 8,
        HADAMARD=format.hadamard,
        ROW=0,
        INTERPRET=interpret,
    )


@lru_cache
def make_rotation(values: int, interpret: bool) -> Rotation:
    """Constants of the rotation of a tile of ``values`` values."""
    R = values // POINT
    return Rotation.of(
        R=R, G=POINT, POINT=POINT, BLOCKS=1, BLOCK=HADAMARD_POINTS, INTERPRET=interpret
    )


@triton.jit
def at(x, start, first, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Pointers [A, B] to the values of groups first... of the row that begins at ``start``."""
    flat = (tl.arange(0, A) * B)[:, None] + tl.arange(0, B)[None, :]
    return x + start + first.to(tl.int64) * C.G + flat


@triton.jit
def inside(first, numel, A: tl.constexpr, B: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr):
    """Which of those lie in a row of ``numel`` values: [A, B], or [A, 1] where rows are whole (no TAIL)."""
    flat = (tl.arange(0, A) * B)[:, None]
    if TAIL:
        flat = flat + tl.arange(0, B)[None, :]
    return flat < numel - first.to(tl.int64) * C.G


@triton.jit
def row_and_group(tile, groups, C: tl.constexpr):
    """Row of a tile, and its first group."""
    tiles = tl.cdiv(groups, C.R)
    return tile // tiles, (tile % tiles) * C.R


@triton.jit
def quantize_kernel(
    x, out, numel, groups, rows, inner, outer_stride, inner_stride, out_stride,
    TAIL: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """out[row] = wire of x's row: step = max|h| / qmax, q = round(h / step), h = WHT(x / 32) or x."""
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    matrix = rotation_matrix(1.0 / H.BLOCK, H, dot_type)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(groups, C.R) * rows, tl.num_programs(0), num_stages=STAGES
    ):
        row, first = row_and_group(as_tensor(tile), groups, C)
        start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(
            tl.int64
        ) * inner_stride
        if C.HADAMARD:
            mask = inside(first, numel, H.R, H.POINT, TAIL, C)
            value = tl.load(at(x, start, first, H.R, H.POINT, C), mask=mask, other=0.0)
            h = tl.reshape(unshuffle(transform(value, matrix, H), H), [C.R, C.G])
        else:
            mask = inside(first, numel, C.R, C.G, TAIL, C)
            h = tl.load(at(x, start, first, C.R, C.G, C), mask=mask, other=0.0).to(tl.float32)
        write_groups(h, out + row.to(tl.int64) * out_stride, first, groups, C)


@triton.jit
def differences(new, old, first, numel, HALF: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr):
    """fp32[N, 8]: new - old of the first or second halves of the sixteens of groups first..."""
    N: tl.constexpr = C.R * C.G // 16
    place = (tl.arange(0, N) * 16 + 8 * HALF)[:, None] + tl.arange(0, 8)[None, :]
    begin = first.to(tl.int64) * C.G
    inside = place if TAIL else (tl.arange(0, N) * 16)[:, None]
    mask = inside < numel - begin
    a = tl.load(new + begin + place, mask=mask, other=0.0).to(tl.float32)
    return a - tl.load(old + begin + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def difference_kernel(new, old, out, numel, groups, TAIL: tl.constexpr, C: tl.constexpr):
    """out = wire of new - old, one row. A program takes R groups.

    Two loads for 16 values, so that a thread has those whose codes share bytes.
    """
    first = tl.program_id(0) * C.R
    low = differences(new, old, first, numel, 0, TAIL, C)
    high = differences(new, old, first, numel, 1, TAIL, C)
    h = tl.reshape(tl.permute(tl.join(low, high), [0, 2, 1]), [C.R, C.G])
    write_groups(h, out, first, groups, C)


@triton.jit
def sum_kernel(
    wires, out, numel, groups, scale, sender_stride, row_stride, out_stride,
    S: tl.constexpr, TAIL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[row] = scale * WHT(sum over senders of q * step). A program takes R blocks of a row."""
    first, row = tl.program_id(0) * B.N, tl.program_id(1).to(tl.int64)
    h = sum_blocks(
        wires + row * row_stride, sender_stride, first, groups * (B.G // BLOCK), groups, S, B
    )
    if B.HADAMARD:
        h = rotated_blocks(h, B)
    begin = first.to(tl.int64) * BLOCK
    place = (tl.arange(0, B.N) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = place if TAIL else (tl.arange(0, B.N) * BLOCK)[:, None]
    pointers = out + row * out_stride + begin + place
    tl.store(pointers, (h * scale).to(out.dtype.element_ty), mask=inside < numel - begin)


@triton.jit
def requantize_kernel(
    wires, out, groups, out_groups, sender_stride, row_stride, out_stride,
    S: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """out[row] = wire, in format D, of the sum over senders of q * step. R blocks of a row a program."""
    first, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    h = sum_blocks(
        wires + row * row_stride, sender_stride, first * B.N, groups * (B.G // BLOCK), groups, S, B
    )
    write_groups(tl.reshape(h, [D.R, D.G]), out + row * out_stride, first * D.R, out_groups, D)


@triton.jit
def add_kernel(
    wires, weights, numel, groups, rows, wire_stride, weight_stride,
    TAIL: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """weights[row] += q * step."""
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(groups, C.R) * rows, tl.num_programs(0), num_stages=STAGES
    ):
        row, first = row_and_group(as_tensor(tile), groups, C)
        change = decoded_groups(wires + row.to(tl.int64) * wire_stride, first, groups, C)
        pointers = at(weights, row.to(tl.int64) * weight_stride, first, C.R, C.G, C)
        mask = inside(first, numel, C.R, C.G, TAIL, C)
        updated = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + change
        tl.store(pointers, updated.to(weights.dtype.element_ty), mask=mask)


TUNING = {  # a tile is a group at least; 0 programs a multiprocessor: one program a tile
    "quantize": Tuning(8192, 4, 4, 2),
    "quantize_difference": Tuning(4096, 4, 1, 0),
    "sum_dequantize": Tuning(2048, 2, 1, 0),
    "sum_requantize": Tuning(2048, 2, 1, 0),
    "add_dequantized": Tuning(8192, 8, 3, 2),
}
STAGES = {"quantize": 3, "add_dequantized": 2}
"""Where shared memory is small (Device.small), so that two programs fit; compiled, not timed."""
MOST_ROWS = 65535  # of a grid's second dimension


@lru_cache
def _tiled(
    operation: str, format: GroupFormat, result: torch.dtype | GroupFormat, device: Device
) -> tuple[Tuning, Tile]:
    """How it is run, and its tiles of ``format``; ``result``: type of the values, or the new format."""
    tuning = TUNING[operation]
    if device.small and operation in STAGES:
        tuning = tuning._replace(stages=STAGES[operation])
    values, least = tuning.tile, format.group_size  # a tile is a group at least
    if operation == "quantize" and result == torch.float32 and format.hadamard:
        values //= (
            2  # fp32 is three bf16 operands of the rotation: half as many fit into the registers
        )
    elif operation == "sum_dequantize":
        least = HADAMARD_POINTS
    elif isinstance(result, GroupFormat):
        least = result.group_size
    return tuning, make_tile(format, max(values, least), device.interpret)


def _check_blocks(rows: int, numel: int, format: GroupFormat) -> None:
    """Raise ValueError where kernels, which count blocks in 32 bits, cannot count those of so many values."""
    blocks = rows * format.groups(numel) * (format.group_size // HADAMARD_POINTS)
    check_counted("blocks of 32 values", blocks, "use smaller messages")


def _new_wires(rows: int, numel: int, format: GroupFormat, device: torch.device) -> torch.Tensor:
    """Uninitialised wires of ``rows`` rows."""
    _check_blocks(rows, numel, format)
    return torch.empty(rows, format.wire_bytes(numel), dtype=torch.uint8, device=device)


def quantize(x: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """reference.quantize as one kernel."""
    check_rows(x, "x")
    x = x[(None,) * (3 - x.dim())]
    outer, inner, numel = x.shape
    rows = outer * inner
    out = _new_wires(rows, numel, format, x.device)
    if out.numel() == 0:
        return out
    device, groups = device_for(x), format.groups(numel)
    tuning, tile = _tiled("quantize", format, x.dtype, device)
    tiles = ceil_div(groups, tile.R.value) * rows
    start(
        quantize_kernel,
        device.grid(tiles, tuning),
        (x, out),
        (numel, groups, rows, inner, x.stride(0), x.stride(1), out.stride(0)),
        TAIL=numel % format.group_size != 0,
        STAGES=tuning.stages,
        C=tile,
        H=make_rotation(tile.R.value * format.group_size, device.interpret),
        **tuning.options,
    )
    return out


def quantize_difference(new: torch.Tensor, old: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """reference.quantize_difference as one kernel; codes of the difference itself (no Hadamard)."""
    if format.hadamard:
        return reference.quantize_difference(new, old, format)
    if (
        new.shape != old.shape
        or new.dim() != 1
        or not (new.is_contiguous() and old.is_contiguous())
    ):
        raise ValueError(
            f"new {list(new.shape)} and old {list(old.shape)} must be alike, flat, contiguous"
        )
    numel = new.numel()
    out = _new_wires(1, numel, format, new.device)
    if numel == 0:
        return out
    groups = format.groups(numel)
    tuning, tile = _tiled("quantize_difference", format, new.dtype, device_for(new))
    start(
        difference_kernel,
        (ceil_div(groups, tile.R.value),),
        (new, old, out),
        (numel, groups),
        TAIL=numel % format.group_size != 0,
        C=tile,
        **tuning.options,
    )
    return out


def sum_dequantize(
    wires: torch.Tensor, format: GroupFormat, out: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """reference.sum_dequantize as one kernel."""
    check_tensor("out", out, out.dtype, (None, None), contiguous=True)
    (rows, numel), senders = out.shape, wires.shape[0]
    format.check_wires(wires, (senders, rows), numel)
    _check_blocks(rows, numel, format)
    wires = addressable(wires)
    if out.numel() == 0:
        return out
    tuning, blocks = _tiled("sum_dequantize", format, out.dtype, device_for(wires))
    sizes = numel, format.groups(numel), float(scale)
    tiles = ceil_div(numel, blocks.N.value * HADAMARD_POINTS)
    _start_rows(
        sum_kernel, tiles, wires, out, sizes, tuning, TAIL=numel % HADAMARD_POINTS != 0, B=blocks
    )
    return out


def _start_rows(
    kernel, tiles: int, wires, out, sizes: tuple, tuning: Tuning, **constants: object
) -> None:
    """Start ``kernel`` for wires [S, rows, bytes] and out [rows, ..], ``tiles`` programs a row."""
    for begin in range(0, len(out), MOST_ROWS):
        part = out[begin : begin + MOST_ROWS]
        tensors = wires[:, begin:] if begin else wires, part
        fixed = *sizes, wires.stride(0), wires.stride(1), out.stride(0)
        start(
            kernel, (tiles, len(part)), tensors, fixed, S=len(wires), **constants, **tuning.options
        )


def sum_requantize(
    wires: torch.Tensor, format: GroupFormat, numel: int, target: GroupFormat
) -> torch.Tensor:
    """reference.sum_requantize as one kernel."""
    if format.hadamard != target.hadamard:
        raise ValueError(f"{format} and {target} must both be rotated or both not")
    senders, rows = wires.shape[:2]
    format.check_wires(wires, (senders, rows), numel)
    _check_blocks(rows, numel, format)
    wires = addressable(wires)
    out = _new_wires(rows, numel, target, wires.device)
    if out.numel() == 0:
        return out
    device = device_for(wires)
    tuning, source = _tiled("sum_requantize", format, target, device)
    result = make_tile(target, source.N.value * HADAMARD_POINTS, device.interpret)
    sizes, tiles = (
        (format.groups(numel), target.groups(numel)),
        ceil_div(target.groups(numel), result.R.value),
    )
    _start_rows(requantize_kernel, tiles, wires, out, sizes, tuning, B=source, D=result)
    return out


def add_dequantized(
    wires: torch.Tensor, format: GroupFormat, weights: torch.Tensor
) -> torch.Tensor:
    """reference.add_dequantized as one kernel."""
    if format.hadamard:
        return reference.add_dequantized(wires, format, weights)
    check_tensor("weights", weights, weights.dtype, (None, None), contiguous=True)
    rows, numel = weights.shape
    format.check_wires(wires, (rows,), numel)
    _check_blocks(rows, numel, format)
    wires = addressable(wires)
    if weights.numel() == 0:
        return weights
    device, groups = device_for(wires), format.groups(numel)
    tuning, tile = _tiled("add_dequantized", format, weights.dtype, device)
    start(
        add_kernel,
        device.grid(ceil_div(groups, tile.R.value) * rows, tuning),
        (wires, weights),
        (numel, groups, rows, wires.stride(0), weights.stride(0)),
        TAIL=numel % format.group_size != 0,
        STAGES=tuning.stages,
        C=tile,
        **tuning.options,
    )
    return weights
