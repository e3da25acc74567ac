"""The two-shot all-reduce with its phases in other orders, so that the link has work while programs compute.

A program goes through rounds. In round i it encodes and sends its tiles of step i (E), sums those of step
i - AHEAD and sends the sums (S), decodes the sums of step i - AHEAD - 1 (D), and publishes flags for all that
it sent and read. ``two_shot_kernel`` does one phase after the other, with AHEAD = 1; for four ranks:

    phased      E0 E1 E2 E3 | S | D0 D1 D2 D3 | publish

Its sums wait for flags that the peers stored one encode earlier, behind a queue of stores that takes longer
to leave than the encode takes, and no program sends while all wait, decode or fence. Here:

    pipelined   E0 E1 E2 D0 E3 D1 | S | D2 D3 | publish         AHEAD = 1
    ahead       S | E0 E1 E2 D0 E3 D1 | D2 D3 | publish         AHEAD = 2
    staggered   the first half of the programs as pipelined, the second half as ahead

Tiles are decoded while stores leave. The data for an ``ahead`` sum have had a whole round to arrive. Programs
that are ``staggered`` on a multiprocessor sum, wait and fence at different times. When nothing is left to be
sent, rounds begin with their sums, and publish behind the last ones at once. ``pipelined`` also publishes the
data of the last step before it waits for those of the one before, as the next round begins with their sums.

Why that is right, whatever the order within a round. Flags only grow. Each is stored behind a barrier of the
program and a fence.acq_rel.sys; whoever sees it with an acquire load and then passes a barrier sees all that
the program's threads had written, and what it writes from then on comes behind all that they had read.

- No program waits for ever. Round i waits for acks of step i - DEPTH, data of step i - AHEAD and sums of step
  i - AHEAD - 1. Peers publish these in rounds i - DEPTH + AHEAD, i - AHEAD and i - 1: all before round i.
- Slots for arrivals. Round i fills that of step i - DEPTH behind its acks: the peers have read it.
- Slots for sums. The sums of step j overwrite those of step j - DEPTH in a peer's memory, behind the peer's
  data flag of step j. It publishes that at the end of its round j, which has decoded step j - AHEAD - 1, and
  in the last step of AHEAD = 1 within that round, behind the decoding of step j - 3. With AHEAD < DEPTH = 3
  the peer is done with step j - DEPTH in both cases.
- Calls of any schedule may follow each other, as steps are counted through: a call ends with all that it was
  sent read, and publishes so before it ends, or, of sums, by its next data flags.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from taco_kernels.symmetric_memory.all_reduce import UNSPECIALIZED
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
from taco_kernels.triton.spec import Constants
from taco_kernels.triton.wire import encode_groups


@dataclass(frozen=True, repr=False, eq=False)
class Schedule(Constants):
    """Order of the phases of a round."""

    FIRST: tl.constexpr
    """AHEAD of the first half of the programs, 1 or 2."""
    SECOND: tl.constexpr
    """AHEAD of the second half."""


SCHEDULES = {
    "phased": None,  # two_shot_kernel
    "pipelined": Schedule(tl.constexpr(1), tl.constexpr(1)),
    "ahead": Schedule(tl.constexpr(2), tl.constexpr(2)),
    "staggered": Schedule(tl.constexpr(1), tl.constexpr(2)),
}


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scheduled_kernel(
    x,
    out,
    to_wire,
    from_wire,
    table,
    steps_done,
    memory,
    rank,
    error,
    timeout,
    numel,
    stride,
    length,
    groups,
    run,
    inner,
    stride_outer,
    stride_inner,
    key,
    stream,
    first_run,
    FLAGS: tl.constexpr,
    OUT_FLAGS: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    D: tl.constexpr,
    DHALF: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
):
    """``two_shot_kernel`` in the order of the schedule S."""
    TILES: tl.constexpr = E.W // E.SPLITS
    program = tl.program_id(0)
    lane, split, lanes = program // E.SPLITS, program % E.SPLITS, tl.num_programs(0) // E.SPLITS
    message, rows = (numel, stride, length, groups), (run, inner, stride_outer, stride_inner)
    random = (key.to(tl.int64), stream.to(tl.int64), first_run.to(tl.int64))
    again = (key.to(tl.int64), stream.to(tl.int64) + E.W, first_run.to(tl.int64))
    memory, error, timeout = memory.to(tl.int64), error.to(tl.int64), timeout.to(tl.int64)
    zero, full = tl.full((), 0, tl.int32), tl.full((), C.R, tl.int32)
    data, acks = memory + data_flag(program, 0, E), memory + ack_flag(program, 0, E)
    encoding, decoding = load_matrix(to_wire, C), load_matrix(from_wire, C)
    ahead = tl.where(2 * program < tl.num_programs(0), S.FIRST, S.SECOND)

    done = tl.load(steps_done + program)
    steps = tl.cdiv(tl.cdiv(groups, C.R) - lane, lanes)
    for i in range(steps + ahead + 1):
        j = i - ahead  # the step that is summed; that before it is decoded
        sending, summing = i < steps, (j >= 0) & (j < steps)
        early = (i == steps - 1) & (ahead == 1)
        begin = tl.where(sending, 0, TILES)
        sums_at = tl.where(sending & (ahead == 2), 0, TILES)
        lag = tl.where(sending, (TILES + 1) // 2, TILES)
        for k in range(begin, lag + TILES):
            if k == sums_at:
                if early:
                    publish(table, program, rank, done + steps, done + tl.maximum(j, 0), E)
                if summing & ((E.SPLITS == 1) | ((split + j) % E.W == rank)):
                    wait(data, done + j + 1, error, timeout, E.W, E)
                    slots = slot_of(memory, arrival(program, done + j, 0, E))
                    slot = returned(program, done + j, rank, E)
                    group = rank * groups + (lane + j * lanes) * C.R
                    for half in range(2):  # a whole tile of sums does not fit in the registers
                        row = half * HALF.R
                        h, words = reduced_groups(
                            slots, row, full, group + row, random, again, E, HALF, DHALF
                        )
                        store_to_all(h, words, row, full, table, slot, rank, E.W, DHALF)
                if j == steps - 1:  # the others are waiting for this
                    publish(table, program, rank, done + steps, done + steps, E)
            if sending & (k < TILES):
                first = (lane + i * lanes) * C.R
                piece = (split + i) % E.W if E.SPLITS > 1 else (rank + 1 + k) % E.W
                if k == 0:
                    wait(acks, done + i + 1 - E.DEPTH, error, timeout, E.W, E)
                h, words = encoded_tile(x, rank, piece, first, message, rows, random, encoding, FLAGS, C)
                slot = arrival(program, done + i, rank, E)
                encode_groups(h, words, peer_slot(table, piece, slot), zero, full, C)
            if (j >= 1) & (k >= lag):
                first = (lane + (j - 1) * lanes) * C.R
                piece = (split + j - 1) % E.W if E.SPLITS > 1 else (rank + k - lag) % E.W
                if k == lag:
                    if E.SPLITS == 1:
                        wait(acks, done + j, error, timeout, E.W, E)
                    else:
                        owner = memory + ack_flag(program, piece, E)
                        wait(owner, done + j, error, timeout, 1, E)
                slot = slot_of(memory, returned(program, done + j - 1, piece, E))
                value = decoded_slot(slot, piece * groups + first, again, decoding, D)
                write_tile(out, value, piece, first, message, rows, OUT_FLAGS, C)
        if ((sending & (early == 0)) | summing) & (j != steps - 1):
            publish(table, program, rank, done + tl.minimum(i + 1, steps), done + tl.maximum(j + 1, 0), E)
    tl.store(steps_done + program, done + steps)
