"""What a codec costs in a whole run, beside what it costs in the last part of one (the endings).

A line through the settings' means by least squares: cost from scratch = offset + factor * cost of the ending.
The coarse settings decide it. The offset is what all settings have in common: chance in the seeds and in the
uncompressed reference, or a cost of the part before the endings; the data cannot tell which. So the line says
how costs that can be measured grow, and is an extrapolation for those that cannot.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scripts.accuracy.estimates import NULL, Block, Estimate, differences, estimate, noise_by_stage

LEAST_SETTINGS = 3
"""Settings that a line is drawn through."""
QUIET = 0.2
"""Per cent: endings below cost less than what a run from scratch can show."""


class Line(NamedTuple):
    """offset + factor * cost of the ending, per cent; and what it was drawn through."""

    offset: Estimate
    factor: Estimate
    """Its error is the larger of two: of the common noise of a run, and of the factors of single seeds."""
    points: dict[str, tuple[float, float]]
    """By setting: the cost of its ending and that from scratch, per cent, means over the same seeds."""
    deviation: float
    """Of such a mean from scratch, by chance, per cent."""


def _slope(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Least squares through (x, y): slope, mean of x, sum of squares of x about it."""
    middle = statistics.fmean(x for x, _ in points)
    square = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * y for x, y in points) / square if square > 0 else math.nan
    return slope, middle, square


def _by_seed(pairs: dict[Block, float]) -> dict[int, float]:
    return {block.replicate: value for block, value in pairs.items()}


def fit_line(records: Sequence[dict]) -> Line | None:
    """The line through the settings that have both an ending and a run from scratch of each seed.

    None with fewer than LEAST_SETTINGS of them, or fewer than two seeds.
    """
    scratch = {name: _by_seed(pairs) for name, pairs in differences(records, "scratch").items()}
    ending = {name: _by_seed(pairs) for name, pairs in differences(records, "ending").items()}
    noise = noise_by_stage(records, "scratch").get("")
    shared = {
        name: scratch[name].keys() & ending[name].keys()
        for name in scratch
        if name in ending and name != NULL
    }
    seeds = max(shared.values(), key=len, default=set())
    names = [name for name, found in shared.items() if found == seeds]
    if noise is None or len(seeds) < 2 or len(names) < LEAST_SETTINGS:
        return None
    points = {
        name: tuple(statistics.fmean(found[name][seed] for seed in seeds) for found in (ending, scratch))
        for name in names
    }
    slope, middle, square = _slope(list(points.values()))
    single = estimate([_slope([(ending[n][seed], scratch[n][seed]) for n in names])[0] for seed in seeds])
    own = [statistics.variance([ending[n][s] for s in seeds]) / len(seeds) for n in names]
    leverage = sum((x - middle) ** 2 * v for (x, _), v in zip(points.values(), own, strict=True))
    deviation = noise.deviation / math.sqrt(len(seeds))
    pooled = Estimate(
        slope, math.sqrt(deviation**2 / square + slope**2 * leverage / square**2), len(names), noise.freedom
    )
    alone = Estimate(slope, single.error, len(names), single.freedom)
    width = lambda found: found.interval[1] - found.interval[0]  # noqa: E731
    offset = statistics.fmean(y for _, y in points.values()) - slope * middle
    error = deviation * math.sqrt(1 / len(names) + middle**2 / square)
    offset = Estimate(offset, error, len(names), noise.freedom)
    return Line(offset, max(pooled, alone, key=width), points, deviation)


def scaling_lines(records: Sequence[dict]) -> list[str]:
    """The line in words, what is left of it among the quiet settings, and its points."""
    found = fit_line(records)
    if found is None:
        return []
    low, high = found.factor.interval
    start, end = found.offset.interval
    lines = [
        f"- A run from scratch costs {found.factor.mean:.2f} times what its ending does (95 %: {low:.1f} … "
        f"{high:.1f}; {found.factor.count} settings), plus {found.offset.mean:+.2f} % that all of them "
        f"have in common (95 %: {start:+.2f} … {end:+.2f}).",
    ]
    quiet = [point for point in found.points.values() if point[0] < QUIET]
    if len(quiet) >= LEAST_SETTINGS:
        slope, _, square = _slope(quiet)
        error = found.deviation / math.sqrt(square)
        lines.append(
            f"- The {len(quiet)} settings whose endings cost less than {QUIET:g} % say nothing of it by "
            f"themselves: a factor of {slope:.1f} ± {error:.1f}."
        )
    lines += [
        "",
        "| setting | ending, % | the line, without what is common, % | measured from scratch, % |",
        "|---|---|---|---|",
    ]
    for name, (x, y) in sorted(found.points.items(), key=lambda item: item[1][0]):
        lines.append(f"| {name} | {x:+.3f} | {found.factor.mean * x:+.2f} | {y:+.2f} |")
    return lines
