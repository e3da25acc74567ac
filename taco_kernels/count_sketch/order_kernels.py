"""Triton kernels that find one order statistic of the magnitudes of a sample: a threshold, in two launches.

Sorting 65536 magnitudes for one of them is wasteful. The first kernel draws the sample, many programs at
once. Each of them also draws the same small part of it and finds a band of magnitudes there, the same in
every program, that should hold the one wanted; of its own magnitudes it writes those inside the band first,
and how many reach its ends. The second kernel, a program a shard, adds the counts up. They prove that the
band holds the rank wanted, and it looks for it among the few thousand inside; or else among all of them. So
the band decides how long it takes and never what comes out.

Magnitudes are compared by their bits as integers: infinity, then NaN, lie above all numbers.
"""

import triton
import triton.language as tl

NAN = tl.constexpr(0x7FC00000)
"""The largest key: of a NaN, and of all with larger bits."""
ABOVE = tl.constexpr(0x7FFFFFFF)
"""Above all keys."""


@triton.jit
def position_of(number, step, fraction, inverse, next_inverse, LOG: tl.constexpr):
    """int64: ``selection.sample_positions`` of int32 numbers, without a division.

    numel is step * 2^LOG + fraction, so strata have step values, or one more; the inverses of these sizes are
    2^32 - 1 divided by them, rounded down, which makes a quotient of 24 bits at most one too small.
    """
    number = number.to(tl.uint32)
    fraction = fraction.to(tl.uint32)
    product = number * fraction
    longer = ((product & (2**LOG - 1)) + fraction) >> LOG
    size = step.to(tl.uint32) + longer
    scattered = (number * 0x9E3779B1) >> 8
    quotient = tl.umulhi(scattered, tl.where(longer != 0, next_inverse, inverse).to(tl.uint32))
    rest = scattered - quotient * size
    rest = tl.where(rest >= size, rest - size, rest)
    return number.to(tl.int64) * step + ((product >> LOG) + rest)


