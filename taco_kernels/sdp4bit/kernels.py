"""The kernels: each reads its input once and writes its output once.

Rows are split into tiles. Where tiles are many and small, each has a program; where they are pipelined,
``tile`` counts through all rows and a persistent program takes every num_programs-th one.
"""

import triton
import triton.language as tl

from taco_kernels.common.constants import as_tensor
from taco_kernels.sdp4bit.blocks import BLOCK, rotated_blocks, sum_blocks
from taco_kernels.sdp4bit.groups import decoded_groups, rotated, rotation_matrix, write_groups


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
        start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
        if C.HADAMARD:
            mask = inside(first, numel, H.R, H.POINT, TAIL, C)
            h = rotated(tl.load(at(x, start, first, H.R, H.POINT, C), mask=mask, other=0.0), matrix, H)
            h = tl.reshape(h, [C.R, C.G])
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
    h = sum_blocks(wires + row * row_stride, sender_stride, first, groups * (B.G // BLOCK), groups, S, B)
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
