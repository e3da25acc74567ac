"""decode_sum and decode_sum_encode: W senders' wires of one chunk, summed in the Hadamard domain."""

import triton
import triton.language as tl

from taco_kernels.triton.hadamard import shuffle, sylvester, transform, unshuffle
from taco_kernels.triton.rounding import random_words
from taco_kernels.triton.tensor import store_tile
from taco_kernels.triton.unpacking import add_dithered, add_products, load_code_words, magic_bits
from taco_kernels.triton.wire import dither_words, encode_groups, load_step, load_values


@triton.jit
def add_sender(total, wires, sender, wire_stride, first, groups, random, C: tl.constexpr):
    """total + (q + u) * step of one sender, one rounding; fp32[R, G]."""
    words = dither_words(random, sender, first, C)
    q, step = load_values(wires + sender * wire_stride, first, groups, words, C)
    return tl.fma(q, tl.broadcast_to(step[:, None], [C.R, C.G]), total)


@triton.jit
def add_sender_words(
    t0, t1, t2, t3, wires, sender, wire_stride, first, groups, random, magic, C: tl.constexpr
):
    """add_sender in an integer format, for the sums of every fourth element: fp32[R, G / 4] each."""
    wire = wires + sender * wire_stride
    words, step = load_code_words(wire, first, groups, C), load_step(wire, first, groups, C)
    if C.DITHER:
        randoms = random_words(random, sender, first, C)
        t0, t1, t2, t3 = add_dithered(t0, t1, t2, t3, words, randoms, step, C)
    else:
        t0, t1, t2, t3 = add_products(t0, t1, t2, t3, words, step, magic, C)
    return t0, t1, t2, t3


@triton.jit
def sum_senders(wires, wire_stride, first, groups, random, W: tl.constexpr, C: tl.constexpr):
    """fp32[R, G], summed in the order of the senders."""
    if C.INTEGER:
        t0 = tl.zeros([C.R, C.G // 4], tl.float32)
        t1, t2, t3 = t0, t0, t0
        magic = magic_bits(groups)
        if W <= 8:  # unrolled, so that the senders' loads are in flight together
            for w in tl.static_range(0, W):
                t0, t1, t2, t3 = add_sender_words(
                    t0,
                    t1,
                    t2,
                    t3,
                    wires,
                    tl.full((), w, tl.int64),
                    wire_stride,
                    first,
                    groups,
                    random,
                    magic,
                    C,
                )
        else:
            for w in range(0, W):
                sender = tl.full((), 0, tl.int64) + w
                t0, t1, t2, t3 = add_sender_words(
                    t0, t1, t2, t3, wires, sender, wire_stride, first, groups, random, magic, C
                )
        total = tl.reshape(tl.join(tl.join(t0, t2), tl.join(t1, t3)), [C.R, C.G])
    else:
        total = tl.zeros([C.R, C.G], tl.float32)
        if W <= 8:
            for w in tl.static_range(0, W):
                sender = tl.full((), w, tl.int64)
                total = add_sender(total, wires, sender, wire_stride, first, groups, random, C)
        else:
            for w in range(0, W):
                sender = tl.full((), 0, tl.int64) + w
                total = add_sender(total, wires, sender, wire_stride, first, groups, random, C)
    return total


@triton.jit
def decode_sum_tile(
    wires,
    x,
    first,
    numel,
    groups,
    wire_stride,
    rows,
    random,
    matrix,
    W: tl.constexpr,
    FLAGS: tl.constexpr,
    C: tl.constexpr,
):
    """Groups first, first + 1, ... first + R - 1."""
    h = sum_senders(wires, wire_stride, first, groups, random, W, C)
    if C.HADAMARD:
        h = unshuffle(transform(shuffle(h, C), matrix, C), C)
    store_tile(x, h, first, numel, rows, FLAGS, C)


@triton.jit(do_not_specialize=["key", "stream", "first_run"])
def decode_sum_kernel(
    wires,
    x,
    numel,
    groups,
    wire_stride,
    run,
    inner,
    stride_outer,
    stride_inner,
    key,
    stream,
    first_run,
    W: tl.constexpr,
    FLAGS: tl.constexpr,
    C: tl.constexpr,
):
    """x = WHT(sum of q * step). Persistent programs, R groups a step."""
    random = (key.to(tl.int64), stream.to(tl.int64), first_run.to(tl.int64))
    rows = (run, inner, stride_outer, stride_inner)
    matrix = sylvester(C, 1.0, False, tl.bfloat16)
    if C.INTERPRET:  # no loops over run-time bounds there: one program a tile
        first = tl.program_id(0) * C.R
        decode_sum_tile(wires, x, first, numel, groups, wire_stride, rows, random, matrix, W, FLAGS, C)
    else:
        for tile in tl.range(
            tl.program_id(0), tl.cdiv(groups, C.R), tl.num_programs(0), num_stages=FLAGS.STAGES
        ):
            decode_sum_tile(
                wires, x, tile * C.R, numel, groups, wire_stride, rows, random, matrix, W, FLAGS, C
            )


@triton.jit(
    do_not_specialize=["key_in", "stream_in", "first_run_in", "key_out", "stream_out", "first_run_out"]
)
def decode_sum_encode_kernel(
    wires,
    out,
    groups,
    wire_stride,
    key_in,
    stream_in,
    first_run_in,
    key_out,
    stream_out,
    first_run_out,
    W: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
):
    """out = wire, by D, of sum of q * step, without leaving the Hadamard domain. R groups a program."""
    random_in = (key_in.to(tl.int64), stream_in.to(tl.int64), first_run_in.to(tl.int64))
    random_out = (key_out.to(tl.int64), stream_out.to(tl.int64), first_run_out.to(tl.int64))
    first = tl.program_id(0) * C.R
    h = sum_senders(wires, wire_stride, first, groups, random_in, W, C)
    words = 0
    if not D.NEAREST:
        words = random_words(random_out, 0, first, D)
    encode_groups(h, words, out, first, groups, D)
