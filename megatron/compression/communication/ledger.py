"""The byte ledger: what was really sent.

Bytes follow the convention of nccl-tests: what one rank of a group of W sends. All-reduce 2 (W-1)/W of the
buffer; all-gather (of the gathered buffer), reduce-scatter and all-to-all (W-1)/W; send and broadcast the
payload.
"""

import atexit
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

from megatron.compression.names import PARALLELISMS
from megatron.compression.patches import process
from taco_kernels.common.graph_events import GraphObserver, ignore, observe

TRAFFIC = {
    "tp.forward": "tensor parallelism: activations",
    "tp.backward": "tensor parallelism: gradients of activations",
    "tp.other": "tensor parallelism: loss terms, the batch, gradients of norms and biases",
    "dp.gradient": "data parallelism: gradients of the weights",
    "dp.outer": "data parallelism: sums of gradients between optimizer instances (sites)",
    "dp.weight": "data parallelism: updated weights",
    "pp.forward": "pipeline parallelism: activations between stages",
    "pp.backward": "pipeline parallelism: gradients between stages",
    "pp.other": "pipeline parallelism: the sum of tied embeddings' gradients",
    "cp.forward": "context parallelism: keys and values",
    "cp.backward": "context parallelism: gradients of keys and values",
    "ep.forward": "expert parallelism: tokens on their way to experts and back",
    "ep.backward": "expert parallelism: gradients of those tokens",
    "ep.other": "expert parallelism: router probabilities, indices and counts of tokens",
}
"""Classes of traffic: which dimension of parallelism sends, what, and in which direction."""

DIMENSIONS = {kind.title: kind.traffic for kind in PARALLELISMS.values()}
"""How the names of a dimension's traffic begin."""

KINDS = {
    "compressed": "a codec's payload",
    "small": "uncompressed: the message is under the size threshold",
    "warmup": "uncompressed: before the first compressed iteration",
    "excluded": "uncompressed: a layer that is left out by choice",
    "guarded": "uncompressed: the site's error passed the bound",
    "evaluation": "uncompressed: evaluation with --validate-uncompressed",
    "overflow": "uncompressed: a lossless payload did not fit in this pass, or nobody could say in time",
    "off": "uncompressed: no codec chosen",
    "auto": "uncompressed: --compression auto compares iterations without, or has seen no gain",
    "exact": "uncompressed by design",
    "fp8": "in Transformer Engine's own fp8, as without compression",
}
"""Why bytes travel as they do."""

LINKS = ("", "intra", "inter")
"""Where data-parallel bytes go: inside a node or between nodes; empty where they are not distinguished."""


def bytes_sent(operation: str, buffer_bytes: int, world_size: int) -> int:
    """Bytes that one rank sends in one call over a buffer of ``buffer_bytes``: of an all-gather the gathered
    one, of an all-to-all and a reduce-scatter the input."""
    if world_size == 1:
        return 0
    if operation in ("broadcast", "send"):
        return buffer_bytes
    return buffer_bytes * (world_size - 1) * (2 if operation == "all_reduce" else 1) // world_size


@dataclass
class Tally:
    """Calls, bytes sent, and the bytes that the uncompressed operation would have sent."""

    calls: int = 0
    sent: int = 0
    plain: int = 0


class Captures(GraphObserver[Counter[tuple[Any, tuple]]]):
    """What one ledger counts while a CUDA graph is captured: (counting method, its arguments) -> how often.

    A capture sends nothing; each replay sends what was captured, and is counted in the replay's phase.
    Methods that count add to ``captured`` in place: a call would be a Python frame in each message.
    """

    def replaying(self, content: Counter[tuple[Any, tuple]]) -> None:
        for (count, arguments), times in content.items():
            count(*arguments, times=times)

    def release(self) -> None:
        """Free all graphs before process groups are destroyed: NCCL waits for those that hold its kernels."""
        for graph in list(self.contents):
            graph.reset()
        self.contents.clear()


_observing: "weakref.WeakSet[Captures]" = weakref.WeakSet()
"""Captures whose graphs have to be freed before process groups are destroyed."""


