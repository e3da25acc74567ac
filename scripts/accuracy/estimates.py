"""Differences to the uncompressed runs, their errors, and what they can tell apart.

A block holds runs that share everything but the setting: from scratch, those of a seed (weights and order of
the data); branches, those of a checkpoint of one seed. Only differences within a block are looked at. What
noise is left in one run is estimated from all settings together, with the additive model

    100 ln(loss) = setting + block + noise

since three runs of one setting alone tell little of their own scatter. That holds from scratch, where chance
rules. In branches and endings a codec's scatter grows with what it costs: there each setting has its own, by
stage, and the common noise serves only where a stage has one run; settings that scatter far more than the
median one stay out of it. The reference of a block is the mean of its uncompressed runs (BASE and NULL), as
its noise goes into every difference; that of NULL, the null comparison, is BASE.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scripts.accuracy.plan import CHECKPOINTS
from scripts.accuracy.records import training_loss

BASE, NULL = "none", "none-tp2"
LOUD = 3.0
"""So many times the median scatter of the settings is not the common noise."""
COARSE = 0.3
"""A difference in per cent from which on a single run is given no error: its noise is not the common one."""
_T975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


def t_quantile(freedom: float) -> float:
    """97.5 % quantile of Student's t: a table below 10 degrees of freedom, an expansion from there on."""
    if freedom < 1 - 1e-9:  # a sum of squares may round to less
        return math.inf
    freedom = max(freedom, 1.0)
    if freedom < 10:
        low = int(freedom)
        high = _T975[low] if low < 9 else t_quantile(10)
        return _T975[low - 1] + (freedom - low) * (high - _T975[low - 1])
    z = 1.959964
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


class Estimate(NamedTuple):
    """A mean, its standard error (NaN if unknown), the number of values and degrees of freedom."""

    mean: float
    error: float
    count: int
    freedom: float

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true mean is with 95 % confidence, by Student's t."""
        half = t_quantile(self.freedom) * self.error
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error s / sqrt(n), s with n - 1, from the values alone."""
    n = len(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(statistics.fmean(values), error, n, n - 1)


class Block(NamedTuple):
    """What runs of a block share."""

    stage: str
    """Checkpoint that branches start from (early, middle, late); empty from scratch."""
    replicate: int
    """Seed, or data order of a branch."""
    steps: int
    size: str


def in_order(stages: Iterable[str]) -> list[str]:
    """Each stage once, from the start of the schedule on."""
    return sorted(set(stages), key=lambda stage: ("", *CHECKPOINTS).index(stage))


def values_of(records: Sequence[dict], kind: str, measure: str = "valid") -> dict[str, dict[Block, float]]:
    """A measure (valid, test, train or uncompressed) of all runs of a kind, by setting and block.

    An uncompressed ending need not have been run: the whole run is its own, to the last bit.
    """
    found: dict[str, dict[Block, float]] = defaultdict(dict)
    for record in records:
        if record["kind"] == kind:
            stage = (record.get("start") or "").split("-")[0]
            key = {"train": None, "uncompressed": "valid_uncompressed"}.get(measure, measure)
            value = record.get(key, math.nan) if key else training_loss(record)
            block = Block(stage, record["seed"], record["steps"], record["size"])
            found[record["setting"]["name"]][block] = value
    whole = values_of(records, "scratch", measure).get(BASE, {}) if kind == "ending" else {}
    by_seed = {(block.replicate, block.size): value for block, value in whole.items()}
    for block in dict.fromkeys(block for runs in found.values() for block in runs):
        if (block.replicate, block.size) in by_seed:
            found[BASE].setdefault(block, by_seed[block.replicate, block.size])
    return dict(found)


def references(records: Sequence[dict], kind: str, measure: str = "valid") -> dict[Block, list[float]]:
    """The uncompressed runs of each block that has BASE."""
    values = values_of(records, kind, measure)
    runs = [values.get(name, {}) for name in (BASE, NULL)]
    return {block: [found[block] for found in runs if block in found] for block in runs[0]}


def differences(records: Sequence[dict], kind: str, measure: str = "valid") -> dict[str, dict[Block, float]]:
    """Per cent above the reference of the block, for all settings but BASE."""
    base = references(records, kind, "valid" if measure == "uncompressed" else measure)
    found = {}
    for name, values in values_of(records, kind, measure).items():
        pairs = {}
        for block, value in values.items():
            if block in base and not math.isnan(value):
                reference = base[block][0] if name == NULL else statistics.fmean(base[block])
                pairs[block] = 100 * (value / reference - 1)
        if name != BASE and pairs:
            found[name] = pairs
    return found


class Noise(NamedTuple):
    """Standard deviation of one run, per cent of its loss, and its degrees of freedom."""

    deviation: float
    freedom: int


def residual(rows: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Sum of squares and degrees of freedom that rows and columns leave over in a table."""
    columns = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    total, square = statistics.fmean(columns), 0.0
    for row in rows:
        mean = statistics.fmean(row)
        square += sum((v - mean - column + total) ** 2 for v, column in zip(row, columns, strict=True))
    return square, (len(rows) - 1) * (len(columns) - 1)


