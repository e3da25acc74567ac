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

from megatron.compression.report.render import table

BASE = "none"
_T975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5 % quantiles of Student's t by degrees of freedom, from one on; for more the last one is safe."""


def estimate(values: Sequence[float]) -> tuple[str, str]:
    """Their mean with its standard error s / sqrt(n), and where the true mean is with 95 % confidence by
    Student's t; of a single value the mean alone."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:+.3f}", ""
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = _T975[min(len(values) - 1, len(_T975)) - 1] * error
    digits = 3 if half < 0.1 else 2
    return f"{mean:+.3f} ± {error:.3f}", f"{mean - half:+.{digits}f} … {mean + half:+.{digits}f}"


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


def differences(records: Sequence[dict]) -> dict[str, dict[int, float]]:
    """Per cent of validation loss above the uncompressed run, by setting and seed."""
    whole = {(r["seed"], r["size"]): r["valid"] for r in records if r["kind"] == "scratch"}
    found: dict[str, dict[int, float]] = {}
    for record in records:
        base = whole.get((record["seed"], record["size"]))
        if record["kind"] == "ending" and base:
            own = found.setdefault(record["setting"]["name"], {})
            own[record["seed"]] = 100 * (record["valid"] / base - 1)
    return found


def tables(records: Sequence[dict]) -> str:
    """Markdown: the uncompressed losses, and a row for each setting."""
    base = sorted((r["seed"], f"{r['valid']:.4f}") for r in records if r["kind"] == "scratch")
    bits = {r["setting"]["name"]: f"{r['bits']:.2f}" for r in records if "bits" in r}
    rows = [
        ["setting", "bits a value", "against uncompressed by seed, %", "mean, %", "95 % interval"]
    ]
    for name, values in differences(records).items():
        by_seed = ", ".join(f"{value:+.3f}" for _, value in sorted(values.items()))
        rows.append([name, bits.get(name, ""), by_seed, *estimate(list(values.values()))])
    text = f"Validation losses of the uncompressed runs, by seed: {', '.join(dict(base).values())}"
    return "\n".join([text, "", *table(*rows)])


if __name__ == "__main__":
    print(tables(load([Path(name) for name in sys.argv[1:]])))
