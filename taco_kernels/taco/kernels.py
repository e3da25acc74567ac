"""The kernels: encode and decode, which read and write once, and sums of W senders' wires of one chunk.

Sums are taken in the Hadamard domain, in the order of the senders.
"""

import triton
import triton.language as tl

from taco_kernels.common.constants import as_tensor
from taco_kernels.common.hadamard import shuffle, sylvester, transform, unshuffle
from taco_kernels.common.unpacking import add_products, load_code_words, magic_bits
from taco_kernels.taco import quadratic_kernels as quadratic
from taco_kernels.taco.outlier_kernels import (
    add_lists,
    any_list,
    empty_lists,
    look_for_massive,
    store_lists,
    sum_lists,
    take_massive,
)
from taco_kernels.taco.tensor import load_tile, store_tile
from taco_kernels.taco.wire import decode_groups, encode_groups, load_step, load_values


@triton.jit
def end_of(first, groups, C: tl.constexpr):
    """Behind the last group of a tile that holds whole chunks alone (C.ROW), else of the chunk."""
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
    for number in tl.range(tl.program_id(0), per_chunk * chunks, tl.num_programs(0), num_stages=FLAGS.STAGES):
        tile = as_tensor(number)
        chunk, first = tile // per_chunk, (tile % per_chunk) * C.USED
        end = end_of(first, groups, C)
        h = load_tile(x, chunk * groups + first, numel, rows, FLAGS, C)
        if C.OUTLIERS:  # the transform reads x where it was copied to; what changes x takes another one
            x_tile, words = h, empty_lists(C)
            found, limit = look_for_massive(x_tile, groups - first, C)
        if C.HADAMARD:
            h = unshuffle(transform(h, matrix, C), C)
        else:
            h = h.to(tl.float32)
        if C.OUTLIERS:
            if found:
                rest, words = take_massive(x_tile, limit, groups - first, C)
                if C.HADAMARD:
                    h = unshuffle(transform(rest, matrix, C), C)
                else:
                    h = rest.to(tl.float32)
            store_lists(words, out + chunk.to(tl.int64) * out_stride, first, groups, C)
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
    for number in tl.range(tl.program_id(0), per_chunk * chunks, tl.num_programs(0), num_stages=FLAGS.STAGES):
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
def add_sender(total, wires, sender, wire_stride, first, groups, C: tl.constexpr):
    """total + q * step of one sender, one rounding; fp32[R, G]."""
    q, step = load_values(wires + sender * wire_stride, first, groups, C)
    return tl.fma(q, tl.broadcast_to(step[:, None], [C.R, C.G]), total)


@triton.jit
def add_sender_words(t0, t1, t2, t3, wires, sender, wire_stride, first, groups, magic, C: tl.constexpr):
    """add_sender in an integer format, for the sums of every fourth element: fp32[R, G / 4] each."""
    wire = wires + sender * wire_stride
    words, step = load_code_words(wire, first, groups, C), load_step(wire, first, groups, C)
    if C.BEND > 0:
        totals = quadratic.add_products(t0, t1, t2, t3, words, step, magic, C)
    else:
        totals = add_products(t0, t1, t2, t3, words, step, magic, C)
    return totals


@triton.jit
def sum_senders(wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """fp32[R, G], summed in the order of the senders."""
    if C.INTEGER:
        t0 = tl.zeros([C.R, C.G // 4], tl.float32)
        t1, t2, t3 = t0, t0, t0
        magic = magic_bits(groups)
        if W <= C.UNROLLED:  # unrolled, so that the senders' loads are in flight together
            for w in tl.static_range(0, W):
                sender = tl.full((), w, tl.int64)
                t0, t1, t2, t3 = add_sender_words(
                    t0, t1, t2, t3, wires, sender, wire_stride, first, groups, magic, C
                )
        else:
            for w in range(0, W):
                sender = tl.full((), 0, tl.int64) + w
                t0, t1, t2, t3 = add_sender_words(
                    t0, t1, t2, t3, wires, sender, wire_stride, first, groups, magic, C
                )
        total = tl.reshape(tl.join(tl.join(t0, t2), tl.join(t1, t3)), [C.R, C.G])
    else:
        total = tl.zeros([C.R, C.G], tl.float32)
        if W <= C.UNROLLED:
            for w in tl.static_range(0, W):
                sender = tl.full((), w, tl.int64)
                total = add_sender(total, wires, sender, wire_stride, first, groups, C)
        else:
            for w in range(0, W):
                sender = tl.full((), 0, tl.int64) + w
                total = add_sender(total, wires, sender, wire_stride, first, groups, C)
    return total


@triton.jit
def decode_sum_kernel(
    wires, x, numel, groups, wire_stride, run, inner, stride_outer, stride_inner, W: tl.constexpr,
    FLAGS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x = WHT(sum of q * step). Persistent programs, R groups a step."""
    rows = (run, inner, stride_outer, stride_inner)
    matrix = sylvester(C, 1.0, False, tl.bfloat16)
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, C.R), tl.num_programs(0), num_stages=FLAGS.STAGES):
        first = as_tensor(tile) * C.R
        if C.OUTLIERS:
            found = any_list(wires, wire_stride, first, groups, W, C)
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
