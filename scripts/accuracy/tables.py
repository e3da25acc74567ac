"""Tables of the runs in Markdown."""

import math
import statistics
from collections.abc import Sequence

from scripts.accuracy.estimates import (
    COARSE,
    NULL,
    Estimate,
    differences,
    estimate,
    in_order,
    noise_by_stage,
    pooled,
    t_quantile,
)
from scripts.accuracy.plan import BRANCHES, ENDED, SCRATCH
from scripts.accuracy.settings import bits_of

BOUND = 0.3
"""Per cent: what comparisons are asked to tell apart."""


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, or nothing without rows."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] if rows else []


def interval(found: Estimate) -> str:
    """Its ends, or nothing if the error is unknown."""
    if math.isnan(found.error):
        return ""
    low, high = found.interval
    digits = 3 if high - low < 0.2 else 2
    return f"{low:+.{digits}f} … {high:+.{digits}f}"


def settings_of(records: Sequence[dict], kind: str) -> dict[str, dict]:
    """The settings of a kind of run by name, in the order of the plans."""
    order = [*SCRATCH, *ENDED, *BRANCHES]
    found = {r["setting"]["name"]: r["setting"] for r in records if r["kind"] == kind}
    return dict(sorted(found.items(), key=lambda item: (*order, item[0]).index(item[0])))


def run_table(records: Sequence[dict], kind: str) -> list[str]:
    """Runs from scratch or endings: losses or differences by seed, and what they say."""
    valid, *more = (differences(records, kind, m) for m in ("valid", "train", "uncompressed", "test"))
    titles = ["training loss, %", "weights used uncompressed, %", "test loss, %"]
    if not more[-1]:  # of earlier runs, which had no test
        more, titles = more[:-1], titles[:-1]
    summary, rows = pooled(records, kind), []
    for name, setting in settings_of(records, kind).items():
        if kind == "scratch":
            runs = [r for r in records if r["kind"] == kind and r["setting"]["name"] == name]
            seeds = [f"{r['valid']:.4f}" for r in sorted(runs, key=lambda r: r["seed"])]
        elif name in valid:
            pairs = sorted(valid[name].items(), key=lambda pair: pair[0].replicate)
            seeds = [f"{value:+.3f}" for _, value in pairs]
        else:
            continue
        cells = [name, f"{bits_of(setting):.2f}", ", ".join(seeds)]
        if name in valid:
            cells += [str(estimate(list(valid[name].values()))), interval(summary[name])]
            cells += [str(estimate(list(d[name].values()))) if name in d else "" for d in more]
        rows.append(cells + [""] * (5 + len(more) - len(cells)))
    by_seed = "validation loss, by seed" if kind == "scratch" else "against uncompressed by seed, %"
    first = ["setting", "bits a value", by_seed, "mean against uncompressed, %", "95 % interval"]
    return markdown([*first, *titles], rows)


def branch_table(records: Sequence[dict], sequence_parallel: bool) -> list[str]:
    """Branches of one form, in all and by the checkpoint that they start from."""
    valid, summary = differences(records, "branch"), pooled(records, "branch")
    settings = settings_of(records, "branch")
    names = [n for n, s in settings.items() if s["sequence_parallel"] == sequence_parallel and n in valid]
    stages = in_order(block.stage for pairs in valid.values() for block in pairs)
    rows = []
    for name in names:
        pairs, found = valid[name], summary[name]
        cells = [name, f"{bits_of(settings[name]):.2f}", str(len(pairs)), str(estimate(list(pairs.values())))]
        cells.append(interval(found))
        for stage in stages:
            values = [value for block, value in pairs.items() if block.stage == stage]
            cells.append(str(estimate(values)) if values else "")
        rows.append(cells)
    titles = ["setting", "bits a value", "pairs", "against uncompressed, %", "95 % interval"]
    return markdown([*titles, *(f"{stage}, %" for stage in stages)], rows)


