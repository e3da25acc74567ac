"""What people read of a finished run: report.md with its pictures, and the comparison of two
runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.compression.communication.ledger import DIMENSIONS, KINDS, TRAFFIC
from megatron.compression.files import write_whole
from megatron.compression.names import FLAG_NAMES
from megatron.compression.report.figures import (
    MB,
    evaluations,
    loss_of,
    summarize,
    training_rows,
)
from megatron.compression.report.history import REPORT_FILE, to_json
from megatron.compression.report.markdown import table

LINE = {"color": "C0", "linewidth": 1.2, "markersize": 3}
"""How matplotlib draws a run's curves."""
_TIME = "milliseconds_per_iteration"
MEMORY = {
    "allocated": "peak memory of torch's allocator",
    "device_used": "memory used on the device at the end",
    "resident": "peak memory of the process",
}
"""Names of the figures of ``peak_memory``; the largest of any rank is shown."""


def write_report(report: dict, directory: Path) -> list[str]:
    """Write report.json, report.md and pictures, replacing an earlier rendering of the same run.

    Args:
        report: what ``Reporter`` has gathered.
        directory: the report's folder, which is made where it is missing.

    Returns:
        Lines for the log: what could not be done.

    Raises:
        OSError: a file cannot be written.
    """
    # For other programs that read the file; ``load_report`` makes it anew.
    report = report | {"summary": summarize(report)}
    write_whole(directory / REPORT_FILE, to_json(report, indent=1) + "\n")
    pictures, reason = draw([("", LINE, report)], directory)
    write_whole(directory / "report.md", _markdown(report, pictures, reason))
    return [] if reason is None else [reason]


def _markdown(report: dict, pictures: list[str], no_pictures_because: str | None) -> str:
    """Return report.md."""
    summary = report["summary"]
    lines = ["# Communication report", ""]
    if decision := report["settings"].get("auto"):
        lines += ["## What --compression auto decided", "", *decision["table"], ""]
    lines += ["## Bytes", "", "What one GPU sends in one iteration, mean over all ranks.", ""]
    lines += _bytes_table(summary)
    lines += ["", "## Time, memory, loss", ""]
    lines += _figures(summary)
    if errors := report["errors"]:
        lines += ["", "## Error", "", *_errors_table(errors)]
    lines.append("")
    if pictures:
        lines += [f"![{name}]({name})" for name in pictures]
    else:
        lines.append(f"No pictures: {no_pictures_because}.")
    lines += ["", "## Words", "", *_words(report)]
    settings = to_json(report["settings"].get("compression", {}), indent=1)
    lines += ["", "## Settings of compression", "", "```json", settings, "```", ""]
    lines += [f"Megatron's arguments are in {REPORT_FILE}.", ""]
    return "\n".join(lines)


def _bytes_table(summary: dict) -> list[str]:
    """Return a table of bytes by dimension, then by traffic class and what of it crossed nodes."""
    # Dimensions and "all" first, then the traffic classes that they are made of.
    pairs = dict(summary["dimensions"])
    for traffic, total in summary["bytes_per_iteration"].items():
        pairs[traffic] = total
        if crossed := summary["bytes_between_nodes"].get(traffic):
            pairs[f"{traffic}, between nodes"] = crossed
    rows = []
    for name, pair in pairs.items():
        sent = pair["sent"]
        uncompressed = pair["uncompressed"]
        ratio = "-"
        share = "-"
        if sent:
            ratio = f"{uncompressed / sent:.3f}"
            share = f"{sent / pairs['all']['sent']:.1%}"
        rows.append((name, f"{sent / MB:.3f}", f"{uncompressed / MB:.3f}", ratio, share))
    return table(("traffic", "sent (MB)", "uncompressed (MB)", "ratio", "share of all"), *rows)


