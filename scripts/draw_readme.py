#!/usr/bin/env python3
"""Draw the README's picture, docs/results/speedup.png, from the ranges in docs/results/speedup.csv.

    python scripts/draw_readme.py

A bar ends at a row's lowest measured speed-up and is lighter up to its highest.
"""

import csv
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
COLOURS = {"NVLink": "#7a7a7a", "host memory (as PCIe)": "#2a6f97", "TCP (3 GB/s)": "#b5542c"}


def read(path: Path) -> list[dict[str, str]]:
    """The rows of the table; every row has a link, a run and the range of its speed-ups."""
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """One horizontal bar a row, grouped by link, best links first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.28 * len(rows) + 1.1))
    places, place, link = [], 0.0, rows[0]["link"]
    for row in rows:
        place += 1.6 if row["link"] != link else 1
        link = row["link"]
        places.append(-place)
        low, high = float(row["low"]), float(row["high"])
        axes.barh(-place, low, color=COLOURS[link], label=link)
        axes.barh(-place, high - low, left=low, color=COLOURS[link], alpha=0.45)
        text = " - ".join(dict.fromkeys((row["low"], row["high"])))
        axes.text(high + 0.03, -place, text, va="center", fontsize=9)
    axes.set_yticks(places, [row["run"] for row in rows], fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 3.7)
    axes.set_xlabel("iterations a second, as times uncompressed (four or two H200 of one host)")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    one_each = dict(zip(labels, handles, strict=True))
    axes.legend(one_each.values(), one_each.keys(), loc="upper right", frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(read(RESULTS / "speedup.csv"), RESULTS / "speedup.png")
