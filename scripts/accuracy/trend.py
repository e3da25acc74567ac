#!/usr/bin/env python
"""What codecs cost against the size of the model: a table and a figure of the records of several runs.

    for size in 30m 60m 111m 210m; do
        python -m scripts.accuracy.run --work-dir W/$size --size $size --seeds 2 --minutes 60 \\
            --settings int8 tensor-6bit taco:outliers=off sdp4bit-dp pipeline-6bit-pp
    done
    python -m scripts.accuracy.trend W/*/results-*.jsonl --figure trend.png

The models of 30 to 210 M parameters have seen equally many tokens for each parameter. Settings are
compared with the uncompressed run of their size and seed, in the last quarter of the training.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.compression.report.render import table
from scripts.accuracy.results import differences, estimate, load
from scripts.accuracy.run import WIDTHS, parameters_of


def by_size(records: Sequence[dict]) -> dict[str, dict[str, list[float]]]:
    """Return per cent of validation loss above uncompressed: by setting, then by size, of all seeds.

    Args:
        records: of runs of the sizes of WIDTHS; others are left out.
    """
    costs: dict[str, dict[str, list[float]]] = {}
    for size in WIDTHS:
        of_size = [record for record in records if record["size"] == size]
        for name, by_seed in differences(of_size).items():
            costs.setdefault(name, {})[size] = list(by_seed.values())
    return costs


def table_of(costs: dict[str, dict[str, list[float]]]) -> str:
    """Return markdown: a row for each setting, a column for each size that has been run."""
    sizes = [size for size in WIDTHS if any(size in of_setting for of_setting in costs.values())]
    header = ["setting"]
    header += [f"{parameters_of(size) / 1e6:.0f} M" for size in sizes]
    rows = [header]
    for name, of_setting in costs.items():
        row = [name]
        for size in sizes:
            row.append(estimate(of_setting[size])[0] if size in of_setting else "")
        rows.append(row)
    return "\n".join(table(*rows))


def draw(costs: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw each setting's mean cost against the number of parameters, with a mark for each seed.

    Args:
        costs: of ``by_size``.
        path: the picture's file.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, of_setting in costs.items():
        millions = [parameters_of(size) / 1e6 for size in of_setting]
        means = [sum(values) / len(values) for values in of_setting.values()]
        (line,) = axes.plot(millions, means, label=name)
        for count, values in zip(millions, of_setting.values(), strict=True):
            axes.plot([count] * len(values), values, "o", markersize=4, color=line.get_color())
    axes.set_xscale("log")
    axes.set_xlabel("parameters, millions")
    axes.set_ylabel("% of validation loss above uncompressed")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and draw the figure where one is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="+", help="results-*.jsonl of the runs")
    parser.add_argument("--figure", type=Path, help="a picture to draw")
    args = parser.parse_args(argv)
    costs = by_size(load_all(args.records))
    print(table_of(costs))
    if args.figure is not None:
        draw(costs, args.figure)


def load_all(paths: Sequence[Path]) -> list[dict]:
    """Return the records of all files; runs of several sizes have the same names in theirs."""
    return [record for path in paths for record in load([path])]


if __name__ == "__main__":
    main(sys.argv[1:])
