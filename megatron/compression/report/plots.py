"""A report's pictures. Matplotlib is needed only here, and a run without it does without them."""

import re
from pathlib import Path

from megatron.compression.communication.ledger import DIMENSIONS
from megatron.compression.report.log_line import MB, dimension_total
from megatron.compression.report.summary import evaluations, loss_of, mean_bytes, training_rows


def draw_report(report: dict, directory: Path) -> tuple[list[str], str | None]:
    """Draw loss.png, time.png, bytes.png and error.png, as far as there is something to draw.

    Returns: The files written, and why there is none.
    """
    pictures = {"loss.png": _losses, "time.png": _times, "bytes.png": _bytes, "error.png": _errors}
    return _draw(pictures, report, directory, None)


def draw_comparison(baseline: dict, run: dict, directory: Path) -> tuple[list[str], str | None]:
    """Draw loss.png and time.png of two runs. Arguments and result as ``draw_report``'s."""
    return _draw({"loss.png": _losses, "time.png": _times}, run, directory, baseline)


def _draw(
    pictures: dict, report: dict, directory: Path, baseline: dict | None
) -> tuple[list[str], str | None]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [], "matplotlib is not installed, so nothing is drawn; pip install matplotlib"
    written = []
    for name, draw in pictures.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        if draw(report, axes, baseline):
            figure.savefig(directory / name, dpi=120)
            written.append(name)
    return written, None if written else "nothing was logged"


def _both(report: dict, baseline: dict | None) -> list[tuple[str, dict, dict]]:
    """(what to add to a label, style, report) of the baseline, if any, and the run."""
    run = {"color": "C0", "linewidth": 1.2, "markersize": 3}
    if baseline is None:
        return [("", run, report)]
    # Wider and below: equal curves are both seen.
    wide = {"color": "0.75", "linewidth": 5, "markersize": 8}
    return [(", baseline", wide, baseline), (", this run", run, report)]


def _losses(report: dict, axes, baseline: dict | None) -> bool:
    for suffix, line, one in _both(report, baseline):
        for label, rows, style in (
            ("training", training_rows(one), "-"),
            ("validation", evaluations(one, "valid"), "o--"),
        ):
            if points := [(row["iteration"], loss_of(row)) for row in rows if row["losses"]]:
                axes.plot(*zip(*points, strict=True), style, **line, label=label + suffix)
    axes.set(xlabel="iteration", ylabel="loss")
    return _legend(axes)


def _times(report: dict, axes, baseline: dict | None) -> bool:
    medians = []
    for suffix, line, one in _both(report, baseline):
        rows = [row for row in training_rows(one) if "milliseconds_per_iteration" in row]
        if rows:
            medians.append(one["summary"]["milliseconds_per_iteration"])
            times = [row["milliseconds_per_iteration"] for row in rows]
            label = f"median {medians[-1]:.1f} ms{suffix}"
            axes.plot([row["iteration"] for row in rows], times, **line, label=label)
    if medians:
        axes.set_ylim(0, 2 * max(medians))  # the first iterations take many times as long
    axes.set(xlabel="iteration", ylabel="ms an iteration, mean of a log interval")
    return _legend(axes)


def _bytes(report: dict, axes, baseline: dict | None) -> bool:
    """Two bars a dimension, without compression and sent; what is sent by whether a codec made it."""
    means, summary = mean_bytes(training_rows(report)), report["summary"]["dimensions"]
    names = [name for name in DIMENSIONS if name in summary]
    for place, name in enumerate(names):
        of_codecs = {
            traffic: {"c": kinds["compressed"]} for traffic, kinds in means.items() if "compressed" in kinds
        }
        payload, _ = dimension_total(of_codecs, DIMENSIONS[name])
        sent, plain = summary[name]["sent"], summary[name]["uncompressed"]
        for shift, height, bottom, color, label in (
            (-0.2, plain, 0, "C7", "without compression"),
            (0.2, payload, 0, "C0", "sent: compressed"),
            (0.2, sent - payload, payload, "C1", "sent: uncompressed"),
        ):
            named = None if place else label
            axes.bar(place + shift, height / MB, 0.38, bottom=bottom / MB, color=color, label=named)
        fewer = f"{plain / sent:.2f}x fewer" if sent < plain else ""
        axes.annotate(fewer, (place + 0.2, sent / MB), ha="center", va="bottom")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="MB sent by one GPU in one iteration")
    if names:
        axes.legend()
    return bool(names)


def _errors(report: dict, axes, baseline: dict | None) -> bool:
    """Error by place in the model: embedding, layers, output layer, then pipeline stages."""
    places = {_place(row["site"]) for row in report["errors"]}
    order = {place: number for number, place in enumerate(sorted(places))}
    series: dict[str, list[tuple[int, float]]] = {}
    for row in report["errors"]:
        label = f"{_short(row['site'])} {row['traffic']}"
        series.setdefault(label, []).append((order[_place(row["site"])], row["relative_error"]))
    for label, points in sorted(series.items()):
        axes.plot(*zip(*sorted(points), strict=True), "o-", markersize=4, label=label)
    every = -(-len(order) // 16)  # more ticks cannot be read
    shown = [place for place in order if place[0] != 1 or place[1] % every == 0]
    axes.set_xticks([order[place] for place in shown], [place[2] for place in shown], rotation=45, ha="right")
    axes.set(xlabel="layer", ylabel="relative L2 error")
    axes.set_ylim(bottom=0)
    return _legend(axes)


def _place(site: str) -> tuple[int, int, str]:
    """Where a site stands from left to right, and its tick: ``decoder.layers.3.mlp...`` -> (1, 3, "3")."""
    if layer := re.search(r"layers\.(\d+)", site):
        return 1, int(layer[1]), layer[1]
    if site.startswith("embedding"):
        return 0, 0, "embedding"
    if site.startswith("output_layer"):
        return 2, 0, "output"
    number = re.search(r"\d+", site)
    return 3, int(number[0]) if number else 0, site.removeprefix("pipeline ")


def _short(site: str) -> str:
    """``decoder.layers.3.mlp.linear_fc2`` -> ``linear_fc2``, ``pipeline stage 1`` -> ``pipeline stage``."""
    return re.sub(r" \d+$", "", site.rsplit(".", 1)[-1])


def _legend(axes) -> bool:
    if axes.lines:
        axes.legend(fontsize="small")
    return bool(axes.lines)
