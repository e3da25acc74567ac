#!/usr/bin/env python
"""Tables and plots of what ``errors`` measured.

python -m scripts.accuracy.error_tables results/errors.json --plots docs/accuracy
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.errors import BINS, RANGE

ORDER = ("initial", "early", "middle", "late")
QUANTITIES = ("error", "own_error", "common", "own_gain", "bias")


def rows_of(stage: dict) -> list[dict]:
    """The rows of a stage as dicts."""
    return [dict(zip(stage["columns"], row, strict=True)) for row in stage["rows"]]


def kind_of(row: dict) -> str:
    """What is encoded: hop 1 of a sum, hop 2 of it, or a gathered slice."""
    return "gathered slice" if row["site"].endswith("gather") else f"sum, hop {row['hop']}"


def in_order(stages: Sequence[str]) -> list[str]:
    """Stages from the start of training on."""
    return sorted(stages, key=lambda name: (ORDER.index(name.split("-")[0]), name))


def codec_table(stage: dict) -> list[str]:
    """Median over the sites by direction, kind and codec."""
    groups = defaultdict(list)
    for row in rows_of(stage):
        groups[row["direction"], kind_of(row), row["codec"]].append(row)
    lines = [
        "| direction | what | codec | error, % | of the own part, % | common | own gain, % | bias |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (direction, kind, codec), rows in sorted(groups.items(), key=lambda item: item[0][:2]):
        error, own, common, gain, bias = (statistics.median(row[q] for row in rows) for q in QUANTITIES)
        lines.append(
            f"| {direction} | {kind} | {codec} | {100 * error:.2f} | {100 * own:.2f} | {common:.1f} | "
            f"{100 * gain:+.3f} | {bias:.2f} |"
        )
    return lines


def signal_table(stages: dict[str, dict]) -> list[str]:
    """Share of the mean over the tokens in the signal's energy, median and largest over the sites."""
    lines = ["| stage | direction | what | shared, median % | shared, largest % | at | kurtosis, median |"]
    lines.append("|" + "---|" * 7)
    for name in in_order(list(stages)):
        groups = defaultdict(list)
        for row in stages[name]["signals"]:
            groups[row["direction"], row["site"].split()[-1]].append(row)
        for (direction, what), rows in sorted(groups.items()):
            top = max(rows, key=lambda row: row["shared"])
            median, kurtosis = (statistics.median(r[q] for r in rows) for q in ("shared", "kurtosis"))
            lines.append(
                f"| {name} | {direction} | {what} | {100 * median:.1f} | {100 * top['shared']:.1f} | "
                f"{top['site']} | {kurtosis:.1f} |"
            )
    return lines


def plots(stages: dict[str, dict], folder: Path) -> list[Path]:
    """Shared share and error by layer, and the distributions that were kept, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6))
    for name in in_order(list(stages)):
        for ax, (direction, site) in zip(
            axes, (("forward", "fc2 reduce"), ("backward", "fc1 reduce")), strict=True
        ):
            rows = [r for r in stages[name]["signals"] if r["direction"] == direction]
            rows = [r for r in rows if r["site"].endswith(f" {site}")]
            points = sorted((int(r["site"].split()[0]), 100 * r["shared"]) for r in rows)
            ax.plot(*zip(*points, strict=True), "o-", label=name)
            ax.set_title(f"{direction}, {site}")
            ax.set_xlabel("layer")
    axes[0].set_ylabel("mean over tokens, % of the energy")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    written.append(folder / "shared.png")
    figure.savefig(written[-1], dpi=110)
    pyplot.close(figure)

    last = in_order(list(stages))[-1]
    kept = [row for row in stages[last]["signals"] if "histograms" in row]
    if kept:
        columns = 3
        lines = -(-len(kept) // columns)
        figure, grid = pyplot.subplots(lines, columns, figsize=(11, 2.6 * lines), squeeze=False)
        middle = [-RANGE + (i + 0.5) * 2 * RANGE / BINS for i in range(BINS)]
        for ax, row in zip(grid.flat, kept, strict=False):
            for part, counts in row["histograms"].items():
                ax.semilogy(middle, [max(c, 0.5) / sum(counts) for c in counts], label=part)
            ax.set_title(f"{row['direction']} {row['site']}", fontsize=8)
        grid[0, 0].legend(fontsize=7)
        figure.supxlabel(f"value / rms ({last}; the outermost bins are open)", fontsize=8)
        figure.tight_layout()
        written.append(folder / "distributions.png")
        figure.savefig(written[-1], dpi=110)
        pyplot.close(figure)
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("errors", type=Path, help="what scripts.accuracy.errors wrote")
    parser.add_argument("--plots", type=Path, help="folder for PNG plots")
    args = parser.parse_args(argv)
    stages = json.loads(args.errors.read_text())
    for name in in_order(list(stages)):
        print(f"### Errors, {name}\n", *codec_table(stages[name]), "", sep="\n")
    print("### Signals\n", *signal_table(stages), sep="\n")
    if args.plots:
        for path in plots(stages, args.plots):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
