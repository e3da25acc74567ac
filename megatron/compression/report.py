"""Writes a run's report: report.json, report.md, loss.png, bytes.png and error.png."""

import json
import re
from pathlib import Path

from megatron.compression.telemetry import CHANNELS, KINDS

DIMENSIONS = {"tensor parallel": "tp.", "data parallel": "dp.", "pipeline parallel": "pp.", "all": ""}
"""What the report sums channels up to, and how their names begin."""


def write_report(report: dict, directory: Path) -> None:
    """Write the report into ``directory``, replacing an earlier rendering of the same run.

    Args:
        report: ``settings``, ``world_size``, ``history`` (reporter.py's rows), ``ledger_by_rank``,
            ``errors``.
        directory: made if it does not exist.
    """
    directory.mkdir(parents=True, exist_ok=True)
    report = {**report, "summary": summarize(report)}
    (directory / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    plots = _plot(report, directory)
    (directory / "report.md").write_text(_markdown(report, plots))


def summarize(report: dict) -> dict:
    """Losses at both ends, and tensor-parallel bytes in one iteration of one GPU (the mean over all ranks).

    Bytes are the mean over the logged iterations, the error probe's own traffic left out.
    """
    training = [row for row in report["history"] if "bytes_per_iteration" in row]
    by_channel = {channel: _mean_bytes(training, channel) for channel in CHANNELS}
    dimensions = {name: _total(by_channel, prefix) for name, prefix in DIMENSIONS.items()}
    sent, plain = dimensions["tensor parallel"]
    return {
        "bytes_per_iteration": {
            channel: {"sent": sent_, "uncompressed": plain_}
            for channel, (sent_, plain_) in by_channel.items()
            if sent_ or plain_
        },
        "bytes_between_nodes": _between_nodes(training),
        "tp_bytes_per_iteration": sent,
        "tp_uncompressed_bytes_per_iteration": plain,
        "tp_ratio": plain / sent if sent else None,
        "dimensions": {
            name: {"sent": sent_, "uncompressed": plain_, "ratio": plain_ / sent_}
            for name, (sent_, plain_) in dimensions.items()
            if sent_
        },
        "first_loss": _end_loss(training, 0),
        "last_loss": _end_loss(training, -1),
        "first_validation_loss": _end_loss(_split(report, "valid"), 0),
        "validation_loss": _end_loss(_split(report, "valid"), -1),
        "test_loss": _end_loss(_split(report, "test"), -1),
    }


def _total(by_channel: dict[str, tuple[float, float]], prefix: str) -> tuple[float, float]:
    """(sent, plain) of all channels that begin with ``prefix``."""
    pairs = [pair for channel, pair in by_channel.items() if channel.startswith(prefix)]
    return sum(sent for sent, _ in pairs), sum(plain for _, plain in pairs)


def _between_nodes(training: list[dict]) -> dict[str, dict[str, float]]:
    """Mean bytes that crossed nodes, by channel; empty where nobody tells them apart."""
    result: dict[str, dict[str, float]] = {}
    for row in training:
        for channel, pair in row.get("bytes_between_nodes", {}).items():
            mean = result.setdefault(channel, {"sent": 0.0, "uncompressed": 0.0})
            mean["sent"] += pair["sent"] / len(training)
            mean["uncompressed"] += pair["plain"] / len(training)
    return result


def _split(report: dict, split: str) -> list[dict]:
    return [row for row in report["history"] if row.get("split") == split]


def _end_loss(rows: list[dict], index: int) -> float | None:
    return next(iter(rows[index]["losses"].values()), None) if rows else None


def _mean_bytes(training: list[dict], channel: str) -> tuple[float, float]:
    sent = plain = 0.0
    for row in training:
        for kind, pair in row["bytes_per_iteration"].get(channel, {}).items():
            if kind != "probe":
                sent += pair["sent"] / len(training)
                plain += pair["plain"] / len(training)
    return sent, plain


def _layer_of(site: str) -> int | None:
    match = re.search(r"layers\.(\d+)", site)
    return int(match.group(1)) if match else None


def _short(site: str) -> str:
    """``decoder.layers.3.mlp.linear_fc2`` -> ``linear_fc2``."""
    return site.rsplit(".", 1)[-1]


def _markdown(report: dict, plots: list[str]) -> str:
    summary = report["summary"]
    lines = [
        "# Communication report",
        "",
        "Bytes: what one GPU sends in one iteration, mean over all ranks.",
        "",
    ]
    lines += ["| channel | sent (MB) | uncompressed (MB) | ratio |", "|---|---|---|---|"]
    for channel, total in summary["bytes_per_iteration"].items():
        crossed = summary["bytes_between_nodes"].get(channel)
        for name, pair in ((channel, total), (f"{channel}, between nodes", crossed)):
            if pair is not None:
                ratio = f"{pair['uncompressed'] / pair['sent']:.3f}" if pair["sent"] else "-"
                sent, plain = pair["sent"] / 1e6, pair["uncompressed"] / 1e6
                lines.append(f"| {name} | {sent:.3f} | {plain:.3f} | {ratio} |")
    lines += [
        "",
        "| dimension | sent (MB) | uncompressed (MB) | ratio | share of all |",
        "|---|---|---|---|---|",
    ]
    everything = summary["dimensions"].get("all", {}).get("sent", 0.0)
    for name, row in summary["dimensions"].items():
        lines.append(
            f"| {name} | {row['sent'] / 1e6:.3f} | {row['uncompressed'] / 1e6:.3f} | {row['ratio']:.3f} | "
            f"{row['sent'] / everything:.1%} |"
        )
    lines += ["", "| loss | first | last |", "|---|---|---|"]
    lines.append(f"| training | {_cell(summary['first_loss'])} | {_cell(summary['last_loss'])} |")
    lines.append(
        f"| validation | {_cell(summary['first_validation_loss'])} | {_cell(summary['validation_loss'])} |"
    )
    if report["errors"]:
        lines += ["", "Relative L2 error of the compressed collectives and messages:", ""]
        lines += ["| site | channel | error | samples |", "|---|---|---|---|"]
        for row in report["errors"]:
            lines.append(
                f"| {row['site']} | {row['channel']} | {row['relative_error']:.5f} | {row['samples']} |"
            )
    lines += [""] + [f"![{name}]({name})" for name in plots]
    lines += ["", "Settings:", "", "```json", json.dumps(report["settings"], indent=1), "```", ""]
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _plot(report: dict, directory: Path) -> list[str]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for name, draw in (("loss.png", _draw_loss), ("bytes.png", _draw_bytes), ("error.png", _draw_errors)):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        if draw(report, axes):
            figure.savefig(directory / name, dpi=120)
            written.append(name)
        plt.close(figure)
    return written


def _draw_loss(report: dict, axes) -> bool:
    training = [row for row in report["history"] if "bytes_per_iteration" in row]
    for label, rows, style in (("training", training, "-"), ("validation", _split(report, "valid"), "o--")):
        rows = [row for row in rows if row["losses"]]
        if rows:
            losses = [next(iter(row["losses"].values())) for row in rows]
            axes.plot([row["iteration"] for row in rows], losses, style, label=label)
    axes.set(xlabel="iteration", ylabel="loss")
    if axes.lines:
        axes.legend()
    return bool(axes.lines)


def _draw_bytes(report: dict, axes) -> bool:
    training = [row for row in report["history"] if "bytes_per_iteration" in row]
    channels = list(report["summary"]["bytes_per_iteration"])
    bottom = [0.0] * len(channels)
    for kind in KINDS:
        heights = []
        for channel in channels:
            pairs = [row["bytes_per_iteration"].get(channel, {}).get(kind) for row in training]
            heights.append(sum(pair["sent"] for pair in pairs if pair) / max(1, len(training)) / 1e6)
        if any(heights):
            axes.bar(channels, heights, bottom=bottom, label=kind)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    plain = [report["summary"]["bytes_per_iteration"][channel]["uncompressed"] / 1e6 for channel in channels]
    axes.plot(channels, plain, "k_", markersize=30, label="uncompressed would be")
    axes.set(ylabel="MB sent by one GPU in one iteration")
    axes.legend()
    return bool(channels)


def _draw_errors(report: dict, axes) -> bool:
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in report["errors"]:
        layer = _layer_of(row["site"])
        if layer is not None:
            series.setdefault((_short(row["site"]), row["channel"]), []).append(
                (layer, row["relative_error"])
            )
    for (site, channel), points in sorted(series.items()):
        points.sort()
        axes.plot(*zip(*points, strict=True), "o-", label=f"{site} {channel}")
    axes.set(xlabel="layer", ylabel="relative L2 error of the all-reduce")
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(fontsize="small")
    return bool(axes.lines)
