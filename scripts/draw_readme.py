#!/usr/bin/env python3
"""Draw docs/results/speedup.png from docs/results/today.csv, and fill in README and choosing.md.

    python scripts/draw_readme.py
    python scripts/draw_readme.py --add rows.json --machine "2 x H100"

--add stores what bench_end_to_end.py and bench_prefill.py wrote with --json: each setting against the
uncompressed ones of its own run, with the day and the commit. It replaces an older row of the same link,
layout, mode, model, batch and codec. A page asks by <!--=link;layout;mode;codec;model-->...<!---->,
where an empty part is any and / is or.
"""

import argparse
import csv
import json
import math
import re
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "results" / "today.csv"
PAGES = (ROOT / "README.md", ROOT / "docs" / "choosing.md")
LINKS = {
    "nvlink": "grey",
    "pcie": "teal",
    "ethernet": "chocolate",
    "25gbit": "olive",
    "10gbit": "green",
}
MODELS = {"1.75b": "8 layers of 4096", "thin": "{} layers of 2048", "qwen2.5-7b": "Qwen2.5-7B"}
MODELS["qwen3-30b-a3b"] = "4 layers of Qwen3-30B-A3B"
MODES = {"none": "eager", "full_iteration": "graphs", "local": "graphs of layers"}
NODE = " MEGATRON_COMPRESSION_NODE_SIZE=1"
KEY = ("link", "layout", "mode", "model", "batch", "codec")
TIMES = ("none", "none_least", "none_most", "ms", "least", "most")
DRAWN = ("pipeline-6bit", "experts-8bit", "sdp4bit", "int8", "taco", "compression auto")
"""The picture has the first of these that was measured, for each link, layout, mode, model and batch."""


def place(row: dict) -> tuple[str, ...]:
    """A benchmark's row: the name of its run, and KEY but for the codec. Of its flags the last ones count."""
    flags, mode = row["flags"], MODES[row["graphs"]] + ", prefill" * ("tokens" in row)
    found = re.findall(r"--(\w+?)(?:-model)?-parallel-size (\d+)", flags)
    sizes = {f"{name[0].upper()}P": int(number) for name, number in found}
    sizes["DP"] = row["ranks"] // math.prod(sizes.values())
    layout = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    layout += ["SP"] * ("--sequence-parallel" in flags)
    model = MODELS.get(row["shape"], f"GPT-{row['shape'].upper()}")
    for what in ("layers", "experts"):
        numbers = re.findall(rf"--num-{what} (\d+)", flags)
        model = f"{numbers[-1]} {what} of {model}" if len(numbers) > 1 else model.format(*numbers)
    micro, length = (
        re.findall(rf"--{name} (\d+)", flags)[-1] for name in ("micro-batch-size", "seq-length")
    )
    batch = f"{micro} x {row.get('tokens', length)}"
    return row.get("row", ""), row["regime"], ", ".join(layout), mode, model, batch


def measured(rows: list[dict], **stamp: str) -> list[dict]:
    """A benchmark's rows as the file's: each compressed setting against the uncompressed ones of its run."""
    result = []
    for row in rows:
        none = [one for one in rows if one["codec"] == "none" and place(one) == place(row)]
        if row in none or not none:
            continue
        codec = row["codec"].replace(NODE, "").removeprefix("none ").replace("--", "")
        base = sum(one["milliseconds"] for one in none) / len(none)
        times = base, min(one["least"] for one in none), max(one["most"] for one in none)
        times += row["milliseconds"], row["least"], row["most"]
        cells = dict(
            zip((*KEY, *TIMES), (*place(row)[1:], codec, *map("{:.1f}".format, times)), strict=True)
        )
        cells["layout"] += ", one GPU a node" * (NODE in row["codec"])
        cells["memory"] = ", ".join(
            f"{size / 1e9:.1f}" for size in row.get("peak_memory", {}).values()
        )
        result.append(cells | stamp)
    return result


def merged(rows: list[dict]) -> list[dict]:
    """In order, the last of those with one KEY, with speed-ups: by medians and by extremes."""
    last = {tuple(row[name] for name in KEY): row for row in rows}
    for row in last.values():
        none, none_least, none_most, ms, least, most = (float(row[name]) for name in TIMES)
        speeds = {"speed": none / ms, "low": none_least / most, "high": none_most / least}
        row |= {name: f"{value:.2f}" for name, value in speeds.items()}
    return [
        last[key] for key in sorted(last, key=lambda key: ([*LINKS, key[0]].index(key[0]), *key))
    ]


def filled(text: str, rows: list[dict]) -> str:
    """A page with the speed-ups that it asks for."""

    def answer(found: re.Match) -> str:
        parts = (part.split("/") for part in found[2].split(";"))
        asked = [*zip(("link", "layout", "mode", "codec", "model"), parts, strict=False)]
        chosen = [row for row in rows if all(row[name] in of for name, of in asked if of != [""])]
        speeds = sorted((row["speed"] for row in chosen), key=float)
        ends = dict.fromkeys((speeds or ["not measured"])[:: max(1, len(speeds) - 1)])
        return f"{found[1]}{' - '.join(ends)}<!---->"

    return re.sub(r"(<!--=(.*?)-->)[^<]*<!---->", answer, text)


def draw(rows: list[dict], path: Path) -> None:
    """One horizontal bar a link, layout and mode: solid from 1 to its models' speed-ups, pale: ranges."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars: dict[tuple, dict[tuple, dict]] = {}
    for row in reversed(rows):
        if row["codec"] in DRAWN and "SP" not in row["layout"]:
            where, model = [tuple(row[name] for name in part) for part in (KEY[:3], KEY[3:5])]
            other = bars.setdefault(where, {}).setdefault(model, row)
            bars[where][model] = min(row, other, key=lambda one: DRAWN.index(one["codec"]))
    figure, axes = plt.subplots(figsize=(9, 0.31 * len(bars) + 1.2))
    names = []
    for place, (where, models) in enumerate(bars.items()):
        speed, lows, highs = (
            [float(row[name]) for row in models.values()] for name in ("speed", "low", "high")
        )
        least, most, low, high = min(speed), max(speed), min(lows), max(highs)
        begin, how = min(least, 1), {"color": LINKS.get(where[0], "black"), "height": 0.7}
        axes.barh(place, max(most, 1) - begin, left=begin, **how)
        axes.barh(place, high - low, left=low, alpha=0.4, **how)
        text = f"{least:.2f}" + f" - {most:.2f}" * (most > least)
        axes.text(max(high, 1) + 0.015, place, text, va="center", fontsize=9)
        codecs = "/".join(dict.fromkeys(row["codec"] for row in models.values()))
        names.append(f"{', '.join(where)} ({len(models)}): {codecs}")
    axes.set_yticks(range(len(bars)), names, fontsize=9)
    axes.axvline(1, color="black", linewidth=0.9)
    axes.set_xlabel("iterations a second, uncompressed = 1; pale: range; in brackets: runs")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.use_sticky_edges = False
    axes.margins(x=0.08, y=0.01)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="rows of benchmarks")
    parser.add_argument("--machine", default="", help="where they were measured")
    given = parser.parse_args()
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
    ).strip()
    stamp = {"machine": given.machine, "date": time.strftime("%Y-%m-%d"), "commit": commit}
    with FILE.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    added = [row for path in given.add for row in measured(json.loads(path.read_text()), **stamp)]
    rows = merged(rows + added)
    with FILE.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for page in PAGES:
        page.write_text(filled(page.read_text(), rows))
    draw(rows, FILE.with_name("speedup.png"))
