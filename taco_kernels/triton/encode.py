"""encode: read the tensor once, write the wire once."""

import triton
import triton.language as tl

from taco_kernels.triton.hadamard import sylvester, transform, unshuffle
from taco_kernels.triton.rounding import random_words
from taco_kernels.triton.tensor import load_tile
from taco_kernels.triton.wire import encode_groups


@triton.jit
def encode_tile(
    x, out, tile, numel, groups, out_stride, rows, random, matrix, FLAGS: tl.constexpr, C: tl.constexpr
):
    """Encode tile number ``tile``: R groups of one chunk."""
    tiles = tl.cdiv(groups, C.R)
    chunk = tile // tiles
    first = (tile % tiles) * C.R
    group = chunk * groups + first
    h = load_tile(x, group, numel, rows, FLAGS, C)
    if C.HADAMARD:
        h = unshuffle(transform(h, matrix, C), C)
    else:
        h = h.to(tl.float32)
    words = 0
    if not C.NEAREST:
        words = random_words(random, 0, group, C)
    encode_groups(h, words, out + chunk.to(tl.int64) * out_stride, first, groups, C)


@triton.jit(do_not_specialize=["key", "stream", "first_run"])
def encode_kernel(
    x,
    out,
    numel,
    groups,
    chunks,
    out_stride,
    run,
    inner,
    stride_outer,
    stride_inner,
    key,
    stream,
    first_run,
    FLAGS: tl.constexpr,
    C: tl.constexpr,
):
    """out[chunk] = wire of ``groups`` groups, for ``chunks`` chunks. Persistent programs, R groups a step."""
    random = (key.to(tl.int64), stream.to(tl.int64), first_run.to(tl.int64))
    rows = (run, inner, stride_outer, stride_inner)
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    matrix = sylvester(C, 1.0 / C.G, True, dot_type)
    if C.INTERPRET:  # no loops over run-time bounds there: one program a tile
        encode_tile(x, out, tl.program_id(0), numel, groups, out_stride, rows, random, matrix, FLAGS, C)
    else:
        tiles = tl.cdiv(groups, C.R) * chunks
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=FLAGS.STAGES):
            encode_tile(x, out, tile, numel, groups, out_stride, rows, random, matrix, FLAGS, C)
