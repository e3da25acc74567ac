"""The kernels, each of which reads its input once and writes its output once, and their launches.

Same signatures as reference.py. Rows are split into tiles. Where tiles are many and small, each has
a program; where they are pipelined, ``tile`` counts through all rows and a persistent program takes
every num_programs-th one::

    quantize             persistent     x[outer, inner, n] -> wires[outer * inner]      tiles of groups
    quantize_difference  one program    new[n] - old[n] -> wires[1]                     tiles of groups
    sum_dequantize       a tile, a      wires[S, rows] -> out[rows, n]                  tiles of blocks of 32
    sum_requantize       row            wires[S, rows] -> wires[rows]                   tiles of blocks of 32
    add_dequantized      persistent     weights[rows, n] += wires[rows]                 tiles of groups
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
"""Values in a row of a rotation: two blocks of 32, as many as
``taco_kernels.common.hadamard.shuffle`` needs
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
    """``int4`` or ``int8``."""
    BITS: tl.constexpr
    """Bits of a code."""
    QMAX: tl.constexpr
    """Largest code."""
    FLOOR: tl.constexpr
    """Smallest largest magnitude of a group that is told from zero."""
    PAYLOAD: tl.constexpr
    """Bytes of a group's codes."""
    HADAMARD: tl.constexpr
    """Values are rotated."""
    ROW: tl.constexpr
    """0: a tile lies in one chunk."""
    INTERPRET: tl.constexpr
    """Running under TRITON_INTERPRET=1."""


@dataclass(frozen=True, repr=False, eq=False)
class Rotation(Constants):
    """A tile as rows of POINT values, for taco_kernels.common.hadamard."""

    R: tl.constexpr
    """Rows of the tile."""
    G: tl.constexpr
    """Values a row: POINT."""
    POINT: tl.constexpr
    """Points of the product: two transforms next to each other."""
    BLOCKS: tl.constexpr
    """Products a row: 1."""
    BLOCK: tl.constexpr
    """Points of the transform."""
    INTERPRET: tl.constexpr
    """Running under TRITON_INTERPRET=1."""


@lru_cache
def make_tile(format: GroupFormat, values: int, interpret: bool) -> Tile:
    """Return the constants of a tile; cached, as launches hash and compare them.

    Args:
        format: of the groups.
        values: of the tile.
        interpret: whether kernels run in Triton's interpreter.
    """
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
    """Return the constants of the rotation of a tile of ``values`` values."""
    return Rotation.of(
        R=values // POINT,
        G=POINT,
        POINT=POINT,
        BLOCKS=1,
        BLOCK=HADAMARD_POINTS,
        INTERPRET=interpret,
    )


# Kernels


