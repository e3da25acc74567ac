#!/usr/bin/env python3
"""Draw the README's picture, docs/results/speedup.png, from docs/results/speedup.csv.

    python scripts/draw_readme.py

A row is a model, a layout, a codec and a link, with the range of its speed-ups over runs: the time of every
uncompressed block over that of the codec in the same run. Bars begin at 1, so slow-downs point to the left.
"""

import csv
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
COLOURS = {"NVLink": "#7a7a7a", "Host memory (as PCIe)": "#2a6f97", "TCP (3 GB/s)": "#b5542c"}
PALE = 0.4


def read(path: Path) -> list[dict[str, str]]:
    """The rows, in the order in which they are drawn; those of a link stand together."""
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """One horizontal bar a row: solid to the end of the range that is nearer to 1, pale to the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(9, 0.31 * len(rows) + 1.4))
    places, place, link = [], 0.0, ""
    for row in rows:
        place += 1
        if row["link"] != link:
            link, place = row["link"], place + 1
            heading = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            axes.text(-0.012, 1 - place, link, fontsize=10, weight="bold", color=COLOURS[link], **heading)
        places.append(-place)
        low, high = float(row["low"]), float(row["high"])
        near = 1.0 if low <= 1 <= high else low if low > 1 else high
        axes.barh(-place, near - 1, left=1, color=COLOURS[link], height=0.7)
        axes.barh(-place, high - low, left=low, color=COLOURS[link], alpha=PALE, height=0.7)
        text = " - ".join(dict.fromkeys((row["low"], row["high"])))
        axes.text(max(high, 1) + 0.015, -place, text, va="center", fontsize=9)
    axes.set_yticks(places, [f"{row['model']}, {row['layout']}: {row['codec']}" for row in rows], fontsize=9)
    axes.axvline(1, color="black", linewidth=0.9)
    axes.set_xlim(0.55, 2.4)
    axes.set_xlabel("iterations a second, uncompressed = 1; H200 (graphs: H100), November 2026")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.text(0.985, -0.2, "slower", ha="right", fontsize=9, style="italic")
    axes.text(1.015, -0.2, "faster", ha="left", fontsize=9, style="italic")
    links = [Patch(color=colour, label=link) for link, colour in COLOURS.items()]
    links.append(Patch(color="black", alpha=PALE, label="range of runs"))
    axes.legend(handles=links, loc="upper right", frameon=False, fontsize=9)
    axes.set_ylim(-place - 0.7, 0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(read(RESULTS / "speedup.csv"), RESULTS / "speedup.png")
