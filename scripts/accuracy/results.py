#!/usr/bin/env python
"""Tables of the runs that ``run`` made: differences to the uncompressed run of the same seed and
size.

python -m scripts.accuracy.results W/results-*.jsonl
python -m scripts.accuracy.results docs/results/accuracy/controls.json
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.compression.report.render import table

BASE = "none"
"""The setting that others are compared with."""
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5 % quantiles of Student's t, by degrees of freedom from 1 on. For more than 9 the last one is
safe."""


def estimate(values: Sequence[float]) -> tuple[str, str]:
    """Return the mean of values with its standard error, and the 95 % confidence interval of the
    true mean.

    The standard error is s / sqrt(n), the interval Student's t. A single value has neither.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:+.3f}", ""
    error = statistics.stdev(values) / math.sqrt(len(values))
    degrees_of_freedom = min(len(values) - 1, len(T_QUANTILES))
    half = T_QUANTILES[degrees_of_freedom - 1] * error
    # Two digits are enough where the interval is wide.
    digits = 3 if half < 0.1 else 2
    interval = f"{mean - half:+.{digits}f} … {mean + half:+.{digits}f}"
    return f"{mean:+.3f} ± {error:.3f}", interval


def load(paths: Sequence[Path]) -> list[dict]:
    """Return the records of files; of several with one id the last.

    A .jsonl file has a record on each line, a .json file a list of them.
    """
    records = {}
    for path in paths:
        text = path.read_text()
        if path.suffix == ".json":
            of_file = json.loads(text)["records"]
        else:
            # A worker may be writing the last line: it counts only if it is whole.
            whole_lines = text[: text.rfind("\n") + 1].splitlines()
            of_file = [json.loads(line) for line in whole_lines]
        for record in of_file:
            records[record["id"]] = record
    return list(records.values())


def differences(records: Sequence[dict]) -> dict[str, dict[int, float]]:
    """Return per cent of validation loss above the uncompressed run, by setting and seed."""
    uncompressed = {}
    for record in records:
        if record["kind"] == "scratch":
            uncompressed[record["seed"], record["size"]] = record["valid"]
    by_setting: dict[str, dict[int, float]] = {}
    for record in records:
        base = uncompressed.get((record["seed"], record["size"]))
        # A run whose seed has no uncompressed one cannot be compared.
        if record["kind"] == "ending" and base:
            by_seed = by_setting.setdefault(record["setting"]["name"], {})
            by_seed[record["seed"]] = 100 * (record["valid"] / base - 1)
    return by_setting


def tables(records: Sequence[dict]) -> str:
    """Return markdown: the uncompressed losses, and a row for each setting."""
    losses = []
    bits = {}
    for record in records:
        if record["kind"] == "scratch":
            losses.append((record["seed"], f"{record['valid']:.4f}"))
        if "bits" in record:
            bits[record["setting"]["name"]] = f"{record['bits']:.2f}"
    # Of several sizes the largest loss of a seed is shown.
    by_seed = dict(sorted(losses))
    header = [
        "setting",
        "bits a value",
        "against uncompressed by seed, %",
        "mean, %",
        "95 % interval",
    ]
    rows = [header]
    for name, values in differences(records).items():
        of_seeds = ", ".join(f"{value:+.3f}" for _, value in sorted(values.items()))
        rows.append([name, bits.get(name, ""), of_seeds, *estimate(list(values.values()))])
    title = f"Validation losses of the uncompressed runs, by seed: {', '.join(by_seed.values())}"
    return "\n".join([title, "", *table(*rows)])


if __name__ == "__main__":
    print(tables(load([Path(name) for name in sys.argv[1:]])))
