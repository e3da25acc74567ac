"""All-gather in one kernel: send the next tile of a wire to everybody, decode those of the step before."""

import triton
import triton.language as tl

from taco_kernels.symmetric_memory.all_reduce import UNSPECIALIZED
from taco_kernels.symmetric_memory.matrices import load_matrix
from taco_kernels.symmetric_memory.phases import copy_tile, decoded_slot, slot_of, write_tile
from taco_kernels.symmetric_memory.ring import ack_flag, arrival, data_flag
from taco_kernels.symmetric_memory.signals import publish, wait


@triton.jit(do_not_specialize=UNSPECIALIZED)
def all_gather_kernel(
    x, out, to_wire, from_wire, table, steps_done, memory, rank, error, timeout, numel, stride, length,
    groups, run, inner, stride_outer, stride_inner, FLAGS: tl.constexpr, OUT_FLAGS: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """out = what every rank's wire x decodes to, pieces of ``length`` values."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    message, rows = (numel, stride, length, groups), (run, inner, stride_outer, stride_inner)
    memory, error, timeout = memory.to(tl.int64), error.to(tl.int64), timeout.to(tl.int64)
    data, acks = memory + data_flag(program, 0, E), memory + ack_flag(program, 0, E)

    done = tl.load(steps_done + program)
    steps = tl.cdiv(tl.cdiv(groups, C.R) - program, programs)
    for i in range(steps + 1):
        if i < steps:
            first = (program + i * programs) * C.R
            slot = arrival(program, done + i, rank, E)
            wait(acks, done + i + 1 - E.DEPTH, error, timeout, 0, E.W, E)
            copy_tile(x, table, slot, first, groups, rank, E.W, C)
            if i == steps - 1:  # the others are waiting for this; else it goes with the next ack
                publish(table, program, rank, done + steps, done + tl.maximum(i - 1, 0), E)
        if i >= 1:
            first = (program + (i - 1) * programs) * C.R
            matrix = load_matrix(from_wire, C)
            wait(data, done + i, error, timeout, 0, E.W, E)
            for k in range(E.W):
                piece = (rank + k) % E.W
                slot = slot_of(memory, arrival(program, done + i - 1, piece, E))
                value = decoded_slot(slot, matrix, C)
                write_tile(out, value, piece, first, message, rows, OUT_FLAGS, C)
        publish(table, program, rank, done + tl.minimum(i + 1, steps), done + i, E)
    tl.store(steps_done + program, done + steps)
