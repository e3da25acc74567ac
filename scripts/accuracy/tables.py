"""Tables of the runs in Markdown."""

import math
from collections.abc import Sequence

from scripts.accuracy.estimates import BASE, Estimate, differences, estimate
from scripts.accuracy.plan import ENDED
from scripts.accuracy.settings import bits_of

TITLES = ("setting", "bits a value", "against uncompressed by seed, %", "mean, %", "95 % interval")
MEASURES = {
    "train": "training loss, %",
    "uncompressed": "weights used uncompressed, %",
    "test": "test loss, %",
}


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, or nothing without rows."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] if rows else []


def interval(found: Estimate) -> str:
    """Its ends, or nothing if they are unknown."""
    low, high = found.interval
    if math.isnan(high):
        return ""
    digits = 3 if high - low < 0.2 else 2
    return f"{low:+.{digits}f} … {high:+.{digits}f}"


def table(records: Sequence[dict], kind: str) -> list[str]:
    """Differences of the runs of a kind (ending, scratch), in the order of the plan."""
    settings = {r["setting"]["name"]: r["setting"] for r in records if r["kind"] == kind}
    valid = differences(records, kind)
    more = {title: found for m, title in MEASURES.items() if (found := differences(records, kind, m))}
    rows = []
    for name in sorted(valid, key=lambda name: (*ENDED, name).index(name)):
        values = [value for _, value in sorted(valid[name].items())]
        found = estimate(values)
        cells = [name, f"{bits_of(settings[name]):.2f}", ", ".join(f"{value:+.3f}" for value in values)]
        cells += [str(found), interval(found)]
        cells += [str(estimate(list(one[name].values()))) if name in one else "" for one in more.values()]
        rows.append(cells)
    return markdown([*TITLES, *more], rows)


def tables(records: Sequence[dict]) -> str:
    """Everything as Markdown."""
    base = [r for r in records if r["setting"]["name"] == BASE and r["kind"] == "scratch"]
    losses = ", ".join(f"{r['valid']:.4f}" for r in sorted(base, key=lambda r: r["seed"]))
    parts = [f"Validation losses of the uncompressed runs, by seed: {losses}", ""]
    for title, kind in (("Endings: the last part of the schedule", "ending"), ("From scratch", "scratch")):
        if lines := table(records, kind):
            parts += [f"### {title}", "", *lines, ""]
    return "\n".join(parts)