def _figures(summary: dict) -> list[str]:
    """Return lines about time, memory and losses."""
    lines = []
    if summary[_TIME] is not None:
        lines += [
            f"Time of an iteration: {summary[_TIME]:.1f} ms (median of the log intervals; the "
            "first one, which warms up, is left out).",
            "",
        ]
    for name, peak in summary["peak_memory_bytes"].items():
        description = MEMORY[name].capitalize()
        lines += [f"{description}: {peak / MB:,.0f} MB (the largest of any rank).", ""]
    rows = (
        ("training", summary.get("first_loss"), summary.get("last_loss")),
        ("validation", summary.get("first_validation_loss"), summary.get("validation_loss")),
        ("test", None, summary.get("test_loss")),  # evaluated once, after the last iteration
    )
    cells = [(name, _format(first, ".6f"), _format(last, ".6f")) for name, first, last in rows]
    lines += table(("loss", "first", "last"), *cells)
    if cost := summary.get("cost_in_loss"):
        lines += [
            "",
            f"Compression costs {_format(cost['percent'], '+.3f')} +- "
            f"{_format(cost['standard_error'], '.3f')} % of the training loss, by {cost['pairs']} "
            "pairs of forward passes with and without codecs. "
            "Codecs of gradients are not seen, nor what rounding does to the weights over time.",
        ]
    return lines


def _errors_table(errors: list[dict]) -> list[str]:
    """Return a table of measured errors by site and traffic class."""
    names = ("site", "traffic", "relative L2 error", "of ordinary values", "max/median", "samples")
    rows = [
        (
            error["site"],
            error["traffic"],
            f"{error['relative_error']:.5f}",
            f"{error['ordinary_error']:.5f}",
            _format(error["peak"], ".0f"),
            str(error["samples"]),
        )
        for error in errors
    ]
    return table(names, *rows)


def _words(report: dict) -> list[str]:
    """Return what the words of this report mean, and what is not counted."""
    # Only the words that this report uses are explained.
    rows = training_rows(report)
    traffic = {name for row in rows for name in row["bytes_per_iteration"]}
    reasons = {
        reason
        for row in rows
        for by_reason in row["bytes_per_iteration"].values()
        for reason in by_reason
    }
    lines = [
        "- sent: bytes given to the backend, by the convention of nccl-tests (an all-reduce of n "
        "bytes over W ranks sends 2 (W-1)/W n). uncompressed: what the same operations would send "
        "without a codec. ratio: uncompressed / sent.",
        "- training loss: the mean of a log interval. relative L2 error: |decoded - exact| / "
        "|exact| of one encoding of what a site sends; samples: how often it was measured. "
        "ordinary values: those of at most 8 times the mean magnitude of their 128; max/median: of "
        "the magnitudes, the largest of all samples.",
    ]
    lines += [f"- {name}: {TRAFFIC[name]}." for name in TRAFFIC if name in traffic]
    lines += [f"- {reason}: {KINDS[reason]}." for reason in KINDS if reason in reasons]
    report_bytes = f"{report.get('bytes_of_a_report', 0):,} bytes each log interval"
    lines.append(
        f"- Not counted: this report's own all-reduce ({report_bytes}) and Megatron's scalar "
        "reductions (logged loss, gradient norm, overflow checks)."
    )
    return lines


@dataclass(frozen=True)
class Figure:
    """One row of a comparison."""

    name: str
    baseline: float | None
    run: float | None
    form: str
    """How both are formatted."""
    change: Callable[[float, float], str]
    """Says in words how the second differs from the first."""

    def cells(self) -> tuple[str, str, str, str]:
        """Return name, both values and the change, ready to print; ``-`` for what is missing."""
        change = "-"
        # Neither a missing value nor 0 has a ratio to another.
        if self.baseline and self.run:
            change = self.change(self.baseline, self.run)
        return self.name, _format(self.baseline, self.form), _format(self.run, self.form), change


