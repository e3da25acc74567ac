"""Writes a run's report: report.json, report.md and its pictures."""

import json
from pathlib import Path

from megatron.compression.communication.ledger import KINDS, TRAFFIC
from megatron.compression.report.compare import MEMORY, table
from megatron.compression.report.history import REPORT_FILE
from megatron.compression.report.memory import largest
from megatron.compression.report.plots import draw_report
from megatron.compression.report.summary import summarize, training_rows

MASSIVE = 100
"""Times the median from where a value is called massive: it then raises a group's error noticeably."""


def write_report(report: dict, directory: Path) -> list[str]:
    """Write the report into ``directory``, replacing an earlier rendering of the same run.

    Args:
        report: ``settings``, ``world_size``, ``history`` (the reporter's rows), ``ledger_by_rank``,
            ``errors``, and ``memory_by_rank``.
    Returns: Lines for the log: what could not be done.
    """
    directory.mkdir(parents=True, exist_ok=True)
    report = {**report, "memory": largest(report.get("memory_by_rank", []))}
    report["summary"] = summarize(report)
    _replace(directory / REPORT_FILE, json.dumps(report, indent=1) + "\n")
    pictures, why_none = draw_report(report, directory)
    _replace(directory / "report.md", _markdown(report, pictures, why_none))
    return massive_sites(report["errors"]) + ([why_none] if why_none else [])


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
    lines += _dimensions(summary) + _traffic(summary)
    lines += ["## Time, memory, loss", "", *_figures(summary)]
    if errors := report["errors"]:
        lines += ["", "## Error", "", *_errors(errors), *(f"\n{line}" for line in massive_sites(errors))]
    lines += ["", *([f"![{name}]({name})" for name in pictures] or [f"No pictures: {why_none}."])]
    lines += ["", "## Words", "", *_words(report)]
    lines += ["", "## Settings", "", "```json", json.dumps(report["settings"], indent=1), "```", ""]
    return "\n".join(lines)


_BYTES = ("sent (MB)", "uncompressed (MB)", "ratio")


def _dimensions(summary: dict) -> list[str]:
    everything = summary["dimensions"].get("all", {}).get("sent", 0.0)
    rows = summary["dimensions"].items()
    cells = ((name, *_bytes(row), f"{row['sent'] / everything:.1%}") for name, row in rows)
    return [*table(("dimension", *_BYTES, "share of all"), *cells), ""]


def _traffic(summary: dict) -> list[str]:
    cells = []
    for traffic, total in summary["bytes_per_iteration"].items():
        cells.append((traffic, *_bytes(total)))
        if crossed := summary["bytes_between_nodes"].get(traffic):
            cells.append((f"{traffic}, between nodes", *_bytes(crossed)))
    return [*table(("traffic", *_BYTES), *cells), ""]


def _bytes(pair: dict[str, float]) -> tuple[str, str, str]:
    ratio = f"{pair['uncompressed'] / pair['sent']:.3f}" if pair["sent"] else "-"
    return f"{pair['sent'] / 1e6:.3f}", f"{pair['uncompressed'] / 1e6:.3f}", ratio


def _figures(summary: dict) -> list[str]:
    time = summary["milliseconds_per_iteration"]
    lines = [f"Time of an iteration: {time:.1f} ms (median).", ""] if time is not None else []
    for name, peak in summary["peak_memory_bytes"].items():
        lines += [f"{MEMORY[name].capitalize()}: {peak / 1e6:,.0f} MB (the largest of any rank).", ""]
    losses = {
        "training": ("first_loss", "last_loss"),
        "validation": ("first_validation_loss", "validation_loss"),
        "test": (None, "test_loss"),  # evaluated once, behind the last iteration
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


def massive_sites(errors: list[dict]) -> list[str]:
    """A line for each site and traffic class whose largest value is MASSIVE times the median."""
    return [
        f"Massive activations at {row['site']} ({row['traffic']}): max/median {row['peak']:.0f}, relative "
        f"error of the ordinary values {row['ordinary_error']:.3g}."
        for row in errors
        if (row["peak"] or 0) >= MASSIVE
    ]


def _words(report: dict) -> list[str]:
    """What the words of this report mean, and what is not counted."""
    rows = training_rows(report)
    traffic = {name for row in rows for name in row["bytes_per_iteration"]}
    kinds = {kind for row in rows for by_kind in row["bytes_per_iteration"].values() for kind in by_kind}
    lines = [
        "- sent: bytes given to the backend, by the convention of nccl-tests (an all-reduce of n bytes over "
        "W ranks sends 2 (W-1)/W n). uncompressed: what the same operations would send without a codec. "
        "ratio: uncompressed / sent.",
        "- training loss: the mean of a log interval. relative L2 error: |compressed - exact| / |exact| of a "
        "site's sums or messages; samples: how often it was measured. ordinary values: those of at most 8 "
        "times the mean magnitude of their 128; max/median: of the magnitudes, the largest of all samples.",
    ]
    lines += [f"- {name}: {TRAFFIC[name]}." for name in TRAFFIC if name in traffic]
    lines += [f"- {kind}: {KINDS[kind]}." for kind in KINDS if kind in kinds]
    probed = report["summary"]["probe_bytes_per_iteration"]
    if probed:
        lines.append(
            f"- Not in the tables: the error probe's {probed / 1e6:.3f} MB an iteration. Its time is in "
            "the iterations'; --log-interval says how often it measures."
        )
    own = f"{report.get('bytes_of_a_report', 0):,} bytes each log interval"
    scalars = "Megatron's scalar reductions (logged loss, gradient norm, overflow checks)"
    return [*lines, f"- Not counted: this report's own all-reduce ({own}) and {scalars}."]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"
