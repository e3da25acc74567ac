"""The figures of a run: the log line and scalars of an interval, and the summary of a whole
history."""

import datetime
import statistics

from megatron.compression.communication.ledger import DIMENSIONS, TRAFFIC

MB = 1e6
"""Bytes of a megabyte, here and in every table of a report."""

LOSS_METER = "loss meter"
"""Stands in the history where an evaluation has its split, in rows of the loss meter."""

BytesByKind = dict[str, dict[str, float]]
"""``{kind: {"sent": bytes, "plain": bytes}}`` of one traffic class; plain: without a codec."""


def log_line(
    iteration: int,
    train_iters: int | None,
    per_iteration: dict[str, BytesByKind],
    between_nodes: dict[str, dict[str, float]] | None = None,
) -> str:
    """Return the log's line about the bytes that one GPU sends in one iteration. For example:

         [..] communication       10/     120 | tp.forward (MB): 2.507 of 4.719 | ... |
         tensor-parallel ratio: 1.873 |

    2.507 MB of activations (the traffic class tp.forward) were sent instead of 4.719 MB. All
    traffic of tensor parallelism together would have been 1.873 times as many bytes without a
    codec.

    Args:
        iteration: counted from 1.
        train_iters: the run's length, where it is known.
        per_iteration: by traffic class, then by reason (``ledger.KINDS``), the bytes of one
            iteration: the mean over the log interval.
        between_nodes: ``{traffic: {"sent", "plain"}}`` of what is known to have crossed nodes.
    """
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    line = f" [{now}] communication {iteration:8d}"
    if train_iters:
        line += f"/{train_iters:8d}"
    line += " |"
    for traffic, kinds in per_iteration.items():
        sent, uncompressed = traffic_total(kinds)
        if sent or uncompressed:
            line += f" {traffic} (MB): {sent / MB:.3f}"
            # Without a codec both are equal, and one number says it.
            if sent != uncompressed:
                line += f" of {uncompressed / MB:.3f}"
            line += " |"
        if between_nodes and traffic in between_nodes:
            pair = between_nodes[traffic]
            line += f" between nodes: {pair['sent'] / MB:.3f} of {pair['plain'] / MB:.3f} |"
    for name, prefix in DIMENSIONS.items():
        sent, uncompressed = dimension_total(per_iteration, prefix)
        if sent and uncompressed != sent:
            line += f" {name.replace(' ', '-')} ratio: {uncompressed / sent:.3f} |"
    return line


def scalars(per_iteration: dict[str, BytesByKind]) -> dict[str, float]:
    """Return the scalars of one log interval: bytes by traffic class, and a ratio by dimension."""
    result = {}
    for traffic, kinds in per_iteration.items():
        sent, uncompressed = traffic_total(kinds)
        result[f"communication/{traffic} bytes"] = sent
        result[f"communication/{traffic} uncompressed bytes"] = uncompressed
    for name, prefix in DIMENSIONS.items():
        sent, uncompressed = dimension_total(per_iteration, prefix)
        if sent:
            # Also where nothing is compressed (1.0): a tracker's curve has no gaps then.
            result[f"communication/{name.replace(' ', '-')} ratio"] = uncompressed / sent
    return result


def traffic_total(kinds: BytesByKind) -> tuple[float, float]:
    """Return (sent, uncompressed) bytes of a traffic class, over all kinds."""
    sent = sum(pair["sent"] for pair in kinds.values())
    uncompressed = sum(pair["plain"] for pair in kinds.values())
    return sent, uncompressed


def dimension_total(per_iteration: dict[str, BytesByKind], prefix: str) -> tuple[float, float]:
    """Return (sent, uncompressed) bytes of all traffic classes whose names begin with ``prefix``.

    What is left exact by design counts too, so that ratios are those of whole dimensions.
    """
    sent = 0.0
    uncompressed = 0.0
    for name, kinds in per_iteration.items():
        if name.startswith(prefix):
            class_sent, class_uncompressed = traffic_total(kinds)
            sent += class_sent
            uncompressed += class_uncompressed
    return sent, uncompressed


