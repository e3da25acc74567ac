#!/usr/bin/env python3
"""Draw the README's picture, docs/results/speedup.png, from the measurements in
docs/results/today.csv.

    python scripts/draw_readme.py
    python scripts/draw_readme.py --add rows.json --machine "2 x H100"

--add takes what bench_end_to_end.py and bench_prefill.py have written with --json. Each setting is
compared with the uncompressed rows of its own run, and stored with the day and the commit. It
replaces an older row of the same link, layout, mode, model, batch and codec.

Where README.md or docs/choosing.md has the two comments of ``BLOCK``, the picture's numbers are
written between them as a table.
"""

import argparse
import csv
import json
import math
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "results" / "today.csv"
PICTURE = FILE.with_name("speedup.png")
PAGES = (ROOT / "README.md", ROOT / "docs" / "choosing.md")
BLOCK = ("<!-- figures: begin -->\n", "<!-- figures: end -->\n")

# A row of the file: what was measured, milliseconds of both sides, and where it comes from.
KEY = ("link", "layout", "mode", "model", "batch", "codec")
"""Two rows that agree in these are the same measurement; the later one stays."""
TIMES = ("none", "none_least", "none_most", "ms", "least", "most")
"""Milliseconds of an iteration: uncompressed, then compressed; median, least and most."""
STAMP = ("memory", "machine", "date", "commit")
SPEEDS = ("speed", "low", "high")
"""How many times as fast as uncompressed; from the worst case to the best one."""
COLUMNS = (*KEY, *TIMES, *STAMP, *SPEEDS, "halves", "speed_over_halves")
"""All columns of the file. halves: milliseconds uncompressed in interleaved halves, in the same
run; empty: it was not measured there."""
SORTED_LINKS = ["nvlink", "pcie", "ethernet", "25gbit", "10gbit"]

# How the file calls what the benchmarks write.
MODELS = {
    "1.75b": "8 layers of 4096",
    "thin": "{} layers of 2048",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen3-30b-a3b": "4 layers of Qwen3-30B-A3B",
}
MODES = {"none": "eager", "full_iteration": "graphs", "local": "graphs of layers"}
IN_HALVES = " --tp-compression-overlap halves"
ONE_GPU_A_NODE = " MEGATRON_COMPRESSION_NODE_SIZE=1"


@dataclass(frozen=True)
class Bar:
    """A bar of the picture: the measurements of one situation, and what its user types."""

    label: str
    """What is slow."""
    flag: str
    """What to type."""
    links: tuple[str, ...]
    layout: str
    codecs: tuple[str, ...]
    """As in the file. Benchmarks that were told the codec of a recipe have it in place of the
    recipe."""
    color: str
    mode: str = ""
    """The mode that it is for; empty: any but prompts."""

    def speeds(self, rows: list[dict], column: str = "speed") -> list[float]:
        """Return the speed-ups of the file's rows in this situation, slowest first.

        Args:
            rows: the file's.
            column: of the speed-up; rows in which it is empty are left out.
        """
        return sorted(float(row[column]) for row in rows if self._covers(row) and row[column])

    def _covers(self, row: dict) -> bool:
        """Return whether a row of the file was measured in this situation."""
        if self.mode:
            is_mode = row["mode"] == self.mode
        else:
            # Without CUDA graphs and in them alike; prompts have a table of their own.
            is_mode = "prefill" not in row["mode"]
        is_layout = row["link"] in self.links and row["layout"] == self.layout
        return is_mode and is_layout and row["codec"] in self.codecs


ETHERNET = ("ethernet", "25gbit", "10gbit")
BARS = (
    Bar(
        label="NVLink, tensor parallel",
        flag="--tp-compression int8",
        links=("nvlink",),
        layout="TP 2",
        codecs=("int8",),
        color="grey",
    ),
    Bar(
        label="PCIe, tensor parallel",
        flag="--tp-compression int8",
        links=("pcie",),
        layout="TP 2",
        codecs=("int8",),
        color="teal",
    ),
    Bar(
        label="PCIe, tensor parallel, halves",
        flag="--tp-compression int8 --tp-compression-overlap halves",
        links=("pcie",),
        layout="TP 2",
        codecs=("int8, halves",),
        color="teal",
        mode="graphs",
    ),
    Bar(
        label="PCIe, experts",
        flag="--ep-compression experts-8bit",
        links=("pcie",),
        layout="EP 2",
        codecs=("experts-8bit", "int8"),
        color="teal",
    ),
    Bar(
        label="Ethernet, pipeline stages",
        flag="--pp-compression pipeline-6bit",
        links=ETHERNET,
        layout="PP 2",
        codecs=("pipeline-6bit",),
        color="chocolate",
    ),
    Bar(
        label="Ethernet, tensor parallel",
        flag="--tp-compression int8",
        links=ETHERNET,
        layout="TP 2",
        codecs=("int8",),
        color="chocolate",
    ),
    Bar(
        label="Ethernet, data parallel",
        flag="--dp-compression gradients-4bit",
        links=ETHERNET,
        layout="DP 2, one GPU a node",
        codecs=("sdp4bit",),
        color="chocolate",
    ),
)
CAPTION = (
    "Speed-up: iterations a second, uncompressed = 1.\n"
    "Dark: median of the measurements. Pale: from the slowest to the fastest of them.\n"
    "In brackets: how many there are (models, CUDA graphs or not, rates of the link)."
)


