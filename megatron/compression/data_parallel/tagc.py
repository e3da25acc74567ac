"""TAGC: sparsified gradients with error feedback, summed as homomorphic sketches.

Source: TAGC (arXiv 2504.05638) over LHC (arXiv 2402.07529). A reduction takes two exchanges:

1. Notes: the exponents that fix a common grid, and classes of sampled magnitudes. Their maximum over the
   ranks lets every rank choose the same share of its largest values, one whose union fits the sketch
   (taco_kernels.homomorphic.selection).
2. Sketches, each to the owner of its shard, which adds them up and peels the sum. What is not sent, by choice
   or by rounding, stays in error feedback.

Without the distributed optimizer a third exchange gathers the summed sketches, which every rank peels: the
same bits everywhere.
"""

from dataclasses import dataclass

import torch

from megatron.compression.collectives.work import CompressedWork
from megatron.compression.data_parallel.bucket import GradientBucket
from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from megatron.compression.data_parallel.tagc_exchange import start_all_reduce, start_maximum, start_to_owners
from megatron.compression.data_parallel.tagc_layers import Segment, Share, shares_of
from megatron.compression.data_parallel.tagc_monitor import TagcMonitor
from megatron.compression.data_parallel.topology import INTER, INTRA
from taco_kernels import homomorphic as lhc
from taco_kernels.homomorphic.layout import ALIGNMENT, NON_FINITE

SEED = 0x7A6C


@dataclass(frozen=True)
class TagcSettings:
    """What the flags say, in the terms of the sketch."""

    keep: float
    """Largest share of its values that a rank sends."""
    layers: frozenset[str]
    """See tagc_layers.LAYERS."""
    sketch: lhc.SketchConfig


class _Part:
    """The shares of one size: their rows are handled together."""

    def __init__(
        self, owners: list[int], numel: int, settings: TagcSettings, senders: int, feedback: ErrorFeedback
    ) -> None:
        self.owners, self.keep, self.senders = owners, settings.keep, senders
        self.layout = lhc.Layout(settings.sketch, numel)
        self.feedback = feedback

    def take_notes(self, values: torch.Tensor) -> torch.Tensor:
        """Take in the gradients ``[owners, numel]``; returns uint8 notes."""
        self.values = self.feedback.compensated(0, values)
        self.thresholds, classes = lhc.candidates(self.values, self.keep)
        return torch.cat([lhc.row_exponents(self.values, self.layout), classes], dim=1)

    def encode(self, notes: torch.Tensor) -> torch.Tensor:
        """Sketches uint8 ``[owners, bytes]`` from the maximum of all ranks' notes; the rest is remembered."""
        self.exponents, classes = notes.split([self.layout.rows, notes.shape[1] - self.layout.rows], dim=1)
        self.exponents = self.exponents.contiguous()
        threshold = lhc.choose(self.thresholds, classes, self.layout.exact_density)
        values, self.values, self.thresholds = self.values, None, None
        wires = lhc.encode(values, threshold, self.exponents, self.layout, self.senders, SEED, values)
        # A step with a NaN or infinity is skipped: keep what was remembered before it (remember does so for
        # values that are not finite).
        spoiled = (self.exponents == NON_FINITE).any()
        self.feedback.remember(0, values.masked_fill_(spoiled, torch.nan))
        return wires


