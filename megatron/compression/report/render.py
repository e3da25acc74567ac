"""What people read of a finished run: report.md with its pictures, and the comparison of two runs."""

from collections.abc import Iterable
from pathlib import Path

from megatron.compression.communication.ledger import DIMENSIONS, KINDS, TRAFFIC
from megatron.compression.report.figures import evaluations, loss_of, summarize, training_rows
from megatron.compression.report.history import REPORT_FILE, to_json

LINE = {"color": "C0", "linewidth": 1.2, "markersize": 3}
"""A run's curves."""
_TIME = "milliseconds_per_iteration"
MEMORY = {
    "allocated": "peak memory of torch's allocator",
    "device_used": "memory used on the device at the end",
    "resident": "peak memory of the process",
}
"""Names of ``peak_memory``'s figures; the largest of any rank is shown."""


def write_report(report: dict, directory: Path) -> list[str]:
    """Write the report (see ``Reporter``) into ``directory``, replacing an earlier rendering of the same run.

    Returns: Lines for the log: what could not be done.
    """
    directory.mkdir(parents=True, exist_ok=True)
    report = report | {"summary": summarize(report)}
    _replace(directory / REPORT_FILE, to_json(report, indent=1) + "\n")
    pictures, why_none = draw([("", LINE, report)], directory)
    _replace(directory / "report.md", _markdown(report, pictures, why_none))
    return [why_none] if why_none else []


def _replace(path: Path, text: str) -> None:
    """Write a file so that what was there stays whole until this is."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def _markdown(report: dict, pictures: list[str], why_none: str | None) -> str:
    summary = report["summary"]
    lines = ["# Communication report", ""]
    if decided := report["settings"].get("auto"):
        lines += ["## What --compression auto decided", "", *decided["table"], ""]
    lines += ["## Bytes", "", "What one GPU sends in one iteration, mean over all ranks.", ""]
    lines += [*_bytes(summary), "", "## Time, memory, loss", "", *_figures(summary)]
    if errors := report["errors"]:
        lines += ["", "## Error", "", *_errors(errors)]
    lines += ["", *([f"![{name}]({name})" for name in pictures] or [f"No pictures: {why_none}."])]
    lines += ["", "## Words", "", *_words(report)]
    settings = report["settings"].get("compression", {})
    lines += [
        "",
        "## Settings of compression",
        "",
        "```json",
        to_json(settings, indent=1),
        "```",
        "",
    ]
    lines += [f"Megatron's arguments are in {REPORT_FILE}.", ""]
    return "\n".join(lines)


def _bytes(summary: dict) -> list[str]:
    rows = dict(summary["dimensions"])
    for traffic, total in summary["bytes_per_iteration"].items():
        rows[traffic] = total
        if crossed := summary["bytes_between_nodes"].get(traffic):
            rows[f"{traffic}, between nodes"] = crossed
    cells = []
    for name, pair in rows.items():
        sent, plain = pair["sent"], pair["uncompressed"]
        shares = (
            (f"{plain / sent:.3f}", f"{sent / rows['all']['sent']:.1%}") if sent else ("-", "-")
        )
        cells.append((name, f"{sent / 1e6:.3f}", f"{plain / 1e6:.3f}", *shares))
    return table(("traffic", "sent (MB)", "uncompressed (MB)", "ratio", "share of all"), *cells)


def _figures(summary: dict) -> list[str]:
    time = summary[_TIME]
    lines = [f"Time of an iteration: {time:.1f} ms (median).", ""] if time is not None else []
    for name, peak in summary["peak_memory_bytes"].items():
        lines += [
            f"{MEMORY[name].capitalize()}: {peak / 1e6:,.0f} MB (the largest of any rank).",
            "",
        ]
    losses = {
        "training": ("first_loss", "last_loss"),
        "validation": ("first_validation_loss", "validation_loss"),
        "test": (None, "test_loss"),  # evaluated once, after the last iteration
    }
    cells = ((name, *(_cell(summary.get(key)) for key in keys)) for name, keys in losses.items())
    return [*lines, *table(("loss", "first", "last"), *cells)]


def _errors(errors: list[dict]) -> list[str]:
    names = ("site", "traffic", "relative L2 error", "of ordinary values", "max/median", "samples")
    cells = (
        (
            row["site"],
            row["traffic"],
            *(f"{row[key]:.5f}" for key in ("relative_error", "ordinary_error")),
            "-" if row["peak"] is None else f"{row['peak']:.0f}",
            str(row["samples"]),
        )
        for row in errors
    )
    return table(names, *cells)


def _words(report: dict) -> list[str]:
    """What the words of this report mean, and what is not counted."""
    rows = training_rows(report)
    traffic = {name for row in rows for name in row["bytes_per_iteration"]}
    kinds = {
        kind for row in rows for by_kind in row["bytes_per_iteration"].values() for kind in by_kind
    }
    lines = [
        "- sent: bytes given to the backend, by the convention of nccl-tests (an all-reduce of n bytes over "
        "W ranks sends 2 (W-1)/W n). uncompressed: what the same operations would send without a codec. "
        "ratio: uncompressed / sent.",
        "- training loss: the mean of a log interval. relative L2 error: |decoded - exact| / |exact| of "
        "one encoding of what a site sends; samples: how often it was measured. ordinary values: those of "
        "at most 8 times the mean magnitude of their 128; max/median: of the magnitudes, the largest of all "
        "samples.",
    ]
    lines += [f"- {name}: {TRAFFIC[name]}." for name in TRAFFIC if name in traffic]
    lines += [f"- {kind}: {KINDS[kind]}." for kind in KINDS if kind in kinds]
    own = f"{report.get('bytes_of_a_report', 0):,} bytes each log interval"
    scalars = "Megatron's scalar reductions (logged loss, gradient norm, overflow checks)"
    return [*lines, f"- Not counted: this report's own all-reduce ({own}) and {scalars}."]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def compare(baseline: dict, run: dict) -> list[tuple[str, str, str, str]]:
    """Rows (figure, of the baseline, of the run, change), ready to print; without what neither has.

    Losses are compared at the last iteration that both have.
    """
    old, new = baseline["summary"], run["summary"]
    rows: list[tuple] = [("time of an iteration (ms)", (old[_TIME], new[_TIME]), ".1f", _faster)]
    for name in (*DIMENSIONS, "all"):
        sent = [_mb(summary["dimensions"].get(name, {}).get("sent")) for summary in (old, new)]
        rows.append((f"bytes sent, {name} (MB)", sent, ".3f", _fewer))
    for name, split in (("training", None), ("validation", "valid"), ("test", "test")):
        histories = [
            evaluations(one, split) if split else training_rows(one) for one in (baseline, run)
        ]
        losses = [
            {row["iteration"]: loss_of(row) for row in rows if loss_of(row)} for rows in histories
        ]
        if both := losses[0].keys() & losses[1].keys():
            last = max(both)
            pair = losses[0][last], losses[1][last]
            rows.append((f"{name} loss, iteration {last}", pair, ".4f", _percent))
    for key, text in MEMORY.items():
        peaks = [_mb(summary["peak_memory_bytes"].get(key)) for summary in (old, new)]
        rows.append((f"{text} (MB)", peaks, ",.0f", _percent))
    return [
        (
            name,
            *("-" if value is None else format(value, form) for value in pair),
            change(*pair) if all(pair) else "-",
        )
        for name, pair, form, change in rows
        if pair[0] is not None or pair[1] is not None
    ]


def different_settings(baseline: dict, run: dict) -> list[str]:
    """``name: there -> here`` for every setting that the two runs do not share."""
    there, here = _flat(baseline["settings"]), _flat(run["settings"])
    differing = [name for name in there | here if there.get(name) != here.get(name)]
    return [f"{name}: {there.get(name, '-')} -> {here.get(name, '-')}" for name in differing]


def comparison_markdown(baseline: dict, run: dict, names: tuple[str, str]) -> list[str]:
    """The lines of a comparison, with the runs' names over its columns."""
    lines = table(("", *names, "change"), *compare(baseline, run))
    if differing := different_settings(baseline, run):
        lines += ["", f"Settings that differ: {'; '.join(differing)}."]
    return lines


