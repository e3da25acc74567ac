"""Tables of the runs in Markdown."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from scripts.accuracy.estimates import (
    BASE,
    Estimate,
    differences,
    estimate,
    noise_by_stage,
    pooled,
    reading,
    t_quantile,
)
from scripts.accuracy.settings import bits_a_value

NULL = "none-tp2"
BOUND = 0.3


def bits_of(setting: dict) -> float:
    """Mean bits a value over the four hops."""
    hops = ("forward1", "forward2", "backward1", "backward2")
    return statistics.fmean(bits_a_value(setting[hop]) for hop in hops)


def interval(found: Estimate) -> str:
    """Its ends, or nothing if the error is unknown."""
    if math.isnan(found.error):
        return ""
    low, high = found.interval
    return f"{low:+.2f} … {high:+.2f}"


def settings_of(records: Sequence[dict], kind: str) -> dict[str, dict]:
    """The settings of a kind of run by name, as they first appear."""
    return {r["setting"]["name"]: r["setting"] for r in records if r["kind"] == kind}


def scratch_table(records: Sequence[dict]) -> list[str]:
    """Runs from scratch: losses by seed and what they say."""
    settings = settings_of(records, "scratch")
    if not settings:
        return []
    valid, train, plain = (differences(records, "scratch", m) for m in ("valid", "train", "uncompressed"))
    noise = noise_by_stage(records, "scratch")
    lines = [
        "| setting | bits a value | validation loss, by seed | against uncompressed, % "
        "| 95 % interval, pooled | reading | training loss, % | weights used uncompressed, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, setting in settings.items():
        runs = [r for r in records if r["kind"] == "scratch" and r["setting"]["name"] == name]
        losses = ", ".join(f"{r['valid']:.4f}" for r in sorted(runs, key=lambda r: r["seed"]))
        cells = [name, f"{bits_of(setting):.2f}", losses]
        if name in valid:
            found = pooled(valid[name], noise)
            cells += [str(estimate(list(valid[name].values()))), interval(found), reading(found, BOUND)]
            cells += [str(estimate(list(d[name].values()))) if name in d else "" for d in (train, plain)]
        else:
            cells += [""] * 5
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def branch_table(records: Sequence[dict], sequence_parallel: bool) -> list[str]:
    """Branches of one form, in all and by the checkpoint that they start from."""
    valid, train = (differences(records, "branch", measure) for measure in ("valid", "train"))
    settings = settings_of(records, "branch")
    names = [name for name in valid if settings[name]["sequence_parallel"] == sequence_parallel]
    if not names:
        return []
    noise = noise_by_stage(records, "branch")
    stages = list(dict.fromkeys(block.stage for pairs in valid.values() for block in pairs))
    titles = [
        "setting",
        "bits a value",
        "pairs",
        "against uncompressed, %",
        "95 % interval, pooled",
        "reading",
    ]
    titles += ["training loss, %", *(f"{stage}, %" for stage in stages)]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name in names:
        pairs = valid[name]
        found = pooled(pairs, noise)
        cells = [name, f"{bits_of(settings[name]):.2f}", str(len(pairs)), str(estimate(list(pairs.values())))]
        cells += [interval(found), reading(found, BOUND), str(estimate(list(train[name].values())))]
        for stage in stages:
            values = [value for block, value in pairs.items() if block.stage == stage]
            cells.append(str(estimate(values)) if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def noise_lines(records: Sequence[dict]) -> list[str]:
    """What the comparisons can tell apart: noise of a run, smallest difference, and the null comparison."""
    lines = []
    for kind, what in (("scratch", "From scratch"), ("branch", "Branches")):
        noise, found = noise_by_stage(records, kind), differences(records, kind)
        for stage, (deviation, freedom) in noise.items():
            where = what + (f", {stage}" if stage else "")
            lines.append(f"- {where}: one run scatters by {deviation:.3f} % ({freedom} degrees of freedom).")
        counts = defaultdict(list)
        for name, pairs in found.items():
            counts[len(pairs)].append(name)
        for count, names in sorted(counts.items(), reverse=True):
            example = pooled(found[names[0]], noise)
            if math.isnan(example.error) or not noise:
                continue
            smallest = t_quantile(example.freedom) * example.error
            verdict = "can" if smallest < BOUND else "cannot"
            lines.append(
                f"- {what}, {count} pair{'s' * (count > 1)}: differences from {smallest:.2f} % on are told "
                f"apart (95 %), so {BOUND:g} % {verdict} be."
            )
        if NULL in found:
            null = pooled(found[NULL], noise)
            lines.append(
                f"- {what}, null comparison ({NULL}, uncompressed with other roundings): "
                f"{estimate(list(found[NULL].values()))} %, interval {interval(null) or 'unknown'}."
            )
    return lines


def true_table(records: Sequence[dict]) -> list[str]:
    """Runs with real ranks beside the simulated ones of the same setting."""
    settings = settings_of(records, "true")
    if not settings:
        return []
    true, simulated = differences(records, "true"), differences(records, "scratch")
    noise = noise_by_stage(records, "scratch")
    lines = [
        "| setting | TP | validation loss, by seed | against uncompressed, real ranks, % | simulated, % "
        "| 95 % interval of the simulated |",
        "|---|---|---|---|---|---|",
    ]
    for name in settings:
        runs = [r for r in records if r["kind"] == "true" and r["setting"]["name"] == name]
        runs.sort(key=lambda record: record["seed"])
        cells = [name, ", ".join(dict.fromkeys(str(r["tensor_parallel"]) for r in runs))]
        cells.append(", ".join(f"{record['valid']:.4f}" for record in runs))
        cells.append(str(estimate(list(true[name].values()))) if name in true else "")
        if name in simulated:
            cells += [str(estimate(list(simulated[name].values()))), interval(pooled(simulated[name], noise))]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def repeats(records: Sequence[dict]) -> list[str]:
    """Whether runs done twice ended in the same weights."""
    by_id, lines = {record["id"]: record for record in records}, []
    for record in records:
        if record["kind"] == "repeat" and (first := by_id.get(record["id"].removesuffix("/again"))):
            same = record["weights"] == first["weights"]
            lines.append(
                f"- {first['id']} twice: {'bitwise the same' if same else 'not the same weights'}, "
                f"validation losses {first['valid']:.6f} and {record['valid']:.6f}"
            )
    return lines


def times_table(records: Sequence[dict]) -> list[str]:
    """Median time of a step by setting, ms."""
    times = defaultdict(list)
    for record in records:
        if record["kind"] in ("scratch", "branch") and "seconds_per_step" in record:
            times[record["setting"]["name"]].append(1e3 * record["seconds_per_step"])
    if not times:
        return []
    return [", ".join(f"{name} {statistics.median(values):.1f}" for name, values in times.items())]


def tables(records: Sequence[dict]) -> str:
    """Everything as Markdown."""
    runs, parts = [record for record in records if record["kind"] != "errors"], []
    paired = [record for record in runs if record["kind"] != "true"]
    for title, lines in (
        ("From scratch", scratch_table(paired)),
        ("Branches, two-shot", branch_table(paired, False)),
        ("Branches, sequence parallelism", branch_table(paired, True)),
        ("What can be told apart", noise_lines(paired)),
        ("With real tensor-parallel ranks", true_table(runs)),
        ("The same run twice", repeats(runs)),
        ("Time of a step, ms", times_table(runs)),
    ):
        if lines:
            parts += [f"### {title}", "", *lines, ""]
    if parts and not any(record["setting"]["name"] == BASE for record in runs):
        parts.append(f"No run of `{BASE}`: nothing to compare with.")
    return "\n".join(parts)
