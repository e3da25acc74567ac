"""The figures of a run, out of its history."""

import statistics

from megatron.compression.communication.ledger import DIMENSIONS, TRAFFIC
from megatron.compression.report.log_line import BytesByKind, dimension_total, probe_bytes, traffic_total


def summarize(report: dict) -> dict:
    """Time, memory, losses at both ends, and bytes of one iteration of one GPU (the mean over all ranks).

    Bytes are the mean over the logged iterations, the error probe's own apart. A training loss is the mean
    of its log interval, as on Megatron's line.
    """
    training, valid = training_rows(report), evaluations(report, "valid")
    per_iteration = mean_bytes(training)
    totals = {
        traffic: traffic_total(per_iteration[traffic]) for traffic in TRAFFIC if traffic in per_iteration
    }
    crossed = _mean([row.get("bytes_between_nodes", {}) for row in training])
    prefixes = {**DIMENSIONS, "all": ""}
    dimensions = {name: dimension_total(per_iteration, prefix) for name, prefix in prefixes.items()}
    return {
        "milliseconds_per_iteration": _median_time(training),
        "peak_memory_bytes": report.get("memory", {}),
        "bytes_per_iteration": {name: _pair(*total) for name, total in totals.items() if any(total)},
        "bytes_between_nodes": {name: _pair(one["sent"], one["plain"]) for name, one in crossed.items()},
        "probe_bytes_per_iteration": probe_bytes(per_iteration),
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
    times = [row["milliseconds_per_iteration"] for row in training if "milliseconds_per_iteration" in row]
    return statistics.median(times[1:] or times) if times else None


def _end_loss(rows: list[dict], index: int) -> float | None:
    return loss_of(rows[index]) if rows else None
