#!/usr/bin/env python
"""Tables of the runs that ``run`` made: differences to the uncompressed run of the same seed and size.

python -m scripts.accuracy.results W/results-*.jsonl
python -m scripts.accuracy.results docs/results/accuracy/controls.json
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.compression.report.render import table

BASE = "none"
_T975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5 % quantiles of Student's t by degrees of freedom, from one on; for more the last one is safe."""
MEASURES = {
    "train": "training loss, %",
    "valid_uncompressed": "weights used uncompressed, %",
    "test": "test loss, %",
}


class Estimate(NamedTuple):
    """A mean and its standard error s / sqrt(n), NaN of a single value, and the number of values."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Of the values alone."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), error, len(values))

    @property
    def interval(self) -> str:
        """Where the true mean is with 95 % confidence, by Student's t; empty of a single value."""
        if self.count < 2:
            return ""
        half = _T975[min(self.count - 1, len(_T975)) - 1] * self.error
        digits = 3 if half < 0.1 else 2
        return f"{self.mean - half:+.{digits}f} … {self.mean + half:+.{digits}f}"

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")


def load(paths: Sequence[Path]) -> list[dict]:
    """The records of files, each job once, its last one. .jsonl has one a line, .json a list of them."""
    records = {}
    for path in paths:
        text = path.read_text()
        # the last line counts if it is whole: a worker may be writing it
        lines = text[: text.rfind("\n") + 1].splitlines()
        found = json.loads(text)["records"] if path.suffix == ".json" else map(json.loads, lines)
        records |= {record["id"]: record for record in found}
    return list(records.values())


def differences(records: Sequence[dict], measure: str = "valid") -> dict[str, dict[int, float]]:
    """Per cent above the uncompressed run, by setting and seed.

    Args:
        measure: valid, or one of MEASURES.
    """
    whole = {(r["seed"], r["size"]): r for r in records if r["kind"] == "scratch"}
    found: dict[str, dict[int, float]] = {}
    for record in records:
        base = whole.get((record["seed"], record["size"]))
        if record["kind"] == "ending" and base and measure in record:
            reference = base["valid" if measure == "valid_uncompressed" else measure]
            of_setting = found.setdefault(record["setting"]["name"], {})
            of_setting[record["seed"]] = 100 * (record[measure] / reference - 1)
    return found


def tables(records: Sequence[dict]) -> str:
    """Markdown: the uncompressed losses, and a row for each setting."""
    base = {r["seed"]: f"{r['valid']:.4f}" for r in records if r["kind"] == "scratch"}
    bits = {r["setting"]["name"]: f"{r['bits']:.2f}" for r in records if "bits" in r}
    more = {title: found for name, title in MEASURES.items() if (found := differences(records, name))}
    columns = ["setting", "bits a value", "against uncompressed by seed, %", "mean, %", "95 % interval"]
    rows = []
    for name, values in differences(records).items():
        mean = Estimate.of(list(values.values()))
        by_seed = ", ".join(f"{value:+.3f}" for _, value in sorted(values.items()))
        cells = [name, bits.get(name, ""), by_seed, str(mean), mean.interval]
        cells += [str(Estimate.of(list(one[name].values()))) if name in one else "" for one in more.values()]
        rows.append(cells)
    losses = ", ".join(loss for _, loss in sorted(base.items()))
    return "\n".join([f"Validation losses of the uncompressed runs, by seed: {losses}", ""]) + "\n".join(
        table([*columns, *more], *rows)
    )


if __name__ == "__main__":
    print(tables(load([Path(name) for name in sys.argv[1:]])))
