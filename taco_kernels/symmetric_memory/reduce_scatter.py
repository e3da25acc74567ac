"""Reduce-scatter in one kernel: encode and send the next tiles, decode and sum those of the step before."""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import shuffle, transform, unshuffle
from taco_kernels.symmetric_memory.all_reduce import UNSPECIALIZED
from taco_kernels.symmetric_memory.matrices import load_matrix
from taco_kernels.symmetric_memory.phases import encoded_tile, peer_slot, slot_of, summed_tile, write_tile
from taco_kernels.symmetric_memory.ring import ack_flag, arrival, data_flag
from taco_kernels.symmetric_memory.signals import publish, wait
from taco_kernels.taco.wire import encode_groups


@triton.jit(do_not_specialize=UNSPECIALIZED)
def reduce_scatter_kernel(
    x, out, to_wire, from_wire, table, steps_done, memory, rank, error, timeout, numel, stride, length,
    groups, run, inner, stride_outer, stride_inner, FLAGS: tl.constexpr, OUT_FLAGS: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """out = piece number ``rank`` of the sum of every rank's x, pieces of ``length`` values."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    message, rows = (numel, stride, length, groups), (run, inner, stride_outer, stride_inner)
    memory, error, timeout = memory.to(tl.int64), error.to(tl.int64), timeout.to(tl.int64)
    zero, full = tl.full((), 0, tl.int32), tl.full((), C.R, tl.int32)
    data, acks = memory + data_flag(program, 0, E), memory + ack_flag(program, 0, E)

    done = tl.load(steps_done + program)
    steps = tl.cdiv(tl.cdiv(groups, C.R) - program, programs)
    for i in range(steps + 1):
        if i < steps:
            first = (program + i * programs) * C.R
            slot = arrival(program, done + i, rank, E)
            matrix = load_matrix(to_wire, C)
            wait(acks, done + i + 1 - E.DEPTH, error, timeout, 0, E.W, E)
            for k in range(E.W):
                piece = (rank + 1 + k) % E.W
                h = encoded_tile(x, piece, first, message, rows, matrix, FLAGS, C)
                encode_groups(h, peer_slot(table, piece, slot), zero, full, C)
            if i == steps - 1:  # the others are waiting for this; else it goes with the next ack
                publish(table, program, rank, done + steps, done + tl.maximum(i - 1, 0), E)
        if i >= 1:
            first = (program + (i - 1) * programs) * C.R
            wait(data, done + i, error, timeout, 0, E.W, E)
            slots = slot_of(memory, arrival(program, done + i - 1, 0, E))
            h = summed_tile(slots, E, C)
            if C.HADAMARD:
                h = unshuffle(transform(shuffle(h, C), load_matrix(from_wire, C), C), C)
            write_tile(out, h, zero, first, message, rows, OUT_FLAGS, C)
        publish(table, program, rank, done + tl.minimum(i + 1, steps), done + i, E)
    tl.store(steps_done + program, done + steps)