@triton.jit
def load_keys(x, number, mask, strata, LOG: tl.constexpr, SAMPLED: tl.constexpr):
    """int32: keys of sampled values by their numbers; -1 where masked."""
    step, fraction, inverse, next_inverse = strata
    if SAMPLED:
        at = position_of(number, step, fraction, inverse, next_inverse, LOG)
    else:
        at = number
    bits = tl.load(x + at, mask=mask, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(mask, tl.minimum(bits, NAN), -1)


@triton.jit
def part_of(width, share):
    """A share of int32 width that lies inside of it; 0 of 1."""
    part = (width.to(tl.float32) * tl.minimum(tl.maximum(share, 0.0), 0.999)).to(tl.int32)
    return tl.minimum(tl.maximum(part, 1), width - 1)


@triton.jit
def probes_of(lower, upper, reach_lower, reach_upper, aim, apart, guess):
    """Two keys around the one that ``aim`` should reach, by interpolation; without a guess, in thirds.

    ``apart`` is how many more and fewer should reach the two.
    """
    left = tl.maximum(reach_lower - reach_upper, 1).to(tl.float32)
    share, apart = (reach_lower - aim).to(tl.float32) / left, apart / left
    width = upper - lower
    low = part_of(width, tl.where(guess, share - apart, 1 / 3))
    return lower + low, lower + part_of(width, tl.where(guess, share + apart, 2 / 3))


@triton.jit
def deviation(reach_lower, reach_upper):
    """fp32: standard deviation, at most, of how many of the keys between reach a value among them."""
    return 0.5 * tl.sqrt(tl.maximum(reach_lower - reach_upper, 1).to(tl.float32))


@triton.jit
def narrow(ends, probe, reach, need):
    """Bring the ends nearer: ``need`` keys or more reach the lower one, fewer the upper one."""
    lower, upper, reach_lower, reach_upper = ends
    up = reach >= need
    return (
        tl.where(up, tl.maximum(lower, probe), lower),
        tl.where(up, upper, tl.minimum(upper, probe)),
        tl.where(up, tl.minimum(reach_lower, reach), reach_lower),
        tl.where(up, reach_upper, tl.maximum(reach_upper, reach)),
    )


@triton.jit
def counts_of(key, p, q):
    """How many keys reach p, and how many q: at most 32767."""
    both = tl.sum((key >= p).to(tl.int32) | ((key >= q).to(tl.int32) << 16), axis=0)
    return both & 0xFFFF, both >> 16


@triton.jit
def band_of(key, low, high, slack, M: tl.constexpr):
    """int32 a < b: of M keys ``low`` or more reach a, fewer than ``high`` reach b, by ``slack`` at most.

    Keys alike make this impossible: then b may be a + 1, with nothing between them. No ends are found for a
    ``low`` above M, or a ``high`` below 1.
    """
    least, most = tl.min(key, axis=0), tl.max(key, axis=0)
    zero = least * 0
    # of either end of the band: where it lies between, and how many keys reach these
    a = (least, most + 1, zero + M, zero)
    b = (least, most + 1, zero + M, zero)
    guess_a, guess_b = zero == 0, zero == 0
    wanted_a, wanted_b = low <= M, high >= 1
    width = most + 1 - least
    p, q = least + 1, least + part_of(width, 0.5)  # the least may be many
    r, s = least + part_of(width, 0.75), least + part_of(width, 0.875)
    half = slack.to(tl.float32) * 0.6
    search = wanted_a | wanted_b
    while search:
        reach_p, reach_q = counts_of(key, p, q)
        reach_r, reach_s = counts_of(key, r, s)
        width_a, width_b = a[1] - a[0], b[1] - b[0]
        a = narrow(narrow(a, p, reach_p, low), q, reach_q, low)
        a = narrow(narrow(a, r, reach_r, low), s, reach_s, low)
        b = narrow(narrow(b, p, reach_p, high), q, reach_q, high)
        b = narrow(narrow(b, r, reach_r, high), s, reach_s, high)
        guess_a, guess_b = a[1] - a[0] < width_a // 3, b[1] - b[0] < width_b // 3
        p, q = probes_of(
            a[0], a[1], a[2], a[3], low + slack // 2, tl.maximum(deviation(a[2], a[3]), half), guess_a
        )
        r, s = probes_of(
            b[0], b[1], b[2], b[3], high - 1 - slack // 2, tl.maximum(deviation(b[2], b[3]), half), guess_b
        )
        more_a = wanted_a & (a[1] - a[0] > 1) & (a[2] > low + slack)
        search = more_a | (wanted_b & (b[1] - b[0] > 1) & (b[3] < high - 1 - slack))
    return tl.where(wanted_a, a[0], 0), tl.where(wanted_b, b[1], ABOVE)


@triton.jit(
    do_not_specialize=[
        "x_stride", "count", "step", "fraction", "inverse", "next_inverse", "low", "high", "slack",
    ]
)  # fmt: skip
def band_kernel(
    x, keys, notes, x_stride, count, step, fraction, inverse, next_inverse, low, high, slack,
    LOG: tl.constexpr, SAMPLED: tl.constexpr, M: tl.constexpr, P: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A sample of ``count`` keys, P programs a shard, each with those inside the band before the others.

    M of them, scattered, are every program's and give the band: see ``band_of``. ``notes`` is int64
    ``[S, P + 1]``: of each program how many keys reach a (18 bits), reach b (18), lie between (18), and
    whether these are more than SLOTS; then a and b.
    """
    program, shard = tl.program_id(0), tl.program_id(1).to(tl.int64)
    OWN: tl.constexpr = 2**LOG // P
    x += shard * x_stride
    # neither these nor a program's own numbers have a period that the rows of a matrix could share
    part = tl.arange(0, M).to(tl.uint32)
    jitter = (((part * 0x9E3779B1) >> 16) * (count.to(tl.uint32) // M)) >> 16
    shared_number = (part * count.to(tl.uint32) // M + jitter).to(tl.int32)
    strata = (step, fraction, inverse, next_inverse)
    index = tl.arange(0, OWN)
    turn = ((index.to(tl.uint32) * 0x9E3779B1) >> 16).to(tl.int32)
    number = index * P + ((program + turn) & (P - 1))
    shared = load_keys(x, shared_number, shared_number >= 0, strata, LOG, SAMPLED)
    own = load_keys(x, number, number < count, strata, LOG, SAMPLED)
    a, b = band_of(shared, low, high, slack, M)
    inside = ((own > a) & (own < b)).to(tl.int32)
    many = tl.sum(inside, axis=0)
    reach_a, reach_b = counts_of(own, a, b)
    before = tl.cumsum(inside, axis=0)
    slot = tl.where(inside != 0, before - 1, many + index - before)
    tl.store(keys + (shard * P + program) * OWN + slot, own)
    note = reach_a.to(tl.int64) | (reach_b.to(tl.int64) << 18)
    note |= (many.to(tl.int64) << 36) | ((many > SLOTS).to(tl.int64) << 54)
    notes += shard * (P + 1)
    tl.store(notes + program, note)
    if program == 0:
        tl.store(notes + P, a.to(tl.int64) | (b.to(tl.int64) << 32))


@triton.jit
def some_of(keys, sizes, first, P: tl.constexpr, OWN: tl.constexpr, SLOTS: tl.constexpr):
    """int32[P * SLOTS]: keys from the ``first``-th on of each program of a shard; -1 beyond their sizes."""
    place = tl.arange(0, P * SLOTS)
    slot = first + place % SLOTS
    key = tl.load(keys + place // SLOTS * OWN + slot)  # all are there: no wait for the sizes
    return tl.where(slot < sizes, key, -1)


@triton.jit
def extent_of(
    key, keys, sizes, most_slots, lower, upper, P: tl.constexpr, OWN: tl.constexpr, SLOTS: tl.constexpr
):
    """The least key from ``lower`` on, and the largest one below ``upper``."""
    least = tl.min(tl.where(key >= lower, key, ABOVE), axis=0)
    most = tl.max(tl.where(key < upper, key, -1), axis=0)
    first = SLOTS
    while first < most_slots:
        other = some_of(keys, sizes, first, P, OWN, SLOTS)
        least = tl.minimum(least, tl.min(tl.where(other >= lower, other, ABOVE), axis=0))
        most = tl.maximum(most, tl.max(tl.where(other < upper, other, -1), axis=0))
        first += SLOTS
    return least, most


@triton.jit(do_not_specialize=["need", "count"])
def pick_kernel(
    keys, notes, thresholds, need, count,
    P: tl.constexpr, OWN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The largest magnitude that ``need`` of a shard's reach: fp32, a program a shard."""
    shard = tl.program_id(0).to(tl.int64)
    keys += shard * (P * OWN)
    notes += shard * (P + 1)
    place = tl.arange(0, P * SLOTS)
    # all loads before the first sum, whose barriers they would wait behind
    sizes = ((tl.load(notes + place // SLOTS) >> 36) & 0x3FFFF).to(tl.int32)
    loaded = tl.load(keys + place // SLOTS * OWN + place % SLOTS)
    ends = tl.load(notes + P)
    sums = tl.sum(tl.load(notes + tl.arange(0, P)), axis=0)
    a, b = (ends & 0x7FFFFFFF).to(tl.int32), (ends >> 32).to(tl.int32)
    reach_a, reach_b = (sums & 0x3FFFF).to(tl.int32), ((sums >> 18) & 0x3FFFF).to(tl.int32)
    beyond_a = reach_b + ((sums >> 36) & 0x3FFFF).to(tl.int32)
    missed = (need <= reach_b) | (need > reach_a)
    is_a = (need > beyond_a) & (need <= reach_a)
    sizes = tl.where(missed, OWN, sizes)
    most_slots = reach_a * 0 + SLOTS
    if missed | ((sums >> 54) != 0):
        most_slots = tl.max(sizes, axis=0)
    # ``need`` keys or more reach the lower one of these, fewer the upper one
    lower, reach_lower = tl.where(missed, 0, a + 1), tl.where(missed, count, beyond_a)
    upper, reach_upper = tl.where(missed, ABOVE, b), tl.where(missed, 0, reach_b)
    above = reach_upper
    key = tl.where(place % SLOTS < sizes, loaded, -1)
    failed = need * 0
    while (upper - lower > 1) & (reach_lower != need) & (reach_upper != need - 1) & (is_a == 0):
        width = upper - lower
        apart = deviation(reach_lower, reach_upper)
        low, high = probes_of(lower, upper, reach_lower, reach_upper, need - 0.5, apart, failed % 2 == 0)
        reach_low, reach_high = counts_of(key, low, high)
        first = SLOTS
        while first < most_slots:
            more_low, more_high = counts_of(some_of(keys, sizes, first, P, OWN, SLOTS), low, high)
            reach_low += more_low
            reach_high += more_high
            first += SLOTS
        nearer = narrow((lower, upper, reach_lower, reach_upper), low, above + reach_low, need)
        lower, upper, reach_lower, reach_upper = narrow(nearer, high, above + reach_high, need)
        failed = tl.where(upper - lower < width // 3, 0, failed + 1)
        if failed % 2 == 1:  # few keys may be left, or one many times: from key to key
            lower, upper = extent_of(key, keys, sizes, most_slots, lower, upper, P, OWN, SLOTS)
            upper += 1
            failed *= (upper - lower > width // 2).to(tl.int32)
    least, most = extent_of(key, keys, sizes, most_slots, lower, upper, P, OWN, SLOTS)
    from_above = (upper - lower <= 1) | (reach_lower == need)
    found = tl.where(is_a, a, tl.where(from_above, least, most))
    tl.store(thresholds + shard, found.to(tl.float32, bitcast=True))
