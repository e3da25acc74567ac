"""Two runs side by side: did it help, and what did it cost."""

import json
from collections.abc import Iterable
from pathlib import Path

from megatron.compression.communication.ledger import DIMENSIONS
from megatron.compression.report.history import REPORT_FILE
from megatron.compression.report.memory import largest
from megatron.compression.report.summary import evaluations, loss_of, training_rows


def load_report(directory: Path) -> dict:
    """A finished run's report.json.

    Raises: OSError, ValueError: there is none, or it is damaged.
    """
    return json.loads((directory / REPORT_FILE).read_text())


def compare(baseline: dict, run: dict) -> list[dict[str, str]]:
    """Rows ``{"name", "baseline", "run", "change"}``, ready to print; figures that neither has are left out.

    Losses are compared at the last iteration that both have.
    """
    old, new = baseline["summary"], run["summary"]
    pair = old["milliseconds_per_iteration"], new["milliseconds_per_iteration"]
    rows = [_row("time of an iteration (ms)", pair, ".1f", lambda old, new: f"{old / new:.2f}x as fast")]
    for name in (*DIMENSIONS, "all"):
        sent = [(summary["dimensions"].get(name) or {}).get("sent") for summary in (old, new)]
        rows.append(_row(f"bytes sent, {name} (MB)", [_mb(value) for value in sent], ".3f", _fewer))
    for name, split in (("training", None), ("validation", "valid"), ("test", "test")):
        histories = [evaluations(one, split) if split else training_rows(one) for one in (baseline, run)]
        losses = [{row["iteration"]: loss_of(row) for row in rows if row["losses"]} for rows in histories]
        if both := losses[0].keys() & losses[1].keys():
            last = max(both)
            pair = losses[0][last], losses[1][last]
            rows.append(_row(f"{name} loss, iteration {last}", pair, ".4f", _percent))
    memory = [largest(report.get("memory_by_rank", [])) for report in (baseline, run)]
    for key, text in MEMORY.items():
        rows.append(_row(f"{text} (MB)", [_mb(peaks.get(key)) for peaks in memory], ",.0f", _percent))
    return [row for row in rows if row is not None]


MEMORY = {
    "allocated": "peak memory of torch's allocator",
    "device_used": "memory taken on the device at the end",
    "resident": "peak memory of the process",
}
"""What memory.py's figures are; the largest of any rank is shown."""


def different_settings(baseline: dict, run: dict) -> list[str]:
    """``name: there -> here`` for every setting that the two runs do not share."""
    there, here = _flat(baseline["settings"]), _flat(run["settings"])
    differing = [name for name in there | here if there.get(name) != here.get(name)]
    return [f"{name}: {there.get(name, '-')} -> {here.get(name, '-')}" for name in differing]


def comparison_markdown(baseline: dict, run: dict) -> list[str]:
    """The lines of a comparison's section."""
    lines = table(("", "baseline", "this run", "change"), *(row.values() for row in compare(baseline, run)))
    if differing := different_settings(baseline, run):
        lines += ["", f"Settings that differ: {'; '.join(differing)}."]
    return lines


def table(*rows: Iterable[str]) -> list[str]:
    """Markdown of rows of cells, the first of which is the header."""
    lines = [" | ".join(("", *row, "")).strip() for row in rows]
    return [lines[0], "|---" * (lines[0].count("|") - 1) + "|", *lines[1:]]


def _row(name: str, pair, form: str, change) -> dict[str, str] | None:
    old, new = pair
    if old is None and new is None:
        return None
    shown = ["-" if value is None else format(value, form) for value in pair]
    text = change(old, new) if (old or 0) > 0 and (new or 0) > 0 else "-"
    return {"name": name, "baseline": shown[0], "run": shown[1], "change": text}


def _fewer(old: float, new: float) -> str:
    return "the same" if old == new else f"{old / new:.3f}x fewer" if old > new else f"{new / old:.3f}x more"


def _percent(old: float, new: float) -> str:
    return f"{new / old - 1:+.2%}"


def _mb(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _flat(settings: dict, prefix: str = "") -> dict:
    """Nested settings under dotted names."""
    flat = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
