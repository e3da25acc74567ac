"""decode: read the wire once, write the tensor once."""

import triton
import triton.language as tl

from taco_kernels.triton.hadamard import sylvester
from taco_kernels.triton.tensor import store_tile
from taco_kernels.triton.wire import decode_groups, dither_words


@triton.jit
def decode_tile(
    wires, x, tile, numel, groups, wire_stride, rows, random, matrix, FLAGS: tl.constexpr, C: tl.constexpr
):
    """Decode tile number ``tile``: R groups of one chunk."""
    tiles = tl.cdiv(groups, C.R)
    chunk = tile // tiles
    first = (tile % tiles) * C.R
    group = chunk * groups + first
    words = dither_words(random, 0, group, C)
    h = decode_groups(wires + chunk.to(tl.int64) * wire_stride, first, groups, words, matrix, C)
    end = tl.minimum(numel, (chunk + 1).to(tl.int64) * groups * C.G)
    store_tile(x, h, group, end, rows, FLAGS, C)


@triton.jit(do_not_specialize=["key", "stream", "first_run"])
def decode_kernel(
    wires,
    x,
    numel,
    groups,
    chunks,
    wire_stride,
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
    """x = WHT(q) * step of ``chunks`` chunks of ``groups`` groups. Persistent programs, R groups a step."""
    random = (key.to(tl.int64), stream.to(tl.int64), first_run.to(tl.int64))
    rows = (run, inner, stride_outer, stride_inner)
    matrix = sylvester(C, 1.0, False, tl.float16)
    if C.INTERPRET:  # no loops over run-time bounds there: one program a tile
        decode_tile(wires, x, tl.program_id(0), numel, groups, wire_stride, rows, random, matrix, FLAGS, C)
    else:
        tiles = tl.cdiv(groups, C.R) * chunks
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=FLAGS.STAGES):
            decode_tile(wires, x, tile, numel, groups, wire_stride, rows, random, matrix, FLAGS, C)
