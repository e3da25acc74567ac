"""Tables of the runs in Markdown."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from scripts.accuracy.estimates import (
    BASE,
    COARSE,
    NULL,
    Estimate,
    differences,
    estimate,
    in_order,
    noise_by_stage,
    pooled,
    reading,
    t_quantile,
)
from scripts.accuracy.plan import BRANCHES, SCRATCH
from scripts.accuracy.scaling import scaling_lines
from scripts.accuracy.settings import bits_a_value

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
    digits = 3 if high - low < 0.2 else 2
    return f"{low:+.{digits}f} … {high:+.{digits}f}"


def settings_of(records: Sequence[dict], kind: str) -> dict[str, dict]:
    """The settings of a kind of run by name, in the order of the plans."""
    order = [*SCRATCH, *BRANCHES]
    found = {r["setting"]["name"]: r["setting"] for r in records if r["kind"] == kind}
    return dict(sorted(found.items(), key=lambda item: (*order, item[0]).index(item[0])))


def _judged(records: Sequence[dict], kind: str) -> dict[str, list[str]]:
    """Cells of the settings that have differences: mean, interval, reading, training loss, uncompressed."""
    valid, train, plain = (differences(records, kind, m) for m in ("valid", "train", "uncompressed"))
    summary, cells = pooled(records, kind), {}
    for name, pairs in valid.items():
        found = summary[name]
        cells[name] = [str(estimate(list(pairs.values()))), interval(found), reading(found, BOUND)]
        cells[name] += [str(estimate(list(d[name].values()))) if name in d else "" for d in (train, plain)]
    return cells


def scratch_table(records: Sequence[dict]) -> list[str]:
    """Runs from scratch: losses by seed and what they say."""
    settings, judged = settings_of(records, "scratch"), _judged(records, "scratch")
    if not settings:
        return []
    lines = [
        "| setting | bits a value | validation loss, by seed | against uncompressed, % "
        "| 95 % interval, pooled | reading | training loss, % | weights used uncompressed, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, setting in settings.items():
        runs = [r for r in records if r["kind"] == "scratch" and r["setting"]["name"] == name]
        losses = ", ".join(f"{r['valid']:.4f}" for r in sorted(runs, key=lambda r: r["seed"]))
        cells = [name, f"{bits_of(setting):.2f}", losses, *judged.get(name, [""] * 5)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ending_table(records: Sequence[dict]) -> list[str]:
    """The last part of the schedule: differences by seed and what they say."""
    valid, judged = differences(records, "ending"), _judged(records, "ending")
    if not valid:
        return []
    lines = [
        "| setting | bits a value | against uncompressed by seed, % | mean, % | 95 % interval "
        "| reading | training loss, % | weights used uncompressed, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, setting in settings_of(records, "ending").items():
        if name in valid:
            pairs = sorted(valid[name].items(), key=lambda pair: pair[0].replicate)
            seeds = ", ".join(f"{value:+.3f}" for _, value in pairs)
            lines.append(f"| {' | '.join([name, f'{bits_of(setting):.2f}', seeds, *judged[name]])} |")
    return lines


def branch_table(records: Sequence[dict], sequence_parallel: bool) -> list[str]:
    """Branches of one form, in all and by the checkpoint that they start from."""
    valid, train = (differences(records, "branch", measure) for measure in ("valid", "train"))
    settings = settings_of(records, "branch")
    names = [n for n, found in settings.items() if found["sequence_parallel"] == sequence_parallel]
    names = [name for name in names if name in valid]
    if not names:
        return []
    summary = pooled(records, "branch")
    stages = in_order(block.stage for pairs in valid.values() for block in pairs)
    titles = [
        "setting",
        "bits a value",
        "pairs",
        "against uncompressed, %",
        "95 % interval",
        "reading",
    ]
    titles += ["training loss, %", *(f"{stage}, %" for stage in stages)]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name in names:
        pairs = valid[name]
        found = summary[name]
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
        for count, smallest in sorted(by_count.items(), reverse=True):
            if noise:
                verdict = "can" if smallest < BOUND else "cannot"
                of = "" if kind == "scratch" else f" of settings that cost at most {COARSE:g} %,"
                pairs = f"{count} pair{'s' * (count > 1)}"
                lines.append(
                    f"- {what}, {pairs}:{of} differences from {smallest:.2f} % on are "
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
    settings = settings_of(records, "true")
    if not settings:
        return []
    true, simulated = differences(records, "true"), differences(records, "scratch")
    noise, summary = noise_by_stage(records, "scratch"), pooled(records, "scratch")
    lines = [
        "| setting | TP | validation loss, by seed | against uncompressed, real ranks, % | simulated, % "
        "| real - simulated, 95 % interval | reading |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in settings:
        runs = [r for r in records if r["kind"] == "true" and r["setting"]["name"] == name]
        runs.sort(key=lambda record: record["seed"])
        cells = [name, ", ".join(dict.fromkeys(str(r["tensor_parallel"]) for r in runs))]
        cells.append(", ".join(f"{record['valid']:.4f}" for record in runs))
        cells.append(str(estimate(list(true[name].values()))) if name in true else "")
        cells += ["", "", ""]
        if name in true and name in simulated:
            cells[-3] = str(estimate(list(simulated[name].values())))
            model, real = summary[name], list(true[name].values())
            if not math.isnan(model.error) and "" in noise:
                error = math.hypot(model.error, noise[""].deviation * math.sqrt(2 / len(real)))
                gap = Estimate(statistics.fmean(real) - model.mean, error, len(real), model.freedom)
                low, high = gap.interval
                cells[-2:] = [interval(gap), "agree within noise" if low < 0 < high else "differ"]
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
        if record["kind"] in ("scratch", "ending", "branch") and "seconds_per_step" in record:
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
        ("Endings: the last part of the schedule", ending_table(paired)),
        ("From scratch and endings", scaling_lines(paired)),
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
