"""Differences to the uncompressed runs, and their errors.

Only runs of one seed (weights and order of the data) and one size are compared. A codec's scatter grows with
what it costs, so a setting's error is that of its own runs.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scripts.accuracy.records import training_loss

BASE = "none"
_T975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5 % quantiles of Student's t by degrees of freedom, from one on; for more the last one is safe."""
MEASURES = {"valid": "valid", "test": "test", "uncompressed": "valid_uncompressed"}
"""Fields of a record by measure; ``train`` is made of its losses."""


class Estimate(NamedTuple):
    """A mean, its standard error s / sqrt(n) (NaN of a single value), and the number of values."""

    mean: float
    error: float
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true mean is with 95 % confidence, by Student's t."""
        half = _T975[min(self.count - 1, len(_T975)) - 1] * self.error if self.count > 1 else math.nan
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")


def estimate(values: Sequence[float]) -> Estimate:
    """Of the values alone."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(statistics.fmean(values), error, len(values))


def _value(record: dict, measure: str) -> float | None:
    return training_loss(record) if measure == "train" else record.get(MEASURES[measure])


def differences(records: Sequence[dict], kind: str, measure: str = "valid") -> dict[str, dict[int, float]]:
    """Per cent above the uncompressed run, by setting and seed, of all settings but BASE.

    Args:
        kind: ending or scratch. An ending is compared with the whole uncompressed run, whose own ending it
            is to the last bit; of training losses, with the same steps of it.
        measure: valid, test, train or uncompressed (validation without codecs).
    """
    whole = {
        (record["seed"], record["size"]): record
        for record in records
        if record["setting"]["name"] == BASE and record["kind"] == "scratch"
    }
    found: dict[str, dict[int, float]] = {}
    for record in records:
        name, base = record["setting"]["name"], whole.get((record["seed"], record["size"]))
        if record["kind"] != kind or name == BASE or base is None:  # earlier versions had other kinds
            continue
        value = _value(record, measure)
        reference = _value(base, "valid" if measure == "uncompressed" else measure)
        if value is not None and reference is not None:
            found.setdefault(name, {})[record["seed"]] = 100 * (value / reference - 1)
    return found