def compare(baseline: dict, run: dict) -> list[tuple[str, str, str, str]]:
    """Return rows (figure, of the baseline, of the run, change), without what neither report has.

    Losses are compared at the last iteration that both have.
    """
    figures = [*_times_and_bytes(baseline, run), *_common_losses(baseline, run)]
    figures += _memory(baseline, run)
    return [
        figure.cells()
        for figure in figures
        if figure.baseline is not None or figure.run is not None
    ]


def _times_and_bytes(baseline: dict, run: dict) -> Iterator[Figure]:
    old = baseline["summary"]
    new = run["summary"]
    yield Figure("time of an iteration (ms)", old.get(_TIME), new.get(_TIME), ".1f", _faster)
    for name in (*DIMENSIONS, "all"):
        sent = [_megabytes(_sent(summary, name)) for summary in (old, new)]
        yield Figure(f"bytes sent, {name} (MB)", *sent, ".3f", _fewer)


def _sent(summary: dict, dimension: str) -> float | None:
    return summary.get("dimensions", {}).get(dimension, {}).get("sent")


def _common_losses(baseline: dict, run: dict) -> Iterator[Figure]:
    """Yield each kind of loss at the last iteration at which both reports have one."""
    for name in _LOSS_ROWS:
        old = _losses_by_iteration(baseline, name)
        new = _losses_by_iteration(run, name)
        # Losses of different iterations cannot be compared; ``missing_losses`` names such runs.
        if common := old.keys() & new.keys():
            last = max(common)
            yield Figure(f"{name} loss, iteration {last}", old[last], new[last], ".4f", _percent)


_LOSS_ROWS: dict[str, Callable[[dict], list[dict]]] = {
    "training": training_rows,
    "validation": lambda report: evaluations(report, "valid"),
    "test": lambda report: evaluations(report, "test"),
}
"""The rows of a history that hold each kind of loss."""


def _losses_by_iteration(report: dict, name: str) -> dict[int, float]:
    losses = {row["iteration"]: loss_of(row) for row in _LOSS_ROWS[name](report)}
    # A loss that was not finite is null in the file.
    return {iteration: loss for iteration, loss in losses.items() if loss}


def _memory(baseline: dict, run: dict) -> Iterator[Figure]:
    for key, description in MEMORY.items():
        peaks = [
            _megabytes(report["summary"].get("peak_memory_bytes", {}).get(key))
            for report in (baseline, run)
        ]
        yield Figure(f"{description} (MB)", *peaks, ",.0f", _percent)


def missing_losses(baseline: dict, run: dict) -> list[str]:
    """Return a line for each kind of loss that both reports have at no common iteration."""
    lines = []
    for name in _LOSS_ROWS:
        old = _losses_by_iteration(baseline, name)
        new = _losses_by_iteration(run, name)
        if old and new and not old.keys() & new.keys():
            lines.append(
                f"No {name} loss is compared: the runs logged it at different iterations "
                f"({_span(old)} and {_span(new)}); run both with the same --log-interval and "
                "--eval-interval."
            )
    return lines


def _span(losses: dict[int, float]) -> str:
    """Return ``10 to 50 in steps of 10`` for the iterations of a run's losses."""
    iterations = sorted(losses)
    if len(iterations) == 1:
        return str(iterations[0])
    return f"{iterations[0]} to {iterations[-1]} in steps of {iterations[1] - iterations[0]}"


def different_settings(baseline: dict, run: dict) -> list[str]:
    """Return ``name: of the baseline -> of the run`` for every setting that the two runs do not
    share.

    A setting is called as a user types it: by its flag or environment variable.
    """
    old = _flat(baseline["settings"])
    new = _flat(run["settings"])
    # In the baseline's order, then what the other run alone has.
    different = [name for name in old | new if old.get(name) != new.get(name)]
    return [
        f"{_typed_name(name)}: {old.get(name, '-')} -> {new.get(name, '-')}" for name in different
    ]


