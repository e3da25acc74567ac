"""The kernels: each reads its input once and writes its output once.

Rows are split into tiles of ``R * G`` values. ``tile`` counts through all rows; a persistent program takes
every num_programs-th one.
"""

import triton
import triton.language as tl

from taco_kernels.sdp4bit.triton.groups import (
    rotated,
    rotated_back,
    rotation_matrix,
    sum_groups,
    write_groups,
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
def quantize_tile(
    x, out, tile, numel, groups, inner, outer_stride, inner_stride, out_stride, matrix,
    TAIL: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Groups of one row of x, to the wire."""
    row, first = row_and_group(tile, groups, C)
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    if C.HADAMARD:
        mask = inside(first, numel, C.RH, H.POINT, TAIL, C)
        h = rotated(tl.load(at(x, start, first, C.RH, H.POINT, C), mask=mask, other=0.0), matrix, H)
        h = tl.reshape(h, [C.R, C.G])
    else:
        mask = inside(first, numel, C.R, C.G, TAIL, C)
        h = tl.load(at(x, start, first, C.R, C.G, C), mask=mask, other=0.0).to(tl.float32)
    write_groups(h, out + row.to(tl.int64) * out_stride, first, groups, C)


@triton.jit
def quantize_kernel(
    x, out, numel, groups, rows, inner, outer_stride, inner_stride, out_stride,
    TAIL: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """out[row] = wire of x's row: step = max|h| / qmax, q = round(h / step), h = WHT(x / 32) or x."""
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    matrix = rotation_matrix(1.0 / H.BLOCK, False, H, dot_type)
    if C.INTERPRET:  # no loops over run-time bounds there: one program a tile
        quantize_tile(
            x, out, tl.program_id(0), numel, groups, inner, outer_stride, inner_stride, out_stride, matrix,
            TAIL, C, H,
        )  # fmt: skip
    else:
        tiles = tl.cdiv(groups, C.R) * rows
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            quantize_tile(
                x, out, tile, numel, groups, inner, outer_stride, inner_stride, out_stride, matrix,
                TAIL, C, H,
            )  # fmt: skip


@triton.jit
def difference_tile(new, old, out, tile, numel, groups, TAIL: tl.constexpr, C: tl.constexpr):
    """Groups of new - old, to the wire."""
    first = tile * C.R
    start = tl.full((), 0, tl.int64)
    mask = inside(first, numel, C.R, C.G, TAIL, C)
    a = tl.load(at(new, start, first, C.R, C.G, C), mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at(old, start, first, C.R, C.G, C), mask=mask, other=0.0).to(tl.float32)
    write_groups(a - b, out, first, groups, C)


@triton.jit
def difference_kernel(
    new, old, out, numel, groups, TAIL: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr
):
    """out = wire of new - old, one row."""
    if C.INTERPRET:
        difference_tile(new, old, out, tl.program_id(0), numel, groups, TAIL, C)
    else:
        tiles = tl.cdiv(groups, C.R)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            difference_tile(new, old, out, tile, numel, groups, TAIL, C)


@triton.jit
def sum_tile(
    wires, out, tile, numel, groups, scale, sender_stride, row_stride, out_stride, matrix,
    S: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Groups of one row, summed over the senders, rotated back and scaled."""
    row, first = row_and_group(tile, groups, C)
    h = sum_groups(wires + row.to(tl.int64) * row_stride, sender_stride, first, groups, S, C)
    start = row.to(tl.int64) * out_stride
    if C.HADAMARD:
        h = rotated_back(tl.reshape(h, [C.RH, H.POINT]), matrix, H) * scale
        mask = inside(first, numel, C.RH, H.POINT, TAIL, C)
        tl.store(at(out, start, first, C.RH, H.POINT, C), h.to(out.dtype.element_ty), mask=mask)
    else:
        mask = inside(first, numel, C.R, C.G, TAIL, C)
        tl.store(at(out, start, first, C.R, C.G, C), (h * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    wires, out, numel, groups, rows, scale, sender_stride, row_stride, out_stride,
    S: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """out[row] = scale * WHT(sum over senders of q * step)."""
    matrix = rotation_matrix(1.0, True, H, tl.bfloat16)
    if C.INTERPRET:
        sum_tile(
            wires, out, tl.program_id(0), numel, groups, scale, sender_stride, row_stride, out_stride, matrix,
            S, TAIL, C, H,
        )  # fmt: skip
    else:
        tiles = tl.cdiv(groups, C.R) * rows
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            sum_tile(
                wires, out, tile, numel, groups, scale, sender_stride, row_stride, out_stride, matrix,
                S, TAIL, C, H,
            )  # fmt: skip


@triton.jit
def requantize_kernel(
    wires, out, groups, out_groups, sender_stride, row_stride, out_stride,
    S: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """out[row] = wire, in format D, of the sum over senders of q * step in format C. One tile a program."""
    row, first = row_and_group(tl.program_id(0), out_groups, D)
    here = first * D.G // C.G
    h = sum_groups(wires + row.to(tl.int64) * row_stride, sender_stride, here, groups, S, C)
    write_groups(tl.reshape(h, [D.R, D.G]), out + row.to(tl.int64) * out_stride, first, out_groups, D)


@triton.jit
def add_tile(
    wires, weights, tile, numel, groups, wire_stride, weight_stride, TAIL: tl.constexpr, C: tl.constexpr
):
    """Groups of one row of weights."""
    row, first = row_and_group(tile, groups, C)
    zero = tl.full((), 0, tl.int64)
    change = sum_groups(wires + row.to(tl.int64) * wire_stride, zero, first, groups, 1, C)
    pointers = at(weights, row.to(tl.int64) * weight_stride, first, C.R, C.G, C)
    mask = inside(first, numel, C.R, C.G, TAIL, C)
    updated = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + change
    tl.store(pointers, updated.to(weights.dtype.element_ty), mask=mask)


@triton.jit
def add_kernel(
    wires, weights, numel, groups, rows, wire_stride, weight_stride,
    TAIL: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """weights[row] += q * step."""
    if C.INTERPRET:
        add_tile(wires, weights, tl.program_id(0), numel, groups, wire_stride, weight_stride, TAIL, C)
    else:
        tiles = tl.cdiv(groups, C.R) * rows
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            add_tile(wires, weights, tile, numel, groups, wire_stride, weight_stride, TAIL, C)