def release_graphs() -> None:
    """Free the graphs of all ledgers that count replays."""
    for captures in list(_observing):
        captures.release()


class Ledger:
    """Counts bytes given to the transport, by phase, traffic, kind, operation and link. Of a compressed
    operation: each transport call, and once what the uncompressed one would have sent (``record_plain``)."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, str, str, str, str], Tally] = {}
        self.evaluating = False
        """Set during evaluation: its traffic is kept separate from the training iterations'."""
        self.captures = Captures(Counter)
        """What CUDA graphs hold of this ledger's messages; see ``count_replays``."""

    def count_replays(self) -> None:
        """Begin to follow CUDA graphs: what a capture holds is counted at each replay. Idempotent."""
        if not _observing:
            atexit.register(release_graphs)
        _observing.add(self.captures)
        observe(self.captures)
        process.before_process_groups_end(release_graphs)

    def ignore_replays(self) -> None:
        """Stop following CUDA graphs: what they hold is not counted any more."""
        ignore(self.captures)
        _observing.discard(self.captures)
        if not _observing:
            atexit.unregister(release_graphs)

    def record(
        self,
        traffic: str,
        kind: str,
        operation: str,
        sent: int,
        plain: int = 0,
        link: str = "",
        times: int = 1,
    ) -> None:
        """Count one transport call, or several alike; in a CUDA graph at each replay. ``plain``: what the
        uncompressed operation would send, 0 where ``record_plain`` says it."""
        captured = self.captures.captured
        if captured is not None:
            captured[self.record, (traffic, kind, operation, sent, plain, link)] += times
            return
        key = ("eval" if self.evaluating else "train", traffic, kind, operation, link)
        tally = self.tallies.get(key)
        if tally is None:
            if traffic not in TRAFFIC or kind not in KINDS or link not in LINKS:
                raise KeyError(
                    f"unknown ledger traffic, kind or link: {traffic!r}, {kind!r}, {link!r}"
                )
            tally = self.tallies[key] = Tally()
        tally.calls += times
        tally.sent += times * sent
        tally.plain += times * plain

    def record_uncompressed(
        self, traffic: str, kind: str, operation: str, buffer_bytes: int, world_size: int
    ) -> None:
        """Count one uncompressed transport call over a buffer of ``buffer_bytes``."""
        sent = bytes_sent(operation, buffer_bytes, world_size)
        self.record(traffic, kind, operation, sent, sent)

    def record_plain(
        self, traffic: str, operation: str, buffer_bytes: int, world_size: int
    ) -> None:
        """Say what the uncompressed operation would have sent for a compressed one."""
        plain = bytes_sent(operation, buffer_bytes, world_size)
        self.record(traffic, "compressed", f"instead_of_{operation}", 0, plain)

    def totals(self, phase: str = "train") -> dict[str, dict[str, tuple[int, int]]]:
        """``{traffic: {kind: (sent, plain)}}`` since the start, all classes and kinds present."""
        totals = {traffic: dict.fromkeys(KINDS, (0, 0)) for traffic in TRAFFIC}
        for (tally_phase, traffic, kind, _, _), tally in self.tallies.items():
            if tally_phase == phase:
                sent, plain = totals[traffic][kind]
                totals[traffic][kind] = (sent + tally.sent, plain + tally.plain)
        return totals

    def between_nodes(self) -> dict[str, tuple[int, int]]:
        """``{traffic: (sent, plain)}`` of what training is known to have sent to other nodes so far."""
        totals = dict.fromkeys(TRAFFIC, (0, 0))
        for (phase, traffic, _, _, link), tally in self.tallies.items():
            if phase == "train" and link == "inter":
                sent, plain = totals[traffic]
                totals[traffic] = (sent + tally.sent, plain + tally.plain)
        return totals

    def rows(self) -> list[dict]:
        """Every tally as a JSON-ready row."""
        names = (
            "phase",
            "traffic",
            "kind",
            "operation",
            "link",
            "calls",
            "sent_bytes",
            "plain_bytes",
        )
        return [
            dict(zip(names, (*key, tally.calls, tally.sent, tally.plain), strict=True))
            for key, tally in sorted(self.tallies.items())
        ]
