"""Running sums over the tiles of a kernel while it runs: decoupled look-back in Triton.

Source: Merrill and Garland 2016, "Single-pass Parallel Prefix Scan with Decoupled Look-back". Each tile has a
status word in memory, zero at first. It publishes its count, adds up what the tiles before it have published,
and publishes what is reached behind it, which ends the way back of the tiles that follow.
"""

import triton
import triton.language as tl

# what a status word says in its lowest two bits, of the number above them; 0 before either is known
COUNTED, REACHED = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def publish(status, number, STATE: tl.constexpr):
    """One 64-bit word holds a number and what it is of, so it needs no fence."""
    word = (number.to(tl.int64) << 2) | STATE
    tl.atomic_xchg(status, word, sem="relaxed", scope="gpu")


@triton.jit
def look_back(status, tile, index, SIZE: tl.constexpr):
    """int64: codes of the tiles before ``tile``, or at least as many as fit.

    SIZE tiles at a time, one a thread, nearest first: the counts down to the nearest tile that knows what is
    reached behind it, and that. Waits for tiles of lower numbers only.
    """
    total = tl.full((), 0, tl.int64)
    top, looking = tile, 1
    while looking > 0:
        other = top - 1 - index
        word = tl.load(status + other, mask=other >= 0, other=REACHED, volatile=True)
        state = (word & 3).to(tl.int32)
        end = tl.where(state == REACHED, 2 * index + 1, 2 * SIZE)
        end = tl.min(tl.where(state == 0, 2 * index, end), axis=0)  # the same in all threads
        if (end & 1) + (end // (2 * SIZE)) > 0:  # nothing that is not known yet comes first
            part = tl.sum(tl.where(index <= end // 2, (word >> 2).to(tl.int32), 0), axis=0)
            total += part.to(tl.uint32, bitcast=True).to(tl.int64)  # a capacity and SIZE tiles: below 2^32
            top -= SIZE
            looking = tl.where(end < 2 * SIZE, 0, 1)
    return total