def _typed_name(path: str) -> str:
    """Return what a user types for a setting's path in ``settings``.

    ``compression.tensor_parallel.compression`` is ``--tp-compression``, ``megatron.num_layers`` is
    ``--num-layers``; any other path has no flag and is returned as it is.
    """
    section, _, name = path.partition(".")
    if section == "compression":
        return FLAG_NAMES.of(name)
    if section == "megatron":
        return FLAG_NAMES.of(f"args.{name}")
    return path


def _flat(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def comparison_markdown(baseline: dict, run: dict, names: tuple[str, str]) -> list[str]:
    """Return the lines of a comparison of two reports.

    Args:
        baseline: a report as ``load_report`` gives it.
        run: the report in question.
        names: of the two runs, for the header.
    """
    lines = table(("", *names, "change"), *compare(baseline, run))
    lines += ["", "Time: the median of the log intervals without the first one, which warms up."]
    for line in missing_losses(baseline, run):
        lines += ["", line]
    if different := dict.fromkeys(different_settings(baseline, run)):
        lines += ["", f"Settings that differ: {'; '.join(different)}."]
    return lines


def _faster(old: float, new: float) -> str:
    return f"{old / new:.2f}x as fast"


def _fewer(old: float, new: float) -> str:
    if old == new:
        return "the same"
    if old > new:
        return f"{old / new:.3f}x fewer"
    return f"{new / old:.3f}x more"


def _percent(old: float, new: float) -> str:
    return f"{new / old - 1:+.2%}"


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _megabytes(value: float | None) -> float | None:
    return None if value is None else value / MB


Points = list[tuple[int, float]]
"""(iteration, value) of one curve."""
Curve = tuple[str, str, Points]
"""Label, matplotlib's format of its line, points."""


def draw(curves: list[tuple[str, dict, dict]], directory: Path) -> tuple[list[str], str | None]:
    """Draw loss.png and time.png of one or more reports.

    Args:
        curves: (what to add to a label, matplotlib's style, report) by run.
        directory: where the pictures go.

    Returns:
        The files written, and why there is none.
    """
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError:
        return [], "matplotlib is not installed, so nothing is drawn; pip install matplotlib"
    written = []
    for name, unit, curves_of in (
        ("loss.png", "loss", _loss_curves),
        ("time.png", "ms an iteration, mean of a log interval", _time_curves),
    ):
        picture = Picture(figsize=(7, 4), layout="constrained")
        axes = picture.subplots()
        for suffix, style, report in curves:
            for label, form, points in curves_of(report):
                if points:
                    axes.plot(*zip(*points, strict=True), form, **style, label=label + suffix)
        # No row has such a figure: rather no picture than an empty one.
        if not axes.lines:
            continue
        axes.set(xlabel="iteration", ylabel=unit)
        axes.legend(fontsize="small")
        if curves_of is _time_curves:
            # The first iterations take many times as long: they would flatten everything else.
            medians = [report["summary"][_TIME] or 0.0 for *_, report in curves]
            axes.set_ylim(0, 2 * max(medians))
        picture.savefig(directory / name, dpi=120)
        written.append(name)
    return written, None if written else "nothing was logged"


def _loss_curves(report: dict) -> list[Curve]:
    """Return the curves of a report's training and validation losses."""
    curves: list[Curve] = []
    for label, form, rows in (
        ("training", "-", training_rows(report)),
        ("validation", "o--", evaluations(report, "valid")),
    ):
        losses = [(row["iteration"], loss_of(row)) for row in rows]
        points = [(iteration, loss) for iteration, loss in losses if loss is not None]
        curves.append((label, form, points))
    return curves


def _time_curves(report: dict) -> list[Curve]:
    """Return the curve of a report's times."""
    points = [(row["iteration"], row[_TIME]) for row in training_rows(report) if _TIME in row]
    if not points:
        return []
    return [(f"median {report['summary'][_TIME]:.1f} ms", "-", points)]