# From a benchmark's rows to the file's
# --------------------------------------------------------------------


def layout_of(row: dict) -> str:
    """Return the sizes above 1 of a benchmark's row, such as "TP 2, SP"."""
    sizes = {}
    for name, size in re.findall(r"--(\w+?)(?:-model)?-parallel-size (\d+)", row["flags"]):
        sizes[f"{name[0].upper()}P"] = int(size)  # of two equal flags the last one counts
    sizes["DP"] = row["ranks"] // math.prod(sizes.values())
    layout = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if "--sequence-parallel" in row["flags"]:
        layout.append("SP")
    if ONE_GPU_A_NODE in row["codec"]:
        layout.append("one GPU a node")
    return ", ".join(layout)


def model_of(row: dict) -> str:
    """Return the model of a benchmark's row; with flags that change a shape, what is left of it."""
    model = MODELS.get(row["shape"], f"GPT-{row['shape'].upper()}")
    # A shape has --num-layers once; a second one on the command line changes it.
    for part in ("layers", "experts"):
        numbers = re.findall(rf"--num-{part} (\d+)", row["flags"])
        if len(numbers) > 1:
            model = f"{numbers[-1]} {part} of {model}"
        else:
            model = model.format(*numbers)
    return model


def batch_of(row: dict) -> str:
    """Return the sequences of a micro-batch and their length, such as "4 x 2048"."""
    micro_batch = re.findall(r"--micro-batch-size (\d+)", row["flags"])[-1]
    length = row.get("tokens") or re.findall(r"--seq-length (\d+)", row["flags"])[-1]
    return f"{micro_batch} x {length}"


def mode_of(row: dict) -> str:
    """Return whether a benchmark's row was run eager or in graphs, and whether it was a prompt."""
    mode = MODES[row["graphs"]]
    if "tokens" in row:
        mode += ", prefill"
    return mode


def key_of(row: dict) -> dict[str, str]:
    """Return the columns ``KEY`` of a benchmark's row."""
    codec = row["codec"].replace(ONE_GPU_A_NODE, "")
    if IN_HALVES in codec:
        codec = f"{codec.replace(IN_HALVES, '')}, halves"
    else:
        codec = codec.removeprefix("none ")
    return {
        "link": row["regime"],
        "layout": layout_of(row),
        "mode": mode_of(row),
        "model": model_of(row),
        "batch": batch_of(row),
        "codec": codec.replace("--", ""),
    }


def run_of(row: dict) -> tuple[str, ...]:
    """Return what a row shares with the uncompressed rows that it is compared with."""
    key = key_of(row | {"codec": "none"})  # the uncompressed side has no nodes to count
    return (row.get("row", ""), *key.values())


def uncompressed_in_halves(rows: list[dict], run: tuple[str, ...]) -> str:
    """Return the milliseconds of a run's uncompressed rows in halves, as the file has them.

    Args:
        rows: what a benchmark has written.
        run: from ``run_of``.
    """
    halves = []
    for row in rows:
        if key_of(row)["codec"] == "none, halves" and run_of(row) == run:
            halves.append(row["milliseconds"])
    if not halves:
        return ""
    return f"{statistics.fmean(halves):.1f}"


def measured(rows: list[dict], **stamp: str) -> list[dict]:
    """Return a benchmark's rows as the file's: each compressed one against the mean of the
    uncompressed ones, and of those in halves.

    Args:
        rows: what the benchmark has written. Those without an uncompressed row are left out.
        stamp: further columns: machine, date and commit.
    """
    result = []
    for row in rows:
        if row["codec"] == "none":
            continue
        # Benchmarks measure "none" first and last, so that a drift of the machine counts half.
        run = run_of(row)
        baselines = [base for base in rows if base["codec"] == "none" and run_of(base) == run]
        if not baselines:
            continue
        times = {
            "none": statistics.fmean(baseline["milliseconds"] for baseline in baselines),
            "none_least": min(baseline["least"] for baseline in baselines),
            "none_most": max(baseline["most"] for baseline in baselines),
            "ms": row["milliseconds"],
            "least": row["least"],
            "most": row["most"],
        }
        memory = [f"{size / 1e9:.1f}" for size in row.get("peak_memory", {}).values()]
        result.append(
            {
                **key_of(row),
                **{name: f"{value:.1f}" for name, value in times.items()},
                "memory": ", ".join(memory),
                **stamp,
                "halves": uncompressed_in_halves(rows, run),
            }
        )
    return result


