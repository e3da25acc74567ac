"""Who is high: entropies, a threshold by search, slots by counting, and the extra bits to their slots.

Nothing here depends on timing: sums have a fixed order, and of equal entropies the first unit wins.
"""

import triton
import triton.language as tl

from taco_kernels.tah_quant.tiles import tile_slots
from taco_kernels.tah_quant.values import LARGEST_SUM, SMALLEST_SUM


@triton.jit
def place_of(unit, population, populations, BY_TOKEN: tl.constexpr):
    """(population, index in it) of a unit's number; tokens of different samples alternate."""
    if BY_TOKEN:
        where = (unit % populations, unit // populations)
    else:
        where = (unit // population, unit % population)
    return where


@triton.jit
def entropy_key(total, weighted):
    """int32 in the order of the entropies that sums fp32 belong to."""
    meaningful = (total > SMALLEST_SUM) & (total < LARGEST_SUM)
    divisor = tl.where(meaningful, total, 1.0)
    value = tl.where(meaningful, tl.log2(divisor) - weighted / divisor, 0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # one zero
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def entropy_kernel(
    sums, keys, units, per_unit, population, populations, U: tl.constexpr, T: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """keys[population * N + index] of U units a program; T is a power of two from ``per_unit`` on."""
    unit = tl.program_id(0) * U + tl.arange(0, U)
    tile = tl.arange(0, T)[None, :]
    at = unit.to(tl.int64)[:, None] * per_unit + tile
    mask = (unit < units)[:, None] & (tile < per_unit)
    tiles = tl.full((), 1, tl.int64) * units * per_unit  # units may be a constant 1
    total = tl.sum(tl.load(sums + at, mask=mask, other=0.0), axis=1)
    weighted = tl.sum(tl.load(sums + tiles + at, mask=mask, other=0.0), axis=1)
    group, index = place_of(unit, population, populations, C.BY_TOKEN)
    tl.store(keys + group.to(tl.int64) * population + index, entropy_key(total, weighted), mask=unit < units)


@triton.jit
def load_keys(keys, sums, group, first, there, counts, N: tl.constexpr, FUSED: tl.constexpr):
    """uint32[N]: keys of units first... of a population, ordered as unsigned numbers; 0 beyond the last."""
    population, units = counts
    index = first + tl.arange(0, N)
    mask = index < there
    at = group.to(tl.int64) * population + index
    if FUSED:  # the units are tiles, and nobody has made keys of their sums
        total = tl.load(sums + at, mask=mask, other=0.0)
        key = entropy_key(total, tl.load(sums + units + at, mask=mask, other=0.0))
    else:
        key = tl.load(keys + at, mask=mask, other=0)
    return tl.where(mask, key.to(tl.uint32, bitcast=True) ^ 0x80000000, 0)


@triton.jit
def part_of(width, share):
    """A share of width, uint32 of 2 or more, that lies inside of it."""
    part = (width.to(tl.float32) * tl.minimum(tl.maximum(share, 0.0), 1.0)).to(tl.int64).to(tl.uint32)
    return tl.minimum(tl.maximum(part, 1), width - 1)


@triton.jit
def choose_kernel(
    keys, sums, widths, slots, extra, out, counts, units, N: tl.constexpr, STEPS: tl.constexpr,
    FUSED: tl.constexpr, BY_TOKEN: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Widths and slots of one population a program, N units at a time, STEPS times.

    With P, units are tiles, whose P words of a plane are copied from ``extra`` to their slots of ``out``: no
    slots are stored.

    ``counts`` is (population, populations, high, last population, last high). A threshold that ``high`` keys
    reach is looked for at two places at a time; where equal keys leave none, the largest that more of them
    reach.
    """
    population, populations, every, last_population, last_high = counts
    group = tl.program_id(0)
    last = group == populations - 1
    there = tl.where(last, last_population, population)
    high = tl.where(last, last_high, every)
    sizes = (population, units)
    key = load_keys(keys, sums, group, 0, there, sizes, N, FUSED)
    first_key = tl.max(key, axis=0)
    last_key = tl.min(tl.where(tl.arange(0, N) < there, key, first_key), axis=0)
    for part in range(1, STEPS):
        other = load_keys(keys, sums, group, part * N, there, sizes, N, FUSED)
        first_key = tl.maximum(first_key, tl.max(other, axis=0))
        other = tl.where(part * N + tl.arange(0, N) < there, other, first_key)
        last_key = tl.minimum(last_key, tl.min(other, axis=0))
    # the threshold lies between these: ``high`` keys or more reach the lower one, fewer the upper one
    lower, upper = last_key, first_key + 1
    reach_lower, reach_upper = there, tl.zeros([], tl.int32)
    guess = tl.full([], True, tl.int1)
    while (upper - lower > 1) & (reach_lower != high) & (high != 0):
        width = upper - lower
        share = (reach_lower - high).to(tl.float32) + 0.5
        share = share / (reach_lower - reach_upper).to(tl.float32)
        # about where it should be, or, if that was no good the last time, in thirds: an end whatever the keys
        a = lower + part_of(width, tl.where(guess, share - 1 / 16, 1 / 3))
        b = lower + part_of(width, tl.where(guess, share + 1 / 16, 2 / 3))
        reach_a, reach_b = (key >= a).to(tl.int32), (key >= b).to(tl.int32)
        for part in range(1, STEPS):
            other = load_keys(keys, sums, group, part * N, there, sizes, N, FUSED)
            reach_a += (other >= a).to(tl.int32)
            reach_b += (other >= b).to(tl.int32)
        if N * STEPS < 32768:  # both in one number
            both = tl.sum(reach_a | (reach_b << 16), axis=0)
            reach_a, reach_b = both & 0xFFFF, both >> 16
        else:
            reach_a, reach_b = tl.sum(reach_a, axis=0), tl.sum(reach_b, axis=0)
        upper = tl.where(reach_a < high, a, tl.where(reach_b < high, b, upper))
        reach_upper = tl.where(reach_a < high, reach_a, tl.where(reach_b < high, reach_b, reach_upper))
        lower = tl.where(reach_b >= high, b, tl.where(reach_a >= high, a, lower))
        reach_lower = tl.where(reach_b >= high, reach_b, tl.where(reach_a >= high, reach_a, reach_lower))
        guess = upper - lower < width // 3
    threshold = tl.where(high == 0, first_key, lower)
    # of those that equal the threshold: all, or as many as the larger ones leave; none above the largest key
    wanted = tl.where(reach_lower == high, there, high - reach_upper)
    wanted = tl.where(high == 0, 0, wanted)
    words = (population + 31) // 32
    larger_before = tl.zeros([], tl.int32)
    equal_before = tl.zeros([], tl.int32)
    for part in range(STEPS):
        index = part * N + tl.arange(0, N)
        if STEPS > 1:
            key = load_keys(keys, sums, group, part * N, there, sizes, N, FUSED)
        larger = (key > threshold) & (index < there)
        equal = (key == threshold) & (index < there)
        both = larger.to(tl.int32) | (equal.to(tl.int32) << 16)  # N is at most 2^14
        sums_to = tl.cumsum(both, axis=0)
        equals = equal_before + (sums_to >> 16)
        flag = larger | (equal & (equals <= wanted))
        slot = group * every + larger_before + (sums_to & 0xFFFF) + tl.minimum(equals, wanted) - 1
        unit = index * populations + group if BY_TOKEN else group * population + index
        if P:
            piece = tl.arange(0, P)[None, :]
            values = tl.load(extra + unit.to(tl.int64)[:, None] * P + piece, mask=flag[:, None], other=0)
            tl.store(out + slot.to(tl.int64)[:, None] * P + piece, values, mask=flag[:, None])
        else:
            tl.store(slots + unit, tl.where(flag, slot, -1), mask=index < there)
        bits = tl.reshape(flag.to(tl.int32), [N // 32, 32]) << tl.arange(0, 32)[None, :]
        word = part * (N // 32) + tl.arange(0, N // 32)
        tl.store(widths + group * words + word, tl.sum(bits, axis=1), mask=word < words)
        if STEPS > 1:
            all_of_them = tl.sum(both, axis=0)
            larger_before += all_of_them & 0xFFFF
            equal_before += all_of_them >> 16


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
def compact_kernel(extra, out, slots, tiles, per_unit, P: tl.constexpr, R: tl.constexpr):
    """Copy high tiles of a plane of P 32-bit words a tile to their slots, R tiles a program."""
    tile = tl.program_id(0) * R + tl.arange(0, R)
    slot = tile_slots(slots, tile, tiles, per_unit)
    word = tl.arange(0, P)[None, :]
    high = (slot >= 0)[:, None]
    values = tl.load(extra + tile.to(tl.int64)[:, None] * P + word, mask=high, other=0)
    tl.store(out + slot.to(tl.int64)[:, None] * P + word, values, mask=high)
