#!/usr/bin/env python
"""Tables and plots of the runs: means, paired differences to uncompressed and their standard errors.

    python -m scripts.accuracy.summarise results/*.jsonl --plots docs/accuracy

Pairs share the weights that they start from and the order of the data. Runs from scratch are paired by seed,
branches by checkpoint and data order. Differences are in per cent of the uncompressed run's loss.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.accuracy.settings import bits_a_value

BASE = "none"


class Estimate(NamedTuple):
    """Mean of independent values, its standard error (NaN for one value) and their number."""

    mean: float
    error: float
    count: int

    def __str__(self) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.3f}"
        return f"{self.mean:+.3f}{error}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error s / sqrt(n), s with n - 1."""
    n = len(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(statistics.fmean(values), error, n)


def load(paths: Sequence[Path]) -> list[dict]:
    """The records of results files, each job once."""
    records = {}
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            records[record["id"]] = record
    return list(records.values())


def pair_key(record: dict) -> tuple:
    """What two runs have in common that can be compared: start, data, length."""
    return record["kind"], record.get("start"), record["seed"], record["steps"], record["size"]


def training_loss(record: dict) -> float:
    """Mean training loss over the last half of a branch, the last tenth of a run from scratch."""
    losses = record["losses"]
    tail = len(losses) // 2 if record["kind"] == "branch" else max(1, len(losses) // 10)
    return statistics.fmean(losses[-tail:])


MEASURES = {"valid": lambda record: record["valid"], "train": training_loss}


def differences(records: list[dict], kind: str, measure: str) -> dict[str, dict[tuple, float]]:
    """Per cent above the uncompressed partner, by setting and pair."""
    value, base = MEASURES[measure], {}
    chosen = [record for record in records if record["kind"] == kind]
    for record in chosen:
        if record["setting"]["name"] == BASE:
            base[pair_key(record)] = value(record)
    found: dict[str, dict[tuple, float]] = defaultdict(dict)
    for record in chosen:
        key = pair_key(record)
        if record["setting"]["name"] != BASE and key in base:
            found[record["setting"]["name"]][key] = 100 * (value(record) / base[key] - 1)
    return dict(found)


def bits_of(setting: dict) -> float:
    """Mean bits a value over the four hops."""
    hops = ("forward1", "forward2", "backward1", "backward2")
    return statistics.fmean(bits_a_value(setting[hop]) for hop in hops)


def repeats(records: list[dict]) -> list[str]:
    """Whether runs done twice ended in the same weights."""
    by_id, lines = {record["id"]: record for record in records}, []
    for record in records:
        if record["kind"] == "repeat" and (first := by_id.get(record["id"].removesuffix("/again"))):
            same = record["weights_sha256"] == first["weights_sha256"]
            lines.append(
                f"- {first['id']} twice: {'bitwise the same' if same else 'not the same weights'}, "
                f"validation losses {first['valid']:.6f} and {record['valid']:.6f}"
            )
    return lines


def scratch_table(records: list[dict], kind: str = "scratch") -> list[str]:
    """Runs from scratch, simulated or (``kind`` true) with real ranks."""
    groups = defaultdict(list)
    for record in records:
        if record["kind"] == kind:
            groups[record["setting"]["name"]].append(record)
    if not groups:
        return []
    valid, train = (differences(records, kind, measure) for measure in MEASURES)
    lines = [
        "| setting | bits a value | validation loss, by seed | against uncompressed, % | training loss, % |",
        "|---|---|---|---|---|",
    ]
    for name, runs in groups.items():
        runs.sort(key=lambda record: record["seed"])
        losses = ", ".join(f"{record['valid']:.4f}" for record in runs)
        pair = [estimate(list(d[name].values())) if name in d else "" for d in (valid, train)]
        lines.append(f"| {name} | {bits_of(runs[0]['setting']):.2f} | {losses} | {pair[0]} | {pair[1]} |")
    return lines


def branch_table(records: list[dict]) -> list[str]:
    """Branches, in all and by the checkpoint that they start from."""
    valid, train = (differences(records, "branch", measure) for measure in MEASURES)
    if not valid:
        return []
    stages = list(dict.fromkeys(key[1].split("-")[0] for pairs in valid.values() for key in pairs))
    settings = {record["setting"]["name"]: record["setting"] for record in records}
    lines = [
        "| setting | bits a value | pairs | validation, % | training, % | "
        + " | ".join(f"{stage}, %" for stage in stages)
        + " |",
        "|" + "---|" * (5 + len(stages)),
    ]
    for name, pairs in valid.items():
        whole, trained = estimate(list(pairs.values())), estimate(list(train[name].values()))
        by_stage = []
        for stage in stages:
            values = [value for key, value in pairs.items() if key[1].split("-")[0] == stage]
            by_stage.append(str(estimate(values)) if values else "")
        bits = bits_of(settings[name])
        lines.append(
            f"| {name} | {bits:.2f} | {whole.count} | {whole} | {trained} | {' | '.join(by_stage)} |"
        )
    return lines


def tables(records: list[dict]) -> str:
    """Everything as Markdown."""
    parts = []
    if lines := scratch_table(records):
        parts += ["### From scratch", "", *lines, ""]
    if lines := scratch_table(records, "true"):
        parts += ["### With real tensor-parallel ranks", "", *lines, ""]
    if lines := branch_table(records):
        parts += ["### Branches from common checkpoints", "", *lines, ""]
    if lines := repeats(records):
        parts += ["### The same run twice", "", *lines, ""]
    return "\n".join(parts)


def plots(records: list[dict], folder: Path) -> list[Path]:
    """Differences by setting, and the curves of the runs from scratch, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in ("scratch", "branch"):
        found = differences(records, kind, "valid")
        if not found:
            continue
        names = sorted(found, key=lambda name: estimate(list(found[name].values())).mean)
        figure, axes = pyplot.subplots(figsize=(7, 1 + 0.25 * len(names)))
        for y, name in enumerate(names):
            values = list(found[name].values())
            mean, error, _ = estimate(values)
            axes.plot(values, [y] * len(values), ".", color="tab:blue", alpha=0.4)
            axes.errorbar(mean, y, xerr=None if math.isnan(error) else error, fmt="ko", capsize=3)
        axes.set_yticks(range(len(names)), names)
        axes.axvline(0, color="gray", linewidth=0.8)
        axes.set_xlabel("validation loss against uncompressed, % (mean ± standard error)")
        figure.tight_layout()
        written.append(folder / f"{kind}.png")
        figure.savefig(written[-1], dpi=110)
        pyplot.close(figure)
    runs = [record for record in records if record["kind"] == "scratch" and record["seed"] == 0]
    base = next((record for record in runs if record["setting"]["name"] == BASE), None)
    if base:
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for record in runs:
            if record is not base and len(record["losses"]) == len(base["losses"]):
                ratio = [100 * (a / b - 1) for a, b in zip(record["losses"], base["losses"], strict=True)]
                width = max(1, len(ratio) // 40)
                smooth = [statistics.fmean(ratio[i : i + width]) for i in range(0, len(ratio), width)]
                axes.plot(range(0, len(ratio), width), smooth, label=record["setting"]["name"])
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss against uncompressed, %")
        axes.legend(fontsize=7)
        figure.tight_layout()
        written.append(folder / "curves.png")
        figure.savefig(written[-1], dpi=110)
        pyplot.close(figure)
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--plots", type=Path, help="folder for PNG plots")
    args = parser.parse_args(argv)
    records = load(args.results)
    print(tables(records))
    if args.plots:
        for path in plots(records, args.plots):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