class TagcGradientSync:
    """A ``GradientSync`` by sparsification and sketches.

    Args:
        bucket: what to sum.
        settings: sparsity, layers, sketch.
        new_feedback: makes the memory of one part.
        monitor: counts what the sketches could not recover.
    """

    def __init__(
        self, bucket: GradientBucket, settings: TagcSettings, new_feedback, monitor: TagcMonitor
    ) -> None:
        self.bucket, self.monitor = bucket, monitor
        world = bucket.topology.world_size
        self.shares: list[Share] = shares_of(bucket, settings.layers)
        sizes = sorted({share.compressed_numel for share in self.shares} - {0}, reverse=True)
        self.parts: list[_Part] = []
        for size in sizes:
            owners = [owner for owner, share in enumerate(self.shares) if share.compressed_numel == size]
            feedback = new_feedback()
            feedback.allocate(len(owners), [(0, size)], bucket.gradients.device)
            self.parts.append(_Part(owners, size, settings, world, feedback))
        self.part_of = {owner: part for part in self.parts for owner in part.owners}
        compressed = sum(share.compressed_numel for share in self.shares)
        self.name = f"tagc, {compressed} of {bucket.numel} values compressed"

    @property
    def covering_ranks(self) -> int:
        """Ranks whose error feedback covers the same value: all."""
        return self.bucket.topology.world_size

    def start(self) -> CompressedWork:
        """See ``GradientSync.start``."""
        bucket, flat = self.bucket, self.bucket.gradients
        compressed = sum(share.compressed_numel for share in self.shares)
        operation = "reduce_scatter" if bucket.sharded else "all_reduce"
        if compressed:
            size = compressed * flat.element_size()
            bucket.topology.record_plain(bucket.ledger, "dp.gradient", operation, size)
        exact, exact_work = None, None
        if not bucket.sharded and self.shares[0].exact:
            exact = gathered(flat, self.shares[0].exact)
            exact_work = start_all_reduce(exact, bucket)
        notes = [
            part.take_notes(
                torch.stack([gathered(flat, self.shares[owner].compressed) for owner in part.owners])
            )
            for part in self.parts
        ]
        joined = torch.cat([note.view(-1) for note in notes]) if notes else None
        work = start_maximum(joined, bucket) if notes else None

        def send() -> CompressedWork | torch.Tensor:
            if exact is not None:
                exact_work.wait()
                scattered(exact, flat, self.shares[0].exact, bucket.scale)
            if joined is None and not bucket.sharded:
                return flat
            pieces = joined.split([note.numel() for note in notes]) if notes else []
            return self._send([piece.view_as(note) for piece, note in zip(pieces, notes, strict=True)])

        return CompressedWork(work, send)

    def _send(self, notes: list[torch.Tensor]) -> CompressedWork:
        bucket, flat = self.bucket, self.bucket.gradients
        wires = [part.encode(note) for part, note in zip(self.parts, notes, strict=True)]
        wire_of = {
            owner: row
            for part, rows in zip(self.parts, wires, strict=True)
            for owner, row in zip(part.owners, rows, strict=True)
        }
        payloads, exact_bytes = [], []
        for owner, share in enumerate(self.shares):
            exact = gathered(flat, share.exact) if bucket.sharded and share.exact else None
            payload, size = joined_payload(exact, wire_of.get(owner), flat)
            payloads.append(payload)
            exact_bytes.append(size)
        topology = bucket.topology
        if topology.two_hops:
            return self._inside_node(payloads, exact_bytes)
        received, work = start_to_owners(payloads, exact_bytes, bucket)
        return CompressedWork(work, lambda: self._finish(received, exact_bytes[topology.rank], flat.dtype))

    def _inside_node(self, payloads: list[torch.Tensor], exact_bytes: list[int]) -> CompressedWork:
        """Give each rank of the node what goes to the ranks with its index, to add it up first.

        The sum of sketches is as large as one of them: between nodes, each node sends one.
        """
        bucket, topology = self.bucket, self.bucket.topology
        of_index = [
            list(range(index, topology.world_size, topology.local)) for index in range(topology.local)
        ]
        received, work = start_to_owners(
            [torch.cat([payloads[owner] for owner in owners]) for owners in of_index],
            [sum(exact_bytes[owner] for owner in owners) for owners in of_index],
            bucket,
            INTRA,
        )

        def between_nodes() -> CompressedWork:
            sums, sizes, position = [], [], 0
            for owner in of_index[topology.index]:
                end = position + payloads[owner].numel()
                rows, share = received[:, position:end], self.shares[owner]
                exact = wire = None
                if exact_bytes[owner]:
                    exact = exact_sum(rows, share.exact_numel, bucket.gradients.dtype)
                if share.compressed:
                    layout = self.part_of[owner].layout
                    wire = lhc.pack(*lhc.combine(rows[:, exact_bytes[owner] :], layout), layout)
                payload, size = joined_payload(exact, wire, bucket.gradients)
                sums.append(payload)
                sizes.append(size)
                position = end
            arrived, work = start_to_owners(sums, sizes, bucket, INTER)
            own = sizes[topology.rank // topology.local]
            return CompressedWork(work, lambda: self._finish(arrived, own, torch.float32))

        return CompressedWork(work, between_nodes)

    def _finish(self, received: torch.Tensor, exact_bytes: int, dtype: torch.dtype):
        """Sum the own share of all senders, uint8 ``[S, bytes]``; its exact values are of ``dtype``."""
        if self.bucket.sharded:
            return self._finish_shard(received, exact_bytes, dtype)
        return self._gather_sums(received)

    def _finish_shard(self, received: torch.Tensor, exact_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        bucket, rank = self.bucket, self.bucket.topology.rank
        share = self.shares[rank]
        if share.exact:
            total = exact_sum(received, share.exact_numel, dtype)
            scattered(total, bucket.gradients, share.exact, bucket.scale)
        if share.compressed:
            self._decode(received[:, exact_bytes:], rank)
        return bucket.shard

    def _gather_sums(self, received: torch.Tensor) -> CompressedWork:
        """Add up the own share's sketches and gather every owner's sum."""
        topology = self.bucket.topology
        largest = self.parts[0].layout
        own = received.new_zeros(largest.wire_bytes)
        if topology.rank in self.part_of:
            layout = self.part_of[topology.rank].layout
            own[: layout.wire_bytes] = lhc.pack(*lhc.combine(received, layout), layout)
        sums, work = self.bucket.transport().all_gather(own, async_op=True)

        def spread() -> torch.Tensor:
            for owner, part in self.part_of.items():
                self._decode(sums[owner : owner + 1, : part.layout.wire_bytes], owner)
            return self.bucket.gradients

        return CompressedWork(work, spread)

    def _decode(self, wires: torch.Tensor, owner: int) -> None:
        """Peel the sum of ``wires`` into the owner's segments."""
        part, bucket = self.part_of[owner], self.bucket
        cells, words = lhc.combine(wires, part.layout)
        exponents = part.exponents[part.owners.index(owner)]
        decoded = lhc.decode(cells, words, exponents, part.layout, part.senders, SEED)
        scattered(decoded.values, bucket.gradients, self.shares[owner].compressed, bucket.scale)
        if bucket.sharded or owner == bucket.topology.rank:
            self.monitor.add(decoded.counters, part.layout)

    def state(self) -> dict[str, torch.Tensor]:
        """See ``GradientSync.state``: what error feedback holds back."""
        flat = torch.zeros(self.bucket.numel, device=self.bucket.gradients.device)
        for part in self.parts:
            for owner, row in zip(part.owners, part.feedback.values(), strict=True):
                scattered(row, flat, self.shares[owner].compressed)
        return {"error_feedback": flat} if self.parts else {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See ``GradientSync.load_state``."""
        flat = state.get("error_feedback")
        if flat is None:
            flat = torch.zeros(self.bucket.numel, device=self.bucket.gradients.device)
        for part in self.parts:
            rows = [gathered(flat, self.shares[owner].compressed) for owner in part.owners]
            part.feedback.set_values(torch.stack(rows).float())


def joined_payload(
    exact: torch.Tensor | None, wire: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """uint8: exact values, zeros up to a multiple of ALIGNMENT, a wire; and the bytes before the wire."""
    pieces, size = [], 0
    if exact is not None:
        raw = exact.view(torch.uint8)
        pieces.append(torch.nn.functional.pad(raw, (0, -raw.numel() % ALIGNMENT)))
        size = pieces[0].numel()
    if wire is not None:
        pieces.append(wire)
    return (torch.cat(pieces) if pieces else like.new_empty(0, dtype=torch.uint8)), size


def exact_sum(rows: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """fp32 ``[numel]``: the values at the front of each sender's bytes, added in the order of the senders."""
    values = rows[:, : numel * dtype.itemsize].contiguous().view(dtype)
    total = values[0].float()
    if dtype == torch.float32:
        total = total.clone()
    for row in values[1:]:
        total += row
    return total


def gathered(flat: torch.Tensor, segments: tuple[Segment, ...]) -> torch.Tensor:
    """The segments of ``flat`` end to end."""
    return torch.cat([flat[begin:end] for begin, end in segments])


def scattered(
    values: torch.Tensor, flat: torch.Tensor, segments: tuple[Segment, ...], scale: float = 1.0
) -> None:
    """Write ``values`` times ``scale`` into the segments of ``flat``."""
    if scale != 1.0:
        values = values * scale
    position = 0
    for begin, end in segments:
        flat[begin:end] = values[position : position + end - begin]
        position += end - begin
