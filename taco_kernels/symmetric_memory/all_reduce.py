"""All-reduce in one kernel: encode, exchange, sum, exchange and decode, overlapped tile by tile.

In every step a program sends its next tiles to their owners, sums the tile of the step before and sends the
sum to everybody, and decodes the sums of the step before that. A rank sends 2 (W - 1) / W payloads.
"""

import triton
import triton.language as tl

from taco_kernels.symmetric_memory.matrices import load_matrix
from taco_kernels.symmetric_memory.phases import (
    decoded_slot,
    encoded_tile,
    peer_slot,
    reduced_groups,
    slot_of,
    store_to_all,
    write_tile,
)
from taco_kernels.symmetric_memory.ring import ack_flag, arrival, data_flag, returned
from taco_kernels.symmetric_memory.signals import publish, wait
from taco_kernels.taco.wire import encode_groups

# What differs between ranks or calls must not lead to different code, and numbers that are one stay numbers.
UNSPECIALIZED = ["memory", "rank", "error", "timeout", "groups"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def two_shot_kernel(
    x, out, to_wire, from_wire, table, steps_done, memory, rank, error, timeout, numel, stride, length,
    groups, run, inner, stride_outer, stride_inner, FLAGS: tl.constexpr, OUT_FLAGS: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, DHALF: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """out = sum of every rank's x, in W pieces of ``groups`` groups.

    C encodes what the ranks have, D the sums; HALF and DHALF are the same for half a tile.
    """
    program = tl.program_id(0)
    lane, split, lanes = program // E.SPLITS, program % E.SPLITS, tl.num_programs(0) // E.SPLITS
    message, rows = (numel, stride, length, groups), (run, inner, stride_outer, stride_inner)
    memory, error, timeout = memory.to(tl.int64), error.to(tl.int64), timeout.to(tl.int64)
    zero, full = tl.full((), 0, tl.int32), tl.full((), C.R, tl.int32)
    data, acks = memory + data_flag(program, 0, E), memory + ack_flag(program, 0, E)

    done = tl.load(steps_done + program)
    steps = tl.cdiv(tl.cdiv(groups, C.R) - lane, lanes)
    for i in range(steps + 2):
        last = i >= steps - 1
        if i < steps:
            first = (lane + i * lanes) * C.R
            slot = arrival(program, done + i, rank, E)
            matrix = load_matrix(to_wire, C)
            wait(acks, done + i + 1 - E.DEPTH, error, timeout, 0, E.W, E)
            for k in range(E.W // E.SPLITS):
                piece = (split + i) % E.W if E.SPLITS > 1 else (rank + 1 + k) % E.W
                h = encoded_tile(x, piece, first, message, rows, matrix, FLAGS, C)
                encode_groups(h, peer_slot(table, piece, slot), zero, full, C)
        owned = (E.SPLITS == 1) | ((split + i - 1) % E.W == rank)
        if (i >= 1) & (i <= steps) & owned:
            wait(data, done + i, error, timeout, 0, E.W, E)
            slots = slot_of(memory, arrival(program, done + i - 1, 0, E))
            slot = returned(program, done + i - 1, rank, E)
            for half in range(2):  # a whole tile of sums does not fit in the registers
                row = half * HALF.R
                h = reduced_groups(slots, row, full, E, HALF)
                store_to_all(h, row, full, table, slot, rank, E.W, DHALF)
        if last & (i <= steps):  # nothing more to send soon: the others are waiting for this
            publish(table, program, rank, done + tl.minimum(i + 1, steps), done + i, E)
        if i >= 2:
            first = (lane + (i - 2) * lanes) * C.R
            matrix = load_matrix(from_wire, C)
            if E.SPLITS == 1:
                wait(acks, done + i - 1, error, timeout, 0, E.W, E)
            else:
                owner = (split + i - 2) % E.W
                wait(memory + ack_flag(program, owner, E), done + i - 1, error, timeout, owner, 1, E)
            for k in range(E.W // E.SPLITS):
                piece = (split + i - 2) % E.W if E.SPLITS > 1 else (rank + k) % E.W
                slot = slot_of(memory, returned(program, done + i - 2, piece, E))
                value = decoded_slot(slot, matrix, D)
                write_tile(out, value, piece, first, message, rows, OUT_FLAGS, C)
        if not last:
            publish(table, program, rank, done + i + 1, done + i, E)
    tl.store(steps_done + program, done + steps)