def summarize(report: dict) -> dict:
    """Return the summary of a report: time, memory, losses at both ends, bytes.

    Bytes are those of one iteration of one GPU, the mean over all ranks and logged iterations. A
    training loss is the mean of its log interval. Time is the median of the log intervals without
    the first one.
    """
    training = training_rows(report)
    validation = evaluations(report, "valid")
    measured_costs = evaluations(report, LOSS_METER)
    per_iteration = mean_bytes(training)
    # In the ledger's order of traffic classes, which is that of every table.
    totals = {name: traffic_total(per_iteration[name]) for name in TRAFFIC if name in per_iteration}
    crossed = _mean([row.get("bytes_between_nodes", {}) for row in training])
    # Every traffic class begins with the empty text: that is the whole run.
    prefixes = {**DIMENSIONS, "all": ""}
    dimensions = {name: dimension_total(per_iteration, prefix) for name, prefix in prefixes.items()}
    return {
        "milliseconds_per_iteration": _median_time(training),
        "peak_memory_bytes": largest(report.get("memory_by_rank", [])),
        "bytes_per_iteration": {
            name: _pair(*total) for name, total in totals.items() if any(total)
        },
        "bytes_between_nodes": {
            name: _pair(pair["sent"], pair["plain"]) for name, pair in crossed.items()
        },
        "tp_bytes_per_iteration": dimensions["tensor parallel"][0],
        "dimensions": {
            name: {**_pair(sent, uncompressed), "ratio": uncompressed / sent}
            for name, (sent, uncompressed) in dimensions.items()
            if sent
        },
        "first_loss": _loss_at(training, 0),
        "last_loss": _loss_at(training, -1),
        "first_validation_loss": _loss_at(validation, 0),
        "validation_loss": _loss_at(validation, -1),
        "cost_in_loss": measured_costs[-1]["cost"] if measured_costs else None,
        "test_loss": _loss_at(evaluations(report, "test"), -1),
    }


def largest(by_rank: list[dict[str, int]]) -> dict[str, int]:
    """Return the largest value of any rank, by name."""
    if not by_rank:
        return {}
    return {name: max(rank.get(name, 0) for rank in by_rank) for name in by_rank[0]}


def training_rows(report: dict) -> list[dict]:
    """Return the history's rows of log intervals."""
    return [row for row in report["history"] if "bytes_per_iteration" in row]


def evaluations(report: dict, split: str) -> list[dict]:
    """Return the history's rows of evaluations of ``valid`` or ``test``."""
    return [row for row in report["history"] if row.get("split") == split]


def loss_of(row: dict) -> float | None:
    """Return a row's first loss, which is the language model's."""
    return next(iter(row["losses"].values()), None)


def mean_bytes(training: list[dict]) -> dict[str, BytesByKind]:
    """Return the mean bytes of an iteration, by traffic class and kind."""
    rows = [row["bytes_per_iteration"] for row in training]
    traffic = {name for row in rows for name in row}
    return {name: _mean([row.get(name, {}) for row in rows]) for name in sorted(traffic)}


def _mean(rows: list[BytesByKind]) -> BytesByKind:
    """Return the mean of pairs of bytes by name; a name that a row lacks counts as zero there."""
    result: BytesByKind = {}
    for row in rows:
        for name, pair in row.items():
            mean = result.setdefault(name, {"sent": 0.0, "plain": 0.0})
            for key in mean:
                mean[key] += pair[key] / len(rows)
    return result


def _pair(sent: float, uncompressed: float) -> dict[str, float]:
    return {"sent": sent, "uncompressed": uncompressed}


def _median_time(training: list[dict]) -> float | None:
    """Return milliseconds an iteration: the median of the intervals after the first, which warms
    up."""
    times = [
        row["milliseconds_per_iteration"] for row in training if "milliseconds_per_iteration" in row
    ]
    if not times:
        return None
    # A run of one interval has no other to take.
    return statistics.median(times[1:] or times)


def _loss_at(rows: list[dict], index: int) -> float | None:
    return loss_of(rows[index]) if rows else None
