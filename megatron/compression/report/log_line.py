"""Bytes of one log interval as a line behind Megatron's, and as scalars."""

import datetime

from megatron.compression.communication.ledger import DIMENSIONS

MB = 1e6

BytesByKind = dict[str, dict[str, float]]
"""``{kind: {"sent": bytes, "plain": bytes}}`` of one traffic class."""


def log_line(
    iteration: int,
    train_iters: int | None,
    per_iteration: dict[str, BytesByKind],
    between_nodes: dict[str, dict[str, float]] | None = None,
) -> str:
    """Megabytes sent by one GPU in one iteration, by traffic class, and the ratio of what is compressed.

    Args:
        iteration: one-based.
        train_iters: None where nobody knows yet.
        between_nodes: ``{traffic: {"sent", "plain"}}`` of what is known to have crossed nodes.
    """
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
    if probed := probe_bytes(per_iteration):
        line += f" error probe (MB): {probed / MB:.3f} |"
    for name, prefix in DIMENSIONS.items():
        sent, plain = dimension_total(per_iteration, prefix)
        if sent and plain != sent:
            line += f" {name.replace(' ', '-')} ratio: {plain / sent:.3f} |"
    return line


def scalars(per_iteration: dict[str, BytesByKind]) -> dict[str, float]:
    """Scalars of one log interval: bytes by traffic class, the probe's, and a ratio by dimension."""
    result = {}
    for traffic, kinds in per_iteration.items():
        sent, plain = traffic_total(kinds)
        result[f"communication/{traffic} bytes"] = sent
        result[f"communication/{traffic} uncompressed bytes"] = plain
    if probed := probe_bytes(per_iteration):
        result["communication/error probe bytes"] = probed
    for name, prefix in DIMENSIONS.items():
        sent, plain = dimension_total(per_iteration, prefix)
        if sent:
            result[f"communication/{name.replace(' ', '-')} ratio"] = plain / sent
    return result


def traffic_total(kinds: BytesByKind) -> tuple[float, float]:
    """(sent, plain) of a traffic class, without the error probe's own bytes."""
    used = [pair for kind, pair in kinds.items() if kind != "probe"]
    return sum(pair["sent"] for pair in used), sum(pair["plain"] for pair in used)


def probe_bytes(per_iteration: dict[str, BytesByKind]) -> float:
    """What the error probe itself sent."""
    return sum(kinds["probe"]["sent"] for kinds in per_iteration.values() if "probe" in kinds)


def dimension_total(per_iteration: dict[str, BytesByKind], prefix: str) -> tuple[float, float]:
    """(sent, plain) of the traffic whose names begin so (``DIMENSIONS``), what is left exact included."""
    totals = [traffic_total(kinds) for name, kinds in per_iteration.items() if name.startswith(prefix)]
    return sum(sent for sent, _ in totals), sum(plain for _, plain in totals)
