"""The byte ledger: what was really sent.

Bytes follow the convention of nccl-tests: what one rank of a group of W sends. All-reduce 2 (W-1)/W
of the buffer; all-gather (of the gathered buffer), reduce-scatter and all-to-all (W-1)/W; send and
broadcast the payload.
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
    "dp.outer": "data parallelism: sums of gradients between optimizer instances, or differences of "
    "weights between data centres",
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
    "overflow": "uncompressed: a lossless payload did not fit in this pass, or nobody could say in "
    "time",
    "off": "uncompressed: no codec chosen",
    "auto": "uncompressed: --compression auto compares iterations without, or has seen no gain; a "
    "pass of the loss meter without codecs",
    "exact": "uncompressed by design",
    "fp8": "in Transformer Engine's own fp8, as without compression",
}
"""Reasons: why bytes travel as they do. Reports call a reason a kind."""

PHASES = {
    "train": "training iterations",
    "eval": "evaluation",
    "meter": "forward passes of the loss meter",
}
"""Phases of a run: what the bytes were sent for."""

LINKS = ("", "intra", "inter")
"""Where data-parallel bytes go: inside a node or between nodes; empty where they are not
distinguished."""


def bytes_sent(operation: str, buffer_bytes: int, world_size: int) -> int:
    """Return the bytes that one rank sends in one call.

    Args:
        operation: one of torch.distributed's: all_reduce, all_gather, reduce_scatter, all_to_all,
            broadcast or send.
        buffer_bytes: the size of its buffer: of an all-gather the gathered one, of an all-to-all
            and a reduce-scatter the input.
        world_size: ranks of the group.
    """
    if world_size == 1:
        return 0
    if operation in ("broadcast", "send"):
        return buffer_bytes
    # An all-reduce is a reduce-scatter and an all-gather.
    passes = 2 if operation == "all_reduce" else 1
    return passes * buffer_bytes * (world_size - 1) // world_size


@dataclass
class Tally:
    """What has been counted of one kind of call."""

    calls: int = 0
    sent: int = 0
    """Bytes given to the transport."""
    uncompressed: int = 0
    """Bytes that the uncompressed operation would have sent."""


class Captures(GraphObserver[Counter[tuple[Any, tuple]]]):
    """What one ledger counts while a CUDA graph is captured: (counting method, its arguments) ->
    how often.

    A capture sends nothing; each replay sends what was captured, and is counted in the replay's
    phase. Methods that count add to ``captured`` in place: a call would be a Python frame in each
    message.
    """

    def replaying(self, content: Counter[tuple[Any, tuple]]) -> None:
        for (count, arguments), times in content.items():
            count(*arguments, times=times)

    def release(self) -> None:
        """Free all graphs before process groups are destroyed: NCCL waits for those that hold its
        kernels."""
        # reset frees a graph, and with it the NCCL kernels that it holds.
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
    """Counts bytes given to the transport, by phase, traffic, reason, operation and link.

    Of a compressed operation each transport call is counted, and once, by ``record_plain``, what
    the uncompressed operation would have sent. While a CUDA graph is captured nothing is sent: its
    replays count.
    """

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, str, str, str, str], Tally] = {}
        """By phase (one of ``PHASES``), traffic class, reason, operation and link."""
        self.phase = "train"
        """What sends now: traffic of other phases is kept separate from training's."""
        self.captures = Captures(Counter)
        """What CUDA graphs hold of this ledger's messages; see ``count_replays``."""

    def count_replays(self) -> None:
        """Begin to follow CUDA graphs: what a capture holds is counted at each replay.
        Idempotent."""
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
        reason: str,
        operation: str,
        sent: int,
        uncompressed: int = 0,
        link: str = "",
        times: int = 1,
    ) -> None:
        """Count one transport call, or several alike; in a CUDA graph at each replay.

        Args:
            traffic: one of ``TRAFFIC``.
            reason: why the bytes travel as they do, one of ``KINDS``.
            operation: what the transport was asked for, as ``bytes_sent`` calls it.
            sent: bytes that this rank sends in one call.
            uncompressed: bytes that the uncompressed operation would send; 0 where ``record_plain``
                counts them.
            link: one of ``LINKS``.
            times: calls.

        Raises:
            KeyError: a traffic class, reason or link that nobody knows.
        """
        # In the place of a call, which would be one more Python frame in each message.
        captured = self.captures.captured
        if captured is not None:
            arguments = traffic, reason, operation, sent, uncompressed, link
            captured[self.record, arguments] += times
            return
        key = (self.phase, traffic, reason, operation, link)
        # Names are checked once, when a key is new.
        tally = self.tallies.get(key)
        if tally is None:
            if traffic not in TRAFFIC or reason not in KINDS or link not in LINKS:
                raise KeyError(
                    f"unknown ledger traffic, reason or link: {traffic!r}, {reason!r}, {link!r}"
                )
            tally = self.tallies[key] = Tally()
        tally.calls += times
        tally.sent += times * sent
        tally.uncompressed += times * uncompressed

    def record_uncompressed(
        self, traffic: str, reason: str, operation: str, buffer_bytes: int, world_size: int
    ) -> None:
        """Count one uncompressed transport call.

        Args:
            traffic: one of ``TRAFFIC``.
            reason: why it goes uncompressed, one of ``KINDS``.
            operation: as ``bytes_sent`` calls it.
            buffer_bytes: the size of its buffer.
            world_size: ranks of the group.
        """
        sent = bytes_sent(operation, buffer_bytes, world_size)
        self.record(traffic, reason, operation, sent, sent)

    def record_plain(
        self, traffic: str, operation: str, buffer_bytes: int, world_size: int
    ) -> None:
        """Count what the uncompressed operation would have sent in the place of a compressed one.

        Args:
            traffic: one of ``TRAFFIC``.
            operation: the uncompressed one, as ``bytes_sent`` calls it.
            buffer_bytes: the size of its buffer.
            world_size: ranks of the group.
        """
        uncompressed = bytes_sent(operation, buffer_bytes, world_size)
        self.record(traffic, "compressed", f"instead_of_{operation}", 0, uncompressed)

    def totals(self, phase: str = "train") -> dict[str, dict[str, tuple[int, int]]]:
        """Return ``{traffic: {reason: (sent, uncompressed)}}`` in bytes since the start, all
        classes and reasons present."""
        totals = {traffic: dict.fromkeys(KINDS, (0, 0)) for traffic in TRAFFIC}
        for (tally_phase, traffic, reason, _, _), tally in self.tallies.items():
            if tally_phase == phase:
                sent, uncompressed = totals[traffic][reason]
                totals[traffic][reason] = (sent + tally.sent, uncompressed + tally.uncompressed)
        return totals

    def between_nodes(self) -> dict[str, tuple[int, int]]:
        """Return ``{traffic: (sent, uncompressed)}`` in bytes of what training is known to have
        sent to other nodes so far."""
        totals = dict.fromkeys(TRAFFIC, (0, 0))
        for (phase, traffic, _, _, link), tally in self.tallies.items():
            if phase == "train" and link == "inter":
                sent, uncompressed = totals[traffic]
                totals[traffic] = (sent + tally.sent, uncompressed + tally.uncompressed)
        return totals

    def rows(self) -> list[dict]:
        """Return every tally as a JSON-ready row, under the keys that reports have."""
        rows = []
        for (phase, traffic, reason, operation, link), tally in sorted(self.tallies.items()):
            rows.append(
                {
                    "phase": phase,
                    "traffic": traffic,
                    "kind": reason,
                    "operation": operation,
                    "link": link,
                    "calls": tally.calls,
                    "sent_bytes": tally.sent,
                    "plain_bytes": tally.uncompressed,
                }
            )
        return rows
