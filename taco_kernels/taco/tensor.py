"""Reading and writing groups of the uncompressed tensor inside a kernel.

``rows`` is (run, inner, stride_outer, stride_inner). A tensor is contiguous, or (FLAGS.STRIDED) rows of
``run`` groups, each contiguous, row r at ``(r // inner) * stride_outer + (r % inner) * stride_inner``; see
launch.rows_of.
"""

import triton
import triton.language as tl


@triton.jit
def tile_pointers(x, first, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """Pointers [R, G] to groups first, first + 1, ..."""
    column = tl.arange(0, C.G)[None, :]
    if FLAGS.STRIDED:
        run, inner, stride_outer, stride_inner = rows
        group = first + tl.arange(0, C.R)
        row = group // run
        start = (row // inner).to(tl.int64) * stride_outer + (row % inner).to(tl.int64) * stride_inner
        at = x + (start + (group % run) * C.G)[:, None] + column
    else:
        at = x + first.to(tl.int64) * C.G + (tl.arange(0, C.R) * C.G)[:, None] + column
    return at


@triton.jit
def tile_mask(first, numel, FLAGS: tl.constexpr, C: tl.constexpr):
    """Which of groups first... lie inside: [R, 1], or [R, G] where the last group is not whole (TAIL)."""
    left = numel - first.to(tl.int64) * C.G
    before = (tl.arange(0, C.R) * C.G)[:, None]
    if FLAGS.TAIL:  # 32 bits and few places of values: the compiler keeps them in registers through the loop
        left = tl.maximum(tl.minimum(left, C.R * C.G), 0).to(tl.int32)
        mask = tl.arange(0, C.G)[None, :] < left - before
    else:
        mask = before < left
    return mask


@triton.jit
def load_tile(x, first, numel, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """[R, G] groups first..., zeros beyond numel."""
    return tl.load(tile_pointers(x, first, rows, FLAGS, C), mask=tile_mask(first, numel, FLAGS, C), other=0.0)


@triton.jit
def store_tile(x, value, first, numel, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """Store [R, G] in x's type; nothing beyond numel."""
    at = tile_pointers(x, first, rows, FLAGS, C)
    tl.store(at, value.to(x.dtype.element_ty), mask=tile_mask(first, numel, FLAGS, C))
