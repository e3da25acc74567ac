"""Tables and plots of what ``errors`` measured, and the small form of it that is kept.

A kept stage holds the medians over the sites by direction, what is encoded and codec (``codecs``), and the
signals by site without their histograms, which only the sites of ``histograms`` keep.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.errors import BINS, RANGE

ORDER = ("initial", "early", "middle", "late")
QUANTITIES = ("error", "own_error", "common", "own_gain", "bias")
WITHOUT_MEAN = " without mean"


def in_order(stages: Sequence[str]) -> list[str]:
    """Stages from the start of training on."""
    return sorted(stages, key=lambda name: (ORDER.index(name.split("-")[0]), name))


def stages_of(records: Sequence[dict]) -> dict[str, dict]:
    """Stage -> what was measured, in a kept form, from the records of kind errors."""
    found = {r["id"].split("/")[1]: keep(r["errors"]) for r in records if r["kind"] == "errors"}
    return {name: found[name] for name in in_order(list(found))}


def kind_of(row: dict) -> str:
    """What is encoded: hop 1 of a sum, hop 2 of it, or a gathered slice."""
    return "gathered slice" if row["site"].endswith("gather") else f"sum, hop {row['hop']}"


def keep(errors: dict) -> dict:
    """The small form of what ``errors.probe`` returned; medians to four digits, and the worst error."""
    if "codecs" in errors:
        return errors
    groups = defaultdict(list)
    for row in (dict(zip(errors["columns"], row, strict=True)) for row in errors["rows"]):
        groups[row["direction"], kind_of(row), row["codec"]].append(row)
    codecs = []
    for (direction, kind, codec), rows in sorted(groups.items(), key=lambda item: item[0][:2]):
        medians = {q: float(f"{statistics.median(row[q] for row in rows):.4g}") for q in QUANTITIES}
        worst = max(rows, key=lambda row: row["error"])
        codecs.append({"direction": direction, "what": kind, "codec": codec, **medians})
        codecs[-1] |= {"worst": float(f"{worst['error']:.4g}"), "worst_site": worst["site"]}
    return {"codecs": codecs, "signals": errors["signals"]}


def codec_table(stage: dict) -> list[str]:
    """A row a codec: errors by direction and hop, and what they do to the part of the signal that tells
    tokens apart (``own``)."""
    rows = {(r["direction"], r["what"], r["codec"]): r for r in stage["codecs"]}
    names = dict.fromkeys(r["codec"] for r in stage["codecs"] if not r["codec"].endswith(WITHOUT_MEAN))
    titles = ["codec", "hop 1, %", "hop 2, %", "of the own part, %", "without mean, of the own part, %"]
    titles += ["own gain, %", "common", "bias", "gathered slice, %", "backward hop 1, %", "backward hop 2, %"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name in names:
        hop1, hop2 = (rows["forward", f"sum, hop {hop}", name] for hop in (1, 2))
        free = rows["forward", "sum, hop 2", name + WITHOUT_MEAN]
        cells = [hop1["error"], hop2["error"], hop2["own_error"], free["own_error"]]
        text = [f"{100 * value:.2f}" for value in cells]
        text += [f"{100 * hop2['own_gain']:+.3f}", f"{hop2['common']:.1f}", f"{hop2['bias']:.2f}"]
        text.append(f"{100 * rows['forward', 'gathered slice', name]['error']:.2f}")
        text += [f"{100 * rows['backward', f'sum, hop {hop}', name]['error']:.2f}" for hop in (1, 2)]
        lines.append(f"| {name} | {' | '.join(text)} |")
    return lines


def signal_table(stages: dict[str, dict]) -> list[str]:
    """Share of the mean over the tokens in the signal's energy, median and largest over the sites."""
    lines = ["| stage | direction | what | shared, median % | shared, largest % | at | kurtosis, median |"]
    lines.append("|" + "---|" * 7)
    for name in in_order(list(stages)):
        groups = defaultdict(list)
        for row in stages[name]["signals"]:
            groups[row["direction"], row["site"].split()[-1]].append(row)
        for (direction, what), rows in sorted(groups.items()):
            top = max(rows, key=lambda row: row["shared"])
            median, kurtosis = (statistics.median(r[q] for r in rows) for q in ("shared", "kurtosis"))
            lines.append(
                f"| {name} | {direction} | {what} | {100 * median:.1f} | {100 * top['shared']:.1f} | "
                f"{top['site']} | {kurtosis:.1f} |"
            )
    return lines


def tables(stages: dict[str, dict]) -> str:
    """Everything as Markdown."""
    if not stages:
        return ""
    parts = ["### Signals\n", *signal_table(stages), ""]
    for name, stage in stages.items():
        parts += [f"### Errors of one encoding, {name} (medians over the sites)\n", *codec_table(stage), ""]
    return "\n".join(parts)


def plots(stages: dict[str, dict], folder: Path) -> list[Path]:
    """Shared share by layer, and the distributions that were kept, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not stages:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4))
    for name in in_order(list(stages)):
        for ax, (direction, site) in zip(
            axes, (("forward", "fc2 reduce"), ("backward", "fc1 reduce")), strict=True
        ):
            rows = [r for r in stages[name]["signals"] if r["direction"] == direction]
            rows = [r for r in rows if r["site"].endswith(f" {site}")]
            points = sorted((int(r["site"].split()[0]), 100 * r["shared"]) for r in rows)
            ax.plot(*zip(*points, strict=True), "o-", label=name)
            ax.set_title(f"{direction}, {site}", fontsize=9)
            ax.set_xlabel("layer")
    axes[0].set_ylabel("mean over tokens, % of the energy", fontsize=8)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    written.append(folder / "shared.png")
    figure.savefig(written[-1], dpi=100)
    pyplot.close(figure)

    last = in_order(list(stages))[-1]
    kept = [row for row in stages[last]["signals"] if "histograms" in row]
    if kept:
        columns = 3
        lines = -(-len(kept) // columns)
        figure, grid = pyplot.subplots(lines, columns, figsize=(10, 2.4 * lines), squeeze=False)
        middle = [-RANGE + (i + 0.5) * 2 * RANGE / BINS for i in range(BINS)]
        for ax, row in zip(grid.flat, kept, strict=False):
            for part, counts in row["histograms"].items():
                shares = [count / sum(counts) or float("nan") for count in counts]
                ax.semilogy(
                    middle, shares, label="all" if part == "signal" else "without the mean over tokens"
                )
            ax.set_title(f"{row['direction']} {row['site']}", fontsize=8)
            ax.tick_params(labelsize=7)
        grid[0][0].legend(fontsize=6)
        figure.supxlabel(f"value / rms ({last}; the outermost bins are open)", fontsize=8)
        figure.supylabel("share of the values", fontsize=8)
        figure.tight_layout()
        written.append(folder / "distributions.png")
        figure.savefig(written[-1], dpi=100)
        pyplot.close(figure)
    return written