def table(*rows: Iterable[str]) -> list[str]:
    """Markdown of rows of cells, the first of which is the header."""
    lines = [" | ".join(("", *row, "")).strip() for row in rows]
    return [lines[0], "|---" * (lines[0].count("|") - 1) + "|", *lines[1:]]


def _faster(old: float, new: float) -> str:
    return f"{old / new:.2f}x as fast"


def _fewer(old: float, new: float) -> str:
    return (
        "the same"
        if old == new
        else f"{old / new:.3f}x fewer"
        if old > new
        else f"{new / old:.3f}x more"
    )


def _percent(old: float, new: float) -> str:
    return f"{new / old - 1:+.2%}"


def _mb(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _flat(settings: dict, prefix: str = "") -> dict:
    """Nested settings under dotted names."""
    flat = {}
    for name, value in settings.items():
        flat |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flat


def draw(curves: list[tuple[str, dict, dict]], directory: Path) -> tuple[list[str], str | None]:
    """Draw loss.png and time.png of ``curves``: what to add to a label, style, report.

    Returns: The files written, and why there is none.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [], "matplotlib is not installed, so nothing is drawn; pip install matplotlib"
    written = []
    for name, unit, lines_of in (
        ("loss.png", "loss", _losses),
        ("time.png", "ms an iteration, mean of a log interval", _times),
    ):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for suffix, style, report in curves:
            for label, form, points in lines_of(report):
                if points:
                    axes.plot(*zip(*points, strict=True), form, **style, label=label + suffix)
        if not axes.lines:
            continue
        axes.set(xlabel="iteration", ylabel=unit)
        axes.legend(fontsize="small")
        if lines_of is _times:  # the first iterations take many times as long
            axes.set_ylim(0, 2 * max(report["summary"][_TIME] or 0.0 for *_, report in curves))
        figure.savefig(directory / name, dpi=120)
        written.append(name)
    return written, None if written else "nothing was logged"


def _losses(report: dict) -> list[tuple[str, str, list]]:
    """Curves of a report: label, form and points."""
    curves = (
        ("training", "-", training_rows(report)),
        ("validation", "o--", evaluations(report, "valid")),
    )
    return [
        (
            label,
            form,
            [(row["iteration"], loss_of(row)) for row in rows if loss_of(row) is not None],
        )
        for label, form, rows in curves
    ]


def _times(report: dict) -> list[tuple[str, str, list]]:
    points = [(row["iteration"], row[_TIME]) for row in training_rows(report) if _TIME in row]
    return [(f"median {report['summary'][_TIME]:.1f} ms", "-", points)] if points else []