@triton.jit
def value_pointers(x, start, first, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Pointers [A, B] to the values of a tile.

    Args:
        x: pointer to the tensor.
        start: offset of the row, int64.
        first: the tile's first group.
        A: rows of the result.
        B: values a row; A * B is the tile.
        C: constants of the tile.
    """
    row_start = (tl.arange(0, A) * B)[:, None]
    flat = row_start + tl.arange(0, B)[None, :]
    return x + start + first.to(tl.int64) * C.G + flat


@triton.jit
def value_mask(first, numel, A: tl.constexpr, B: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr):
    """Mask of the values of a tile that lie in its row: [A, B], or [A, 1] where rows are whole (no
    TAIL).

    Args:
        first: the tile's first group.
        numel: values of the row.
        A: rows of the result.
        B: values a row; A * B is the tile.
        TAIL: whether the last group is not whole.
        C: constants of the tile.
    """
    flat = (tl.arange(0, A) * B)[:, None]
    if TAIL:
        flat = flat + tl.arange(0, B)[None, :]
    return flat < numel - first.to(tl.int64) * C.G


@triton.jit
def row_and_group(tile, groups, C: tl.constexpr):
    """Row of a tile, and its first group.

    Args:
        tile: its number, int32, counted through all rows.
        groups: of a row.
        C: constants of the tile.
    """
    tiles = tl.cdiv(groups, C.R)
    return tile // tiles, (tile % tiles) * C.R


@triton.jit
def quantize_kernel(
    x, out, numel, groups, rows, inner, outer_stride, inner_stride, out_stride,
    TAIL: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """out[row] = wire of x's row: step = max|h| / qmax, q = round(h / step), h = WHT(x / 32) or x.

    Args:
        x: pointer to the values, bf16, fp16 or fp32 [outer, inner, numel].
        out: pointer to the wires, uint8.
        numel: values of a row.
        groups: of a row.
        rows: outer * inner.
        inner: rows after which ``outer_stride`` is taken once.
        outer_stride: values.
        inner_stride: values from one row to the next.
        out_stride: bytes from one wire to the next.
        TAIL: whether the last group of a row is not whole.
        STAGES: depth of the software pipeline over tiles.
        C: Tile.
        H: Rotation of the same values.
    """
    # An fp32 value is rotated as three bf16 values.
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    matrix = rotation_matrix(1.0 / H.BLOCK, H, dot_type)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(groups, C.R) * rows, tl.num_programs(0), num_stages=STAGES
    ):
        row, first = row_and_group(as_tensor(tile), groups, C)
        outer_start = (row // inner).to(tl.int64) * outer_stride
        start = outer_start + (row % inner).to(tl.int64) * inner_stride
        if C.HADAMARD:
            mask = value_mask(first, numel, H.R, H.POINT, TAIL, C)
            pointers = value_pointers(x, start, first, H.R, H.POINT, C)
            value = tl.load(pointers, mask=mask, other=0.0)
            # The same values, as rows of two blocks for the product and as groups for their steps.
            rotated = unshuffle(transform(value, matrix, H), H)
            h = tl.reshape(rotated, [C.R, C.G])
        else:
            mask = value_mask(first, numel, C.R, C.G, TAIL, C)
            pointers = value_pointers(x, start, first, C.R, C.G, C)
            h = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        write_groups(h, out + row.to(tl.int64) * out_stride, first, groups, C)


@triton.jit
def differences(new, old, first, numel, HALF: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr):
    """fp32[N, 8]: new - old of one half of every 16 values of a tile.

    Args:
        new: pointer to the new values.
        old: pointer to the old values.
        first: the tile's first group.
        numel: values.
        HALF: 0 for the first halves, 1 for the second.
        TAIL: whether the last group is not whole.
        C: constants of the tile, of 16 N values.
    """
    N: tl.constexpr = C.R * C.G // 16
    offset = (tl.arange(0, N) * 16 + 8 * HALF)[:, None] + tl.arange(0, 8)[None, :]
    begin = first.to(tl.int64) * C.G
    # Where groups are whole a mask by sixteens is enough, and cheaper.
    masked = offset if TAIL else (tl.arange(0, N) * 16)[:, None]
    mask = masked < numel - begin
    new_value = tl.load(new + begin + offset, mask=mask, other=0.0).to(tl.float32)
    return new_value - tl.load(old + begin + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def difference_kernel(new, old, out, numel, groups, TAIL: tl.constexpr, C: tl.constexpr):
    """out = wire of new - old, one row. A program takes R groups.

    Two loads for 16 values, so that a thread has those whose codes share bytes.

    Args:
        new: pointer to the new values.
        old: pointer to the old values.
        out: pointer to the wire, uint8.
        numel: values.
        groups: of the wire.
        TAIL: whether the last group is not whole.
        C: Tile.
    """
    first = tl.program_id(0) * C.R
    # Of 16 values those of element j and j + 8 share a byte of 4-bit codes.
    low = differences(new, old, first, numel, 0, TAIL, C)
    high = differences(new, old, first, numel, 1, TAIL, C)
    halves = tl.permute(tl.join(low, high), [0, 2, 1])
    h = tl.reshape(halves, [C.R, C.G])
    write_groups(h, out, first, groups, C)


@triton.jit
def sum_kernel(
    wires, out, numel, groups, scale, sender_stride, row_stride, out_stride,
    S: tl.constexpr, TAIL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[row] = scale * WHT(sum over senders of q * step). A program takes N blocks of a row.

    Args:
        wires: pointer to the wires, uint8 [S, rows, bytes].
        out: pointer to the sums [rows, numel].
        numel: values of a row.
        groups: of a row.
        scale: fp32 factor.
        sender_stride: bytes from one sender to the next.
        row_stride: bytes from one row's wire to the next.
        out_stride: values from one row of the sums to the next.
        S: senders.
        TAIL: whether the last block of a row is not whole.
        B: Tile.
    """
    first = tl.program_id(0) * B.N
    row = tl.program_id(1).to(tl.int64)
    h = sum_blocks(
        wires + row * row_stride, sender_stride, first, groups * (B.G // BLOCK), groups, S, B
    )
    if B.HADAMARD:
        h = rotated_blocks(h, B)
    begin = first.to(tl.int64) * BLOCK
    block_start = (tl.arange(0, B.N) * BLOCK)[:, None]
    offset = block_start + tl.arange(0, BLOCK)[None, :]
    # Where blocks are whole a mask by blocks is enough, and cheaper.
    masked = offset if TAIL else block_start
    pointers = out + row * out_stride + begin + offset
    value = (h * scale).to(out.dtype.element_ty)
    tl.store(pointers, value, mask=masked < numel - begin)


@triton.jit
def requantize_kernel(
    wires, out, groups, out_groups, sender_stride, row_stride, out_stride,
    S: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """out[row] = wire, in format D, of the sum over senders of q * step. A program takes N blocks
    of a row.

    Args:
        wires: pointer to the wires, uint8 [S, rows, bytes].
        out: pointer to the sums' wires, uint8 [rows, bytes].
        groups: of a row of wires.
        out_groups: of a row of out.
        sender_stride: bytes from one sender to the next.
        row_stride: bytes from one row's wire to the next.
        out_stride: bytes from one row of out to the next.
        S: senders.
        B: Tile of the senders' format.
        D: Tile of the sums' format, of the same values.
    """
    first = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    h = sum_blocks(
        wires + row * row_stride, sender_stride, first * B.N, groups * (B.G // BLOCK), groups, S, B
    )
    h = tl.reshape(h, [D.R, D.G])
    write_groups(h, out + row * out_stride, first * D.R, out_groups, D)


@triton.jit
def add_kernel(
    wires, weights, numel, groups, rows, wire_stride, weight_stride,
    TAIL: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """weights[row] += q * step. Persistent programs, R groups a step.

    Args:
        wires: pointer to the wires, uint8 [rows, bytes].
        weights: pointer to the weights [rows, numel].
        numel: values of a row.
        groups: of a row.
        rows: how many there are.
        wire_stride: bytes from one wire to the next.
        weight_stride: values from one row of weights to the next.
        TAIL: whether the last group of a row is not whole.
        STAGES: depth of the software pipeline over tiles.
        C: Tile.
    """
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(groups, C.R) * rows, tl.num_programs(0), num_stages=STAGES
    ):
        row, first = row_and_group(as_tensor(tile), groups, C)
        change = decoded_groups(wires + row.to(tl.int64) * wire_stride, first, groups, C)
        start = row.to(tl.int64) * weight_stride
        pointers = value_pointers(weights, start, first, C.R, C.G, C)
        mask = value_mask(first, numel, C.R, C.G, TAIL, C)
        # In fp32, rounded once to the weights' type: replicas on any device agree.
        updated = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + change
        tl.store(pointers, updated.to(weights.dtype.element_ty), mask=mask)


# Launches

TUNING = {  # measured on sm_90; a tile is a group at least
    "quantize": Tuning(tile=8192, warps=4, stages=4, programs=2),
    "quantize_difference": Tuning(tile=4096, warps=4, stages=1, programs=0),
    "sum_dequantize": Tuning(tile=2048, warps=2, stages=1, programs=0),
    "sum_requantize": Tuning(tile=2048, warps=2, stages=1, programs=0),
    "add_dequantized": Tuning(tile=8192, warps=8, stages=3, programs=2),
}
STAGES = {"quantize": 3, "add_dequantized": 2}
"""Where shared memory is small (Device.small), so that two programs fit; compiled, not timed."""
MOST_ROWS = 65535
"""Most programs of a grid's second dimension."""


@lru_cache
def _tiled(
    operation: str, format: GroupFormat, result: torch.dtype | GroupFormat, device: Device
) -> tuple[Tuning, Tile]:
    """Return how an operation is run, and its tiles.

    Args:
        operation: one of TUNING.
        format: of the wires that are read, or of those that are written.
        result: type of the values; of a sum that is quantised again, its format.
        device: that the kernel runs on.
    """
    tuning = TUNING[operation]
    if device.small and operation in STAGES:
        tuning = tuning._replace(stages=STAGES[operation])
    values = tuning.tile
    least = format.group_size  # a tile is a group at least
    if operation == "quantize" and result == torch.float32 and format.hadamard:
        # fp32 is three bf16 operands of the rotation: half as many values fit into the registers.
        values //= 2
    elif operation == "sum_dequantize":
        least = HADAMARD_POINTS
    elif isinstance(result, GroupFormat):
        least = result.group_size
    return tuning, make_tile(format, max(values, least), device.interpret)


def _check_blocks(rows: int, numel: int, format: GroupFormat) -> None:
    """Refuse more values than kernels, which count their blocks in 32 bits, can count (ValueError)."""
    blocks = rows * format.groups(numel) * (format.group_size // HADAMARD_POINTS)
    check_counted("blocks of 32 values", blocks, "use smaller messages")


def _new_wires(rows: int, numel: int, format: GroupFormat, device: torch.device) -> torch.Tensor:
    """Return uninitialised wires uint8[rows, bytes]."""
    _check_blocks(rows, numel, format)
    return torch.empty(rows, format.wire_bytes(numel), dtype=torch.uint8, device=device)


def quantize(x: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Return wires uint8[rows, bytes] of x by one kernel; see reference.quantize."""
    check_rows(x, "x")
    # As [outer, inner, n]: kernels walk two strides above the values.
    x = x[(None,) * (3 - x.dim())]
    outer, inner, numel = x.shape
    rows = outer * inner
    out = _new_wires(rows, numel, format, x.device)
    if out.numel() == 0:
        return out
    device = device_for(x)
    groups = format.groups(numel)
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
    """Return the wire uint8[1, bytes] of new - old by one kernel; see
    reference.quantize_difference.

    The kernel has codes of the difference itself; with a Hadamard transform the definition runs
    instead.

    Args:
        new: [n], contiguous.
        old: like new.
        format: of the wire.

    Raises:
        ValueError: the two are not alike, flat and contiguous.
    """
    if format.hadamard:
        return reference.quantize_difference(new, old, format)
    contiguous = new.is_contiguous() and old.is_contiguous()
    if new.shape != old.shape or new.dim() != 1 or not contiguous:
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


def _start_rows(
    kernel, tiles: int, wires, out, sizes: tuple, tuning: Tuning, **constants: object
) -> None:
    """Start a kernel for wires [S, rows, bytes] and out [rows, ..], ``tiles`` programs a row.

    Rows are a grid's second dimension, so more than MOST_ROWS take several launches.
    """
    for begin in range(0, len(out), MOST_ROWS):
        part = out[begin : begin + MOST_ROWS]
        tensors = (wires[:, begin:] if begin else wires, part)
        fixed = *sizes, wires.stride(0), wires.stride(1), out.stride(0)
        start(
            kernel, (tiles, len(part)), tensors, fixed, S=len(wires), **constants, **tuning.options
        )


def sum_dequantize(
    wires: torch.Tensor, format: GroupFormat, out: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Sum wires into ``out`` by one kernel; see reference.sum_dequantize.

    Args:
        wires: uint8[S, rows, bytes].
        format: of the wires.
        out: [rows, n], rows contiguous; gets the sum and is returned.
        scale: factor of the sum.
    """
    check_tensor("out", out, out.dtype, (None, None), contiguous=True)
    rows, numel = out.shape
    senders = wires.shape[0]
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


def sum_requantize(
    wires: torch.Tensor, format: GroupFormat, numel: int, target: GroupFormat
) -> torch.Tensor:
    """Return wires of the sum, uint8[rows, bytes of target], by one kernel; see
    reference.sum_requantize.

    Args:
        wires: uint8[S, rows, bytes].
        format: of the wires.
        numel: values of a row.
        target: format of the sum's wires.

    Raises:
        ValueError: one format is rotated and the other is not.
    """
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
    out_groups = target.groups(numel)
    sizes = format.groups(numel), out_groups
    tiles = ceil_div(out_groups, result.R.value)
    _start_rows(requantize_kernel, tiles, wires, out, sizes, tuning, B=source, D=result)
    return out


def add_dequantized(
    wires: torch.Tensor, format: GroupFormat, weights: torch.Tensor
) -> torch.Tensor:
    """Add wires to weights in place by one kernel; see reference.add_dequantized.

    The kernel adds codes times steps; with a Hadamard transform the definition runs instead.

    Args:
        wires: uint8[rows, bytes].
        format: of the wires.
        weights: [rows, n], rows contiguous; are changed and returned.
    """
    if format.hadamard:
        return reference.add_dequantized(wires, format, weights)
    check_tensor("weights", weights, weights.dtype, (None, None), contiguous=True)
    rows, numel = weights.shape
    format.check_wires(wires, (rows,), numel)
    _check_blocks(rows, numel, format)
    wires = addressable(wires)
    if weights.numel() == 0:
        return weights
    device = device_for(wires)
    groups = format.groups(numel)
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
