"""Who is high: entropies, ranks by counting, slots by counting bits, and the extra bits to their slots.

Nothing here depends on timing: sums have a fixed order, and of equal entropies the first unit wins.
"""

import triton
import triton.language as tl

from taco_kernels.tah_quant.kernels.encode import LARGEST_SUM
from taco_kernels.tah_quant.kernels.tiles import tile_slots


@triton.jit
def place_of(unit, population, populations, BY_TOKEN: tl.constexpr):
    """(population, index in it) of a unit's number; tokens of different samples alternate."""
    if BY_TOKEN:
        where = (unit % populations, unit // populations)
    else:
        where = (unit // population, unit % population)
    return where


@triton.jit
def entropy_kernel(
    sums,
    entropies,
    units,
    per_unit,
    population,
    populations,
    U: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """entropies[population * N + index] of U units a program; T is a power of two from ``per_unit`` on."""
    unit = tl.program_id(0) * U + tl.arange(0, U)
    tile = tl.arange(0, T)[None, :]
    at = unit.to(tl.int64)[:, None] * per_unit + tile
    mask = (unit < units)[:, None] & (tile < per_unit)
    tiles = tl.full((), 1, tl.int64) * units * per_unit  # units may be a constant 1
    total = tl.sum(tl.load(sums + at, mask=mask, other=0.0), axis=1)
    weighted = tl.sum(tl.load(sums + tiles + at, mask=mask, other=0.0), axis=1)
    meaningful = (total > 0.0) & (total < LARGEST_SUM)
    divisor = tl.where(meaningful, total, 1.0)
    value = tl.where(meaningful, tl.log2(divisor) - weighted / divisor, 0.0)
    group, index = place_of(unit, population, populations, C.BY_TOKEN)
    tl.store(entropies + group.to(tl.int64) * population + index, value, mask=unit < units)


@triton.jit
def rank_kernel(entropies, widths, counts, U: tl.constexpr, J: tl.constexpr, STEPS: tl.constexpr):
    """Bits of widths for U units of a population: those with fewer than ``high`` units before them.

    ``counts`` is (population, populations, high, last population, last high); J * STEPS covers a population.
    """
    population, populations, high, last_population, last_high = counts
    group = tl.program_id(1)
    last = group == populations - 1
    there = tl.where(last, last_population, population)
    high = tl.where(last, last_high, high)
    entropies += group.to(tl.int64) * population
    own = tl.program_id(0) * U + tl.arange(0, U)
    value = tl.load(entropies + own, mask=own < there, other=0.0)
    rank = tl.zeros([U], tl.int32)
    for step in range(STEPS):
        other = step * J + tl.arange(0, J)
        against = tl.load(entropies + other, mask=other < there, other=float("-inf"))
        larger = against[None, :] > value[:, None]
        equal = (against[None, :] == value[:, None]) & (other[None, :] < own[:, None])
        rank += tl.sum((larger | equal).to(tl.int32), axis=1)
    flags = ((rank < high) & (own < there)).to(tl.int32)
    words = tl.sum(tl.reshape(flags, [U // 32, 32]) << tl.arange(0, 32)[None, :], axis=1)
    per_population = (population + 31) // 32
    word = tl.program_id(0) * (U // 32) + tl.arange(0, U // 32)
    tl.store(widths + group * per_population + word, words, mask=word < per_population)


@triton.jit
def ones(word):
    """Number of set bits of int32 words."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0x7F


@triton.jit
def slots_kernel(widths, slots, counts, units, W: tl.constexpr, U: tl.constexpr, BY_TOKEN: tl.constexpr):
    """slots[unit]: its number among the high units, populations behind each other; -1 for low ones.

    U units a program; W is a power of two from the population's words on.
    """
    population, populations, high = counts
    group, block = tl.program_id(1), tl.program_id(0)
    words = (population + 31) // 32
    widths += group * words
    before = tl.arange(0, W)
    earlier = tl.load(widths + before, mask=(before < words) & (before < block * (U // 32)), other=0)
    index = block * U + tl.arange(0, U)
    word = tl.load(widths + (index >> 5), mask=index < population, other=0)
    flag = (word >> (index & 31)) & 1
    slot = group * high + tl.sum(ones(earlier), axis=0) + tl.cumsum(flag, axis=0) - 1
    unit = index * populations + group if BY_TOKEN else group * population + index
    tl.store(slots + unit, tl.where(flag == 1, slot, -1), mask=(index < population) & (unit < units))


@triton.jit
def compact_kernel(extra, out, slots, tiles, per_unit, P: tl.constexpr, C: tl.constexpr):
    """Copy high tiles of a plane of P 32-bit words a tile to their slots."""
    first = tl.program_id(0) * C.R
    slot = tile_slots(slots, first, tiles, per_unit, C)
    word = tl.arange(0, P)[None, :]
    tile = (first + tl.arange(0, C.R)).to(tl.int64)
    high = (slot >= 0)[:, None]
    values = tl.load(extra + tile[:, None] * P + word, mask=high, other=0)
    tl.store(out + slot.to(tl.int64)[:, None] * P + word, values, mask=high)
