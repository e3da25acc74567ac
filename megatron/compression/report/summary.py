"""The figures of a run, out of its history."""

import statistics

from megatron.compression.communication.ledger import DIMENSIONS, TRAFFIC
from megatron.compression.report.log_line import traffic_total


def summarize(report: dict) -> dict:
    """Time, memory, losses at both ends, and bytes of one iteration of one GPU (the mean over all ranks).

    Bytes are the mean over the logged iterations, the error probe's own apart. A training loss is the mean
    of its log interval, as on Megatron's line.
    """
    training = training_rows(report)
    by_traffic = {traffic: _mean_bytes(training, traffic) for traffic in TRAFFIC}
    dimensions = {name: _total(by_traffic, prefix) for name, prefix in {**DIMENSIONS, "all": ""}.items()}
    sent, plain = dimensions["tensor parallel"]
    return {
        "milliseconds_per_iteration": _median_time(training),
        "peak_memory_bytes": report.get("memory", {}),
        "bytes_per_iteration": {
            traffic: {"sent": sent_, "uncompressed": plain_}
            for traffic, (sent_, plain_) in by_traffic.items()
            if sent_ or plain_
        },
        "bytes_between_nodes": _between_nodes(training),
        "probe_bytes_per_iteration": sum(
            kinds["probe"]["sent"]
            for row in training
            for kinds in row["bytes_per_iteration"].values()
            if "probe" in kinds
        )
        / max(1, len(training)),
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
        "first_validation_loss": _end_loss(evaluations(report, "valid"), 0),
        "validation_loss": _end_loss(evaluations(report, "valid"), -1),
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


def _median_time(training: list[dict]) -> float | None:
    """Milliseconds; the first interval is left out, which holds the warm-up."""
    times = [row["milliseconds_per_iteration"] for row in training if "milliseconds_per_iteration" in row]
    return statistics.median(times[1:] or times) if times else None


def _total(by_traffic: dict[str, tuple[float, float]], prefix: str) -> tuple[float, float]:
    pairs = [pair for traffic, pair in by_traffic.items() if traffic.startswith(prefix)]
    return sum(sent for sent, _ in pairs), sum(plain for _, plain in pairs)


def _between_nodes(training: list[dict]) -> dict[str, dict[str, float]]:
    """Mean bytes that crossed nodes, by traffic; empty where nobody tells them apart."""
    result: dict[str, dict[str, float]] = {}
    for row in training:
        for traffic, pair in row.get("bytes_between_nodes", {}).items():
            mean = result.setdefault(traffic, {"sent": 0.0, "uncompressed": 0.0})
            mean["sent"] += pair["sent"] / len(training)
            mean["uncompressed"] += pair["plain"] / len(training)
    return result


def _end_loss(rows: list[dict], index: int) -> float | None:
    return loss_of(rows[index]) if rows else None


def _mean_bytes(training: list[dict], traffic: str) -> tuple[float, float]:
    pairs = [traffic_total(row["bytes_per_iteration"].get(traffic, {})) for row in training]
    count = max(1, len(pairs))
    return sum(sent / count for sent, _ in pairs), sum(plain / count for _, plain in pairs)