def noise_lines(records: Sequence[dict]) -> list[str]:
    """What the comparisons can tell apart: noise of a run, smallest difference, and the null comparison."""
    lines = []
    for kind, what in (("scratch", "From scratch"), ("ending", "Endings"), ("branch", "Branches")):
        noise, summary = noise_by_stage(records, kind), pooled(records, kind)
        for stage, (deviation, freedom) in noise.items():
            where = what + (f", {stage}" if stage else "")
            lines.append(f"- {where}: one run scatters by {deviation:.3f} % ({freedom} degrees of freedom).")
        by_count: dict[int, float] = {}
        for name, found in summary.items():
            half = t_quantile(found.freedom) * found.error
            fine = kind == "scratch" or abs(found.mean) <= COARSE
            if name != NULL and fine and not math.isnan(half):
                by_count[found.count] = max(half, by_count.get(found.count, 0.0))
        for count, smallest in sorted(by_count.items(), reverse=True) if noise else ():
            verdict = "can" if smallest < BOUND else "cannot"
            of = "" if kind == "scratch" else f" of settings that cost at most {COARSE:g} %,"
            lines.append(
                f"- {what}, {count} pair{'s' * (count > 1)}:{of} differences from {smallest:.2f} % on are "
                f"told apart (95 %), so {BOUND:g} % {verdict} be."
            )
        if NULL in summary:
            pairs = differences(records, kind)[NULL].values()
            lines.append(
                f"- {what}, null comparison ({NULL}, uncompressed with other roundings): "
                f"{estimate(list(pairs))} %, interval {interval(summary[NULL]) or 'unknown'}."
            )
    return lines


def true_table(records: Sequence[dict]) -> list[str]:
    """Runs with real ranks beside the simulated ones of the same setting, their noise taken to be alike."""
    true, simulated = differences(records, "true"), differences(records, "scratch")
    noise, summary, rows = noise_by_stage(records, "scratch"), pooled(records, "scratch"), []
    for name in settings_of(records, "true"):
        runs = [r for r in records if r["kind"] == "true" and r["setting"]["name"] == name]
        runs.sort(key=lambda record: record["seed"])
        cells = [name, ", ".join(dict.fromkeys(str(r["tensor_parallel"]) for r in runs))]
        cells.append(", ".join(f"{record['valid']:.4f}" for record in runs))
        cells += [str(estimate(list(true[name].values()))) if name in true else "", "", ""]
        if name in true and name in simulated:
            cells[-2] = str(estimate(list(simulated[name].values())))
            model, real = summary[name], list(true[name].values())
            if not math.isnan(model.error) and "" in noise:
                error = math.hypot(model.error, noise[""].deviation * math.sqrt(2 / len(real)))
                gap = Estimate(statistics.fmean(real) - model.mean, error, len(real), model.freedom)
                cells[-1] = interval(gap)
        rows.append(cells)
    titles = ["setting", "TP", "validation loss, by seed", "against uncompressed, real ranks, %"]
    return markdown([*titles, "simulated, %", "real - simulated, 95 % interval"], rows)


def repeats(records: Sequence[dict]) -> list[str]:
    """Whether runs done twice ended in the same weights."""
    by_id, lines = {record["id"]: record for record in records}, []
    for record in records:
        if record["kind"] == "repeat" and (first := by_id.get(record["id"].removesuffix("/again"))):
            same = record["weights"] == first["weights"]
            lines.append(f"- {first['id']} twice: {'bitwise the same' if same else 'not the same weights'}")
    return lines


def tables(records: Sequence[dict]) -> str:
    """Everything as Markdown."""
    parts, paired = [], [record for record in records if record["kind"] != "true"]
    for title, lines in (
        ("From scratch", run_table(paired, "scratch")),
        ("Endings: the last part of the schedule", run_table(paired, "ending")),
        ("Branches, two-shot", branch_table(paired, False)),
        ("Branches, sequence parallelism", branch_table(paired, True)),
        ("What can be told apart", noise_lines(paired)),
        ("With real tensor-parallel ranks", true_table(records)),
        ("The same run twice", repeats(records)),
    ):
        if lines:
            parts += [f"### {title}", "", *lines, ""]
    return "\n".join(parts)