def loud(records: Sequence[dict], kind: str) -> dict[str, set[str]]:
    """By stage, the settings whose differences scatter more than LOUD times as the median setting's, found
    again without them until there are none. None from scratch."""
    scatter: dict[str, dict[str, float]] = defaultdict(dict)
    for name, pairs in differences(records, kind).items() if kind != "scratch" else ():
        for stage in {block.stage for block in pairs}:
            found = [value for block, value in pairs.items() if block.stage == stage]
            if len(found) > 1 and name != NULL:
                scatter[stage][name] = statistics.stdev(found)
    excluded: dict[str, set[str]] = {}
    for stage, left in scatter.items():
        excluded[stage], more = set(), set(left)
        while left and more:
            bound = LOUD * statistics.median(left.values())
            more = {name for name, deviation in left.items() if deviation > bound}
            excluded[stage] |= more
            left = {name: deviation for name, deviation in left.items() if name not in more}
    return excluded


def noise_by_stage(records: Sequence[dict], kind: str) -> dict[str, Noise]:
    """Residual of the additive model, from those blocks of a stage and settings with all of them, but for the
    loud ones, that leave the most degrees of freedom; without the stages that leave none."""
    values, excluded, found = values_of(records, kind), loud(records, kind), {}
    logs = {
        name: {block: 100 * math.log(v) for block, v in runs.items() if v > 0}  # NaN is not
        for name, runs in values.items()
    }
    for stage in in_order(block.stage for block in values.get(BASE, {})):
        blocks = [block for block in values[BASE] if block.stage == stage]
        blocks.sort(key=lambda block: -sum(block in runs for runs in logs.values()))
        best = (0.0, 0)
        for count in range(2, len(blocks) + 1):
            rows = [
                [runs[b] for b in blocks[:count]]
                for name, runs in logs.items()
                if runs.keys() >= set(blocks[:count]) and name not in excluded.get(stage, ())
            ]
            if rows:
                best = max(best, residual(rows), key=lambda pair: pair[1])
        if best[1]:
            found[stage] = Noise(math.sqrt(best[0] / best[1]), best[1])
    return found


def pooled(records: Sequence[dict], kind: str) -> dict[str, Estimate]:
    """For each setting the mean over the stages of the mean difference in validation loss in a stage, its
    error, and Satterthwaite's degrees of freedom.

    From scratch the error is that of the common noise; of branches and endings, by stage, that of the own
    runs, of a single run the common one. NaN where that is unknown, and for a single run of a coarse codec.
    """
    noise, base = noise_by_stage(records, kind), references(records, kind)
    found = {}
    for name, pairs in differences(records, kind).items():
        stages = defaultdict(list)
        for block, value in pairs.items():
            controls = 1 if name == NULL else len(base[block])
            stages[block.stage].append((value, 1 + 1 / controls))
        parts = []
        for stage, pairs_of_stage in stages.items():
            values, weights = zip(*pairs_of_stage, strict=True)
            count, common = len(values), noise.get(stage)
            if count > 1 and (kind != "scratch" or common is None):
                parts.append((statistics.variance(values) / count, count - 1))
            elif common is None or (count == 1 and kind != "scratch" and abs(values[0]) > COARSE):
                parts.append((math.nan, 0))
            else:
                parts.append((common.deviation**2 * sum(weights) / count**2, common.freedom))
        mean = statistics.fmean(statistics.fmean(v for v, _ in values) for values in stages.values())
        error = math.sqrt(sum(variance for variance, _ in parts)) / len(stages)
        below = sum(variance**2 / freedom if freedom else math.nan for variance, freedom in parts)
        freedom = error**4 * len(stages) ** 4 / below if below > 0 else math.inf
        found[name] = Estimate(mean, error, len(pairs), 0 if math.isnan(error) else freedom)
    return found
