"""The figures of a run: the log line and scalars of an interval, and the summary of a whole history."""

import datetime
import statistics

from megatron.compression.communication.ledger import DIMENSIONS, TRAFFIC

MB = 1e6

BytesByKind = dict[str, dict[str, float]]
"""``{kind: {"sent": bytes, "plain": bytes}}`` of one traffic class."""


def log_line(
    iteration: int,
    train_iters: int | None,
    per_iteration: dict[str, BytesByKind],
    between_nodes: dict[str, dict[str, float]] | None = None,
) -> str:
    """Megabytes sent by one GPU in one iteration, counted from 1, by traffic class, and the ratio of what is
    compressed; ``between_nodes``: ``{traffic: {"sent", "plain"}}`` of what is known to have crossed nodes."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    line = f" [{now}] communication {iteration:8d}"
    line += f"/{train_iters:8d} |" if train_iters else " |"
    for traffic, kinds in per_iteration.items():
        sent, plain = traffic_total(kinds)
        if sent or plain:
            line += f" {traffic} (MB): {sent / MB:.3f}"
            line += f" of {plain / MB:.3f} |" if sent != plain else " |"
        if between_nodes and traffic in between_nodes:
            pair = between_nodes[traffic]
            line += f" between nodes: {pair['sent'] / MB:.3f} of {pair['plain'] / MB:.3f} |"
    for name, prefix in DIMENSIONS.items():
        sent, plain = dimension_total(per_iteration, prefix)
        if sent and plain != sent:
            line += f" {name.replace(' ', '-')} ratio: {plain / sent:.3f} |"
    return line


def scalars(per_iteration: dict[str, BytesByKind]) -> dict[str, float]:
    """Scalars of one log interval: bytes by traffic class, and a ratio by dimension."""
    result = {}
    for traffic, kinds in per_iteration.items():
        sent, plain = traffic_total(kinds)
        result[f"communication/{traffic} bytes"] = sent
        result[f"communication/{traffic} uncompressed bytes"] = plain
    for name, prefix in DIMENSIONS.items():
        sent, plain = dimension_total(per_iteration, prefix)
        if sent:
            result[f"communication/{name.replace(' ', '-')} ratio"] = plain / sent
    return result


def traffic_total(kinds: BytesByKind) -> tuple[float, float]:
    """(sent, plain) of a traffic class."""
    return sum(pair["sent"] for pair in kinds.values()), sum(
        pair["plain"] for pair in kinds.values()
    )


def dimension_total(per_iteration: dict[str, BytesByKind], prefix: str) -> tuple[float, float]:
    """(sent, plain) of the traffic whose names begin so (``DIMENSIONS``), what is left exact included."""
    totals = [
        traffic_total(kinds) for name, kinds in per_iteration.items() if name.startswith(prefix)
    ]
    return sum(sent for sent, _ in totals), sum(plain for _, plain in totals)


def summarize(report: dict) -> dict:
    """Time, memory, losses at both ends (a training loss is the mean of its log interval), and bytes of one
    iteration of one GPU: the mean over all ranks and the logged iterations."""
    training, valid = training_rows(report), evaluations(report, "valid")
    per_iteration = mean_bytes(training)
    totals = {name: traffic_total(per_iteration[name]) for name in TRAFFIC if name in per_iteration}
    crossed = _mean([row.get("bytes_between_nodes", {}) for row in training])
    prefixes = {**DIMENSIONS, "all": ""}
    dimensions = {name: dimension_total(per_iteration, prefix) for name, prefix in prefixes.items()}
    return {
        "milliseconds_per_iteration": _median_time(training),
        "peak_memory_bytes": largest(report.get("memory_by_rank", [])),
        "bytes_per_iteration": {
            name: _pair(*total) for name, total in totals.items() if any(total)
        },
        "bytes_between_nodes": {
            name: _pair(one["sent"], one["plain"]) for name, one in crossed.items()
        },
        "tp_bytes_per_iteration": dimensions["tensor parallel"][0],
        "dimensions": {
            name: _pair(*total) | {"ratio": total[1] / total[0]}
            for name, total in dimensions.items()
            if total[0]
        },
        "first_loss": _end_loss(training, 0),
        "last_loss": _end_loss(training, -1),
        "first_validation_loss": _end_loss(valid, 0),
        "validation_loss": _end_loss(valid, -1),
        "test_loss": _end_loss(evaluations(report, "test"), -1),
    }


def largest(by_rank: list[dict[str, int]]) -> dict[str, int]:
    """The largest value of any rank, by name."""
    return (
        {name: max(rank.get(name, 0) for rank in by_rank) for name in by_rank[0]} if by_rank else {}
    )


def training_rows(report: dict) -> list[dict]:
    """The history's rows of log intervals."""
    return [row for row in report["history"] if "bytes_per_iteration" in row]


def evaluations(report: dict, split: str) -> list[dict]:
    """The history's rows of evaluations of ``valid`` or ``test``."""
    return [row for row in report["history"] if row.get("split") == split]


def loss_of(row: dict) -> float | None:
    """A row's first loss, which is the language model's."""
    return next(iter(row["losses"].values()), None)


def mean_bytes(training: list[dict]) -> dict[str, BytesByKind]:
    """Mean bytes of an iteration, by traffic class and kind."""
    rows = [row["bytes_per_iteration"] for row in training]
    traffic = {name for row in rows for name in row}
    return {name: _mean([row.get(name, {}) for row in rows]) for name in sorted(traffic)}


def _mean(rows: list[BytesByKind]) -> BytesByKind:
    """The mean of pairs of bytes by name, where a row may lack some."""
    result: BytesByKind = {}
    for row in rows:
        for name, pair in row.items():
            mean = result.setdefault(name, {"sent": 0.0, "plain": 0.0})
            for key in mean:
                mean[key] += pair[key] / len(rows)
    return result


def _pair(sent: float, plain: float) -> dict[str, float]:
    return {"sent": sent, "uncompressed": plain}


def _median_time(training: list[dict]) -> float | None:
    """Milliseconds; the first interval is left out, which holds the warm-up."""
    times = [
        row["milliseconds_per_iteration"] for row in training if "milliseconds_per_iteration" in row
    ]
    return statistics.median(times[1:] or times) if times else None


def _end_loss(rows: list[dict], index: int) -> float | None:
    return loss_of(rows[index]) if rows else None
