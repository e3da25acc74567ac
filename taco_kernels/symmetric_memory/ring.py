"""Where flags and slots lie in a lane's memory, the same on every rank.

``data`` flags, ``ack`` flags (each uint64[W, PROGRAMS], row w written by rank w), then two rings of slots,
each uint8[PROGRAMS, DEPTH, W, SLOT]: what arrives from each sender, and what comes back from each owner.

Program p of a rank talks to program p of its peers only, step after step, and counts its steps from the
lane's creation on (int64 in device memory: nothing to reset, nothing for the host to know). In step n it uses
slot n % DEPTH. Data flag n + 1 from a peer: its tiles of step n have arrived. Ack flag n + 1 from a peer: it
has read the tiles of step n that were sent to it, and in an all-reduce its sums of step n have arrived.
A sender waits for the acks of step n - DEPTH before it fills a slot again, also across calls, so a peer never
finds a slot overwritten that it still reads.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from taco_kernels.common.constants import Constants


@dataclass(frozen=True, repr=False, eq=False)
class Exchange(Constants):
    """Compile-time shape of a lane and of a launch over it."""

    W: tl.constexpr
    """Ranks."""
    PROGRAMS: tl.constexpr
    """Programs that the lane has slots and flags for."""
    DEPTH: tl.constexpr
    """Slots a program, sender and ring."""
    SLOT: tl.constexpr
    """Bytes of a slot."""
    RINGS: tl.constexpr
    """Offset of the first ring."""
    RING: tl.constexpr
    """Bytes of a ring."""
    SPLITS: tl.constexpr
    """Programs that share a tile number: 1 (a step serves the pieces of all ranks) or W (a step serves one
    piece, in turn, so that each program sums for its rank now and then)."""


@triton.jit
def arrival(program, step, sender, E: tl.constexpr):
    """Offset of the slot for what ``sender`` sends to ``program`` in ``step``."""
    at = (program.to(tl.int64) * E.DEPTH + step % E.DEPTH) * E.W + sender
    return at * E.SLOT + E.RINGS


@triton.jit
def returned(program, step, owner, E: tl.constexpr):
    """Offset of the slot for the sum that ``owner`` sends back."""
    return arrival(program, step, owner, E) + E.RING


@triton.jit
def data_flag(program, sender, E: tl.constexpr):
    """Offset of the flag by which ``sender`` says that its tiles have arrived."""
    return (program + sender * E.PROGRAMS).to(tl.int64) * 8


@triton.jit
def ack_flag(program, sender, E: tl.constexpr):
    """Offset of the flag by which ``sender`` says that it has read its tiles."""
    return data_flag(program, sender, E) + E.W * E.PROGRAMS * 8
