"""Launching the kernels that find a threshold among sampled magnitudes."""

import functools
import math
from typing import NamedTuple

import torch

from taco_kernels.common.fast_launch import start
from taco_kernels.count_sketch.order_kernels import band_kernel, pick_kernel

PROGRAMS, PROGRAM_WARPS = 64, 4
"""Programs that draw a shard's sample."""
SLOTS, PICK_WARPS = 128, 8
"""Magnitudes of each of these that the picking program holds in registers."""
LEAST_SHARED, MOST_SHARED = 1024, 4096
"""Magnitudes that every program draws, to find the band."""
DEVIATIONS = 2.75, 3.75
"""Of the rank among these, that the band reaches to either side; it misses one time in some hundreds."""


class Plan(NamedTuple):
    """Where the samples lie, and where the band should."""

    log: int
    """2^log samples are drawn, or all values if there are no more of them."""
    strata: tuple[int, int, int, int]
    """Values of one, what remains of all, and (2^32 - 1) / size of either size, as int32."""
    shared: int
    low: int
    high: int
    slack: int
    """See order_kernels.band_of."""


@functools.lru_cache(maxsize=1024)
def plan_of(numel: int, most: int, need: int) -> Plan:
    """For the ``need``-th largest of min(numel, most) sampled values; ``most`` is a power of two."""
    count, log = min(numel, most), most.bit_length() - 1
    if most != 1 << log or most % PROGRAMS or not LEAST_SHARED // 16 <= most <= 65536:
        raise ValueError(f"{most} samples: a power of two up to 65536 that {PROGRAMS} programs can share")
    step, fraction = divmod(numel, most)
    inverses = [(2**32 - 1) // max(size, 1) for size in (step, step + 1)]
    share, own = need / count, most // PROGRAMS
    shared = LEAST_SHARED
    while True:
        deviation = math.sqrt(shared * share * (1 - share))
        inside = sum(DEVIATIONS) * deviation / shared * own  # of a program's values
        if shared == MOST_SHARED or inside + 4 * math.sqrt(inside) <= SLOTS:
            break
        shared *= 2
    signed = [inverse - 2**32 if inverse >= 2**31 else inverse for inverse in inverses]
    least, most_off = (off * deviation for off in DEVIATIONS)
    low, high = math.ceil(share * shared + least), math.floor(share * shared - least)
    return Plan(log, (step, fraction, *signed), shared, low, high, int(most_off - least))


def largest_of_sample(x: torch.Tensor, most: int, need: int) -> torch.Tensor:
    """fp32 ``[S]``: the ``need``-th largest magnitude, from 1 on, of each row's sampled values.

    Args:
        x: fp32 ``[S, numel]``, elements of a row side by side.
        most: samples, a power of two; at ``selection.sample_positions``, or all if there are no more.
        need: at most min(numel, most).
    """
    if x.dtype != torch.float32 or x.stride(1) != 1:
        raise ValueError(f"x is {x.dtype} with strides {x.stride()}; needs float32 rows without gaps")
    shards, numel = x.shape
    plan, count, own = plan_of(numel, most, need), min(numel, most), most // PROGRAMS
    keys = torch.empty((shards, most), dtype=torch.int32, device=x.device)
    notes = torch.empty((shards, PROGRAMS + 1), dtype=torch.int64, device=x.device)
    found = torch.empty(shards, dtype=torch.float32, device=x.device)
    slots = min(SLOTS, own)
    start(
        band_kernel,
        (PROGRAMS, shards),
        (x, keys, notes),
        (x.stride(0), count, *plan.strata, plan.low, plan.high, plan.slack),
        LOG=plan.log,
        SAMPLED=numel > most,
        M=plan.shared,
        P=PROGRAMS,
        SLOTS=slots,
        num_warps=PROGRAM_WARPS,
    )
    start(
        pick_kernel,
        (shards,),
        (keys, notes, found),
        (need, count),
        P=PROGRAMS,
        OWN=own,
        SLOTS=slots,
        num_warps=PICK_WARPS,
    )
    return found
