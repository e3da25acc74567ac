"""Plots of the runs as PNG."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.estimates import BASE, differences, pooled
from scripts.accuracy.records import curve_of

_COLOURS = {"early": "tab:orange", "middle": "tab:green", "late": "tab:purple", "": "tab:blue"}
_TICKS = (-10, -3, -1, -0.3, 0, 0.3, 1, 3, 10, 30, 100)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _write(figure, axes, way: str, points: Sequence[float], path: Path) -> Path:
    """The scale of x or y is linear up to 1 % and logarithmic beyond, where a point is beyond 3 %."""
    if max(points, default=0) > 3:
        getattr(axes, f"set_{way}scale")("symlog", linthresh=1.0)
        axis = getattr(axes, f"{way}axis")
        inside = [tick for tick in _TICKS if min([*points, -0.3]) <= tick <= max(points)]
        axis.set_ticks(inside, [f"{tick:g}" for tick in inside])
        axis.set_ticks([], minor=True)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    _pyplot().close(figure)
    return path


def differences_plot(records: Sequence[dict], kind: str, path: Path) -> Path | None:
    """Every pair of every setting, with the mean and its 95 % interval; None if there is nothing to show."""
    found, summary = differences(records, kind), pooled(records, kind)
    if not found:
        return None
    names = sorted(summary, key=lambda name: -summary[name].mean)
    figure, axes = _pyplot().subplots(figsize=(7, 1.2 + 0.24 * len(names)))
    labelled: set[str] = set()
    for y, name in enumerate(names):
        for block, value in found[name].items():
            label = block.stage if block.stage not in labelled else None
            labelled.add(block.stage)
            axes.plot(value, y, ".", color=_COLOURS[block.stage], alpha=0.6, label=label)
        mean, (low, high) = summary[name].mean, summary[name].interval
        whole = math.isfinite(high - low)
        axes.errorbar(mean, y, xerr=(high - low) / 2 if whole else None, fmt="kD", markersize=3, capsize=2)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.axvspan(-0.3, 0.3, color="gray", alpha=0.12)
    axes.set_xlabel("validation loss against uncompressed, % (mean, 95 % interval; grey: ±0.3 %)", fontsize=8)
    if labelled - {""}:
        axes.legend(fontsize=7)
    points = [value for pairs in found.values() for value in pairs.values() if math.isfinite(value)]
    return _write(figure, axes, "x", points, path)


def curves_plot(records: Sequence[dict], path: Path) -> Path | None:
    """Training loss of the runs from scratch against the uncompressed ones of their seeds, over the steps."""
    runs = [record for record in records if record["kind"] == "scratch"]
    base = {record["seed"]: record for record in runs if record["setting"]["name"] == BASE}
    ratios: dict[str, list[list[float]]] = {}
    for record in runs:
        if record["seed"] in base and record["setting"]["name"] != BASE:
            pair = zip(curve_of(record), curve_of(base[record["seed"]]), strict=False)
            ratios.setdefault(record["setting"]["name"], []).append([100 * (a / b - 1) for a, b in pair])
    if not ratios:
        return None
    figure, axes = _pyplot().subplots(figsize=(9, 4.2))
    points: list[float] = []
    for i, (name, curves) in enumerate(ratios.items()):
        mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        points += [value for value in mean if math.isfinite(value)]
        steps = [(k + 0.5) * runs[0]["steps"] / len(mean) for k in range(len(mean))]
        style, label = "-" if i < 10 else "--", f"{name} ({len(curves)})"
        axes.plot(steps, mean, style, color=f"C{i % 10}", linewidth=1, label=label)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss against uncompressed, %")
    axes.legend(fontsize=8, title="setting (seeds)", loc="center left", bbox_to_anchor=(1, 0.5))
    return _write(figure, axes, "y", points, path)


def plots(records: Sequence[dict], folder: Path) -> list[Path]:
    """All plots that the records allow."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        differences_plot(records, kind, folder / f"{kind}.png") for kind in ("scratch", "ending", "branch")
    ]
    written.append(curves_plot(records, folder / "curves.png"))
    return [path for path in written if path]
