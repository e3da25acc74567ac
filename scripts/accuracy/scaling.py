"""From scratch chance hides a small cost; endings show it. How the two go together, setting by setting.

A line through the settings' means by least squares: cost from scratch = offset + factor * cost of the ending.
The settings share seeds and reference: what chance leaves in those is the offset, and the factor rests on the
differences between settings. Its error is that of the noise of a run from scratch.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scripts.accuracy.estimates import NULL, Estimate, differences, noise_by_stage

FEWEST = 3
"""Settings that a line is drawn through."""


class Line(NamedTuple):
    """offset + factor * cost of the ending, per cent; and what it was drawn through."""

    offset: Estimate
    factor: Estimate
    points: dict[str, tuple[float, float]]
    """By setting: the cost of its ending and that from scratch, per cent, means over the seeds."""

    def from_scratch(self, ending: float, error: float = 0.0) -> Estimate:
        """The cost from scratch, without the offset, that an ending of so many per cent stands for."""
        spread = math.hypot(self.factor.error * ending, self.factor.mean * error)
        return Estimate(self.factor.mean * ending, spread, self.factor.count, self.factor.freedom)


def line(records: Sequence[dict]) -> Line | None:
    """The line through all settings with endings and runs from scratch of the same seeds, at least FEWEST.

    Settings whose runs from scratch are not those of the most seeds are left out.
    """
    scratch, ending = differences(records, "scratch"), differences(records, "ending")
    noise = noise_by_stage(records, "scratch").get("")
    shared = {name: pairs for name, pairs in scratch.items() if name in ending and name != NULL}
    most = max((len(pairs) for pairs in shared.values()), default=0)
    points = {
        name: (statistics.fmean(ending[name].values()), statistics.fmean(pairs.values()))
        for name, pairs in shared.items()
        if len(pairs) == most
    }
    if noise is None or len(points) < FEWEST:
        return None
    x, y = zip(*points.values(), strict=True)
    middle, count = statistics.fmean(x), len(points)
    square = sum((value - middle) ** 2 for value in x)
    factor = sum((a - middle) * b for a, b in points.values()) / square
    variance = noise.deviation**2 / most
    offset = statistics.fmean(y) - factor * middle
    return Line(
        Estimate(offset, math.sqrt(variance * (1 / count + middle**2 / square)), count, noise.freedom),
        Estimate(factor, math.sqrt(variance / square), count, noise.freedom),
        points,
    )


def scaling_lines(records: Sequence[dict]) -> list[str]:
    """The line in words, and a table: every setting with an ending, what it cost and what that stands for."""
    found = line(records)
    if found is None:
        return []
    low, high = found.factor.interval
    lines = [
        f"From scratch a codec costs {found.factor.mean:.2f} ± {found.factor.error:.2f} times what its "
        f"ending does (95 %: {low:.2f} … {high:.2f}; {found.factor.count} settings); chance adds "
        f"{found.offset} % to all.",
        "",
        "| setting | ending, % | stands for, from scratch, % | measured from scratch, less the offset, % |",
        "|---|---|---|---|",
    ]
    endings = {name: pairs for name, pairs in differences(records, "ending").items() if name != NULL}
    for name, pairs in sorted(endings.items(), key=lambda item: statistics.fmean(item[1].values())):
        values = list(pairs.values())
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        measured = f"{found.points[name][1] - found.offset.mean:+.2f}" if name in found.points else ""
        mean = statistics.fmean(values)
        stands = found.from_scratch(mean, error)
        cells = [name, f"{mean:+.3f}", f"{stands.mean:+.2f} ± {stands.error:.2f}", measured]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