def merged(rows: list[dict]) -> list[dict]:
    """Return the file's rows in order, the last of those with one ``KEY``, with their speed-ups."""
    latest = {tuple(row[name] for name in KEY): row for row in rows}
    for row in latest.values():
        none, none_least, none_most, ms, least, most = (float(row[name]) for name in TIMES)
        row["speed"] = f"{none / ms:.2f}"
        # The worst and the best case: the slowest iteration of one side against the fastest of the
        # other.
        row["low"] = f"{none_least / most:.2f}"
        row["high"] = f"{none_most / least:.2f}"
        halves = row.get("halves", "")
        row["speed_over_halves"] = ""
        if halves:
            row["speed_over_halves"] = f"{float(halves) / ms:.2f}"

    def order(key: tuple[str, ...]) -> tuple:
        link = key[0]
        known = SORTED_LINKS.index(link) if link in SORTED_LINKS else len(SORTED_LINKS)
        return (known, *key)

    return [latest[key] for key in sorted(latest, key=order)]


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a file that a benchmark has written with --json.

    Raises:
        SystemExit: it is no such file.
    """
    try:
        rows = json.loads(path.read_text())
        for row in rows:
            run_of(row)
            for name in ("milliseconds", "least", "most"):
                float(row[name])
    except OSError as error:
        sys.exit(f"error: --add {path}: {error.strerror}")
    except (ValueError, RecursionError) as error:
        sys.exit(
            f"error: --add {path}: not JSON ({error}); give what a benchmark wrote with --json"
        )
    except (KeyError, TypeError, AttributeError, IndexError):
        sys.exit(
            f"error: --add {path}: not the rows of a benchmark; give what bench_end_to_end.py or "
            "bench_prefill.py wrote with --json"
        )
    return rows


# From the file to the pages
# -------------------------------------------------------------------------------


def figures(rows: list[dict]) -> str:
    """Return the picture's numbers as a markdown table."""
    lines = [
        "| what is slow | what you type | speed-up | slowest to fastest | against uncompressed halves "
        "| measurements |",
        "|---|---|---|---|---|---|",
    ]
    for bar in BARS:
        speeds = bar.speeds(rows)
        if speeds:
            median = f"{statistics.median(speeds):.2f}"
            extremes = f"{speeds[0]:.2f} to {speeds[-1]:.2f}"
            over_halves = bar.speeds(rows, "speed_over_halves")
            halves = "-"
            if over_halves:
                halves = f"{statistics.median(over_halves):.2f}"
            cells = [bar.label, f"`{bar.flag}`", median, extremes, halves, str(len(speeds))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_figures(text: str, rows: list[dict]) -> str:
    """Return a page with the table of ``figures`` in its block; a page without the block as it is."""
    begin, end = BLOCK
    if begin not in text:
        return text
    # What stands between the comments is written anew.
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{figures(rows)}{end}{after}"


def draw(rows: list[dict], path: Path) -> None:
    """Draw a picture with a bar for each of ``BARS`` that has measurements.

    Args:
        rows: measurements, as in the table of today's rows.
        path: the picture's file.
    """
    import matplotlib

    # No window: the picture goes into a file.
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.6))
    labels = []
    for bar in BARS:
        speeds = bar.speeds(rows)
        if speeds:
            draw_bar(axes, len(labels), bar, speeds)
            labels.append(f"{bar.label} ({len(speeds)})")  # how many measurements
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()  # the first bar is on top
    axes.axvline(1, color="black", linewidth=0.9)  # as fast as uncompressed
    axes.set_xlabel(CAPTION, loc="left", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.use_sticky_edges = False  # else bars that begin at 1 have no margin on the left
    axes.margins(x=0.08, y=0.02)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_bar(axes, position: int, bar: Bar, speeds: list[float]) -> None:
    """Draw one bar, which begins at 1: uncompressed.

    Args:
        axes: where to draw.
        position: of the bar, counted from the top.
        bar: its color.
        speeds: the speed-ups, slowest first.
    """
    median = statistics.median(speeds)
    # A run that is slower with compression has a bar to the left of 1.
    axes.barh(position, median - 1, left=1, color=bar.color, height=0.6)
    slowest = speeds[0]
    fastest = speeds[-1]
    axes.barh(position, fastest - slowest, left=slowest, color=bar.color, alpha=0.35, height=0.6)
    text_from = max(fastest, 1) + 0.03
    axes.text(text_from, position, f"{median:.1f}x", va="center", fontweight="bold")


def main() -> None:
    """Add rows if there are any, and write the file, the picture and the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="ROWS", help="JSON of a benchmark"
    )
    parser.add_argument("--machine", default="", help='where ROWS were measured, as "2 x H100"')
    options = parser.parse_args()
    with FILE.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.check_output(command, cwd=ROOT, text=True).strip()
    date = time.strftime("%Y-%m-%d")
    for path in options.add:
        rows += measured(read_rows(path), machine=options.machine, date=date, commit=commit)
    rows = merged(rows)
    with FILE.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, PICTURE)
    for page in PAGES:
        page.write_text(with_figures(page.read_text(), rows))


if __name__ == "__main__":
    main()
