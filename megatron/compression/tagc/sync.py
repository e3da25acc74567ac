"""TAGC: sparsified gradients with a memory, summed as count sketches, or as values with a bitmap.

Source: TAGC (arXiv 2504.05638) over LHC (arXiv 2402.07529). A reduction takes two exchanges:

1. Metadata: the exponents that fix a common grid, and classes of sampled magnitudes. Their maximum over the
   ranks lets every rank choose the same share of its largest values, one whose union fits the sketch
   (taco_kernels.count_sketch.selection).
2. Sketches, each to the owner of its shard, which adds them up and peels the sum. What is not sent, by choice
   or by rounding, is remembered.

Without the distributed optimizer a third exchange gathers the summed sketches, which every rank peels: the
same bits everywhere.
"""

import torch
import torch.distributed as dist

from megatron.compression.communication.collectives import sum_in_order
from megatron.compression.communication.topology import INTER, INTRA
from megatron.compression.communication.work import Work
from megatron.compression.data_parallel.compressor import GradientBucket, GradientSync
from megatron.compression.tagc.monitor import TagcMonitor
from megatron.compression.tagc.parts import (
    BitmapPart,
    Part,
    PartSettings,
    Segment,
    Share,
    SketchPart,
    Sum,
    shares_of,
)
from taco_kernels.common import ALIGNMENT
from taco_kernels.count_sketch import Decoded


class TagcGradientSync(GradientSync):
    """A ``GradientSync`` by sparsification and sketches."""

    def __init__(self, bucket: GradientBucket, settings: PartSettings, monitor: TagcMonitor) -> None:
        self.bucket, self.monitor = bucket, monitor
        self.shares: list[Share] = shares_of(bucket, settings.layers)
        sizes = sorted({share.compressed_numel for share in self.shares} - {0}, reverse=True)
        self.parts: list[Part] = []
        for size in sizes:
            owners = [owner for owner, share in enumerate(self.shares) if share.compressed_numel == size]
            kind = SketchPart if settings.wire == "sketch" else BitmapPart
            self.parts.append(kind(owners, size, settings, bucket.topology, bucket.gradients.device))
        self.part_of = {owner: part for part in self.parts for owner in part.owners}

    def start(self) -> Work:
        """See ``GradientSync.start``."""
        bucket, flat = self.bucket, self.bucket.gradients
        compressed = sum(share.compressed_numel for share in self.shares)
        self.monitor.sums += 1
        if compressed:
            bucket.record_plain(compressed * flat.element_size())
        exact, exact_work = None, None
        if not bucket.sharded and self.shares[0].exact:
            exact = gathered(flat, self.shares[0].exact)
            exact_work = bucket.all_reduce(exact, "excluded")
        metadata = [
            part.add_memory(rows_of(flat, [self.shares[owner].compressed for owner in part.owners]))
            for part in self.parts
        ]
        sizes = [one.numel() for one in metadata if one is not None]
        joined = torch.cat([one.view(-1) for one in metadata if one is not None]) if sizes else None
        work = bucket.all_reduce(joined, op=dist.ReduceOp.MAX) if sizes else None

        def send() -> Work | torch.Tensor:
            if exact is not None:
                exact_work.wait()
                scattered(exact, flat, self.shares[0].exact, bucket.scale)
            if not self.parts and not bucket.sharded:
                return flat
            agreed = metadata
            if sizes:
                agreed = [p.view_as(m) for p, m in zip(joined.split(sizes), metadata, strict=True)]
            return self._send(agreed)

        if sizes or exact is not None:
            return Work(work, send)
        outcome = send()  # nothing to wait for before the payloads
        return outcome if isinstance(outcome, Work) else Work.completed(outcome)

    def _send(self, metadata: list[torch.Tensor | None]) -> Work:
        bucket, flat = self.bucket, self.bucket.gradients
        wires = [part.encode(own) for part, own in zip(self.parts, metadata, strict=True)]
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
        own = exact_bytes[topology.rank]
        return Work(work, lambda: self._finish(received, own, flat.dtype, Sum.OWN))

    def _inside_node(self, payloads: list[torch.Tensor], exact_bytes: list[int]) -> Work:
        """Give each rank of the node what goes to the ranks with its index, to add it up first.

        The sum of sketches is as large as one of them, that of packed values as their union: less between
        nodes than all of them, either way.
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

        def between_nodes() -> Work:
            sums, sizes, position = [], [], 0
            for owner in of_index[topology.index]:
                end = position + payloads[owner].numel()
                rows, share = received[:, position:end], self.shares[owner]
                exact = wire = None
                if exact_bytes[owner]:
                    exact = exact_sum(rows, share.exact_numel, bucket.gradients.dtype)
                if share.compressed:
                    wire = self.part_of[owner].add_up(rows[:, exact_bytes[owner] :], owner, Sum.OWN, Sum.NODE)
                payload, size = joined_payload(exact, wire, bucket.gradients)
                sums.append(payload)
                sizes.append(size)
                position = end
            arrived, work = start_to_owners(sums, sizes, bucket, INTER)
            own = sizes[topology.rank // topology.local]
            return Work(work, lambda: self._finish(arrived, own, torch.float32, Sum.NODE))

        return Work(work, between_nodes)

    def _finish(self, received: torch.Tensor, exact_bytes: int, dtype: torch.dtype, of: Sum):
        """Add up the own share, uint8 ``[S, bytes]``: sums ``of`` some; exact values are of ``dtype``."""
        if not self.bucket.sharded:
            return self._gather_sums(received, of)
        bucket, rank = self.bucket, self.bucket.topology.rank
        share = self.shares[rank]
        if share.exact:
            total = exact_sum(received, share.exact_numel, dtype)
            scattered(total, bucket.gradients, share.exact, bucket.scale)
        if share.compressed:
            self._write(self.part_of[rank].decode(received[:, exact_bytes:], rank, of), rank)
        return bucket.shard

    def _gather_sums(self, received: torch.Tensor, of: Sum) -> Work:
        """Add up the own share's sketches and gather every owner's sum."""
        topology = self.bucket.topology
        rank = topology.rank
        own = received.new_zeros(max(part.sum_bytes for part in self.parts))
        if rank in self.part_of:
            part = self.part_of[rank]
            own[: part.sum_bytes] = part.add_up(received, rank, of, Sum.ALL)
        sums, work = self.bucket.transport().all_gather(own)

        def spread() -> torch.Tensor:
            for owner, part in self.part_of.items():
                self._write(part.decode(sums[owner : owner + 1, : part.sum_bytes], owner, Sum.ALL), owner)
            return self.bucket.gradients

        return Work(work, spread)

    def _write(self, decoded: Decoded, owner: int) -> None:
        """Write an owner's share of the sum."""
        part, bucket = self.part_of[owner], self.bucket
        scattered(decoded.values, bucket.gradients, self.shares[owner].compressed, bucket.scale)
        if owner == bucket.topology.rank:
            self.monitor.add(decoded, part.numel, part.room)

    def state(self) -> dict[str, torch.Tensor]:
        """See ``GradientSync.state``: each part's memory."""
        return {f"memory{number}": part.memory for number, part in enumerate(self.parts)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See ``GradientSync.load_state``."""
        for number, part in enumerate(self.parts):
            part.memory.copy_(state[f"memory{number}"])


def start_to_owners(
    payloads: list[torch.Tensor], exact_bytes: list[int], bucket: GradientBucket, link: str | None = None
) -> tuple[torch.Tensor, Work | dist.Work]:
    """Start sending every rank of a group its payload, counted: what is compressed, and what is not.

    Args:
        payloads: uint8, by rank of the group; sizes are multiples of ALIGNMENT and may differ.
        exact_bytes: how much of each payload is uncompressed.
        link: the group: None = all ranks, intra = this node's, inter = those with this rank's index.
    Returns: uint8 ``[ranks, own bytes]``, row r from rank r, and the work handle.
    """
    topology = bucket.topology
    transport = topology.carrier(link)
    rank, counts = transport.group.rank(), [payload.numel() // ALIGNMENT for payload in payloads]
    rows, came = torch.cat(payloads).view(-1, ALIGNMENT), [counts[rank]] * transport.world_size
    received, work = transport.all_to_all_rows(rows, counts, came)
    for other, (payload, exact) in enumerate(zip(payloads, exact_bytes, strict=True)):
        same_node = other // topology.local == rank // topology.local
        where = link or (INTRA if same_node else INTER)
        for kind, size in (("compressed", payload.numel() - exact), ("excluded", exact)):
            if size and other != rank:
                plain = size if kind == "excluded" else 0
                bucket.ledger.record("dp.gradient", kind, "all_to_all", size, plain, where)
    return received.view(transport.world_size, payloads[rank].numel()), work


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
    return sum_in_order(rows[:, : numel * dtype.itemsize].contiguous().view(dtype))


def gathered(flat: torch.Tensor, segments: tuple[Segment, ...]) -> torch.Tensor:
    """The segments of ``flat`` end to end."""
    return torch.cat([flat[begin:end] for begin, end in segments])


def rows_of(flat: torch.Tensor, segments: list[tuple[Segment, ...]]) -> torch.Tensor:
    """``[rows, n]``: each row's segments end to end; a view if they lie side by side in ``flat``."""
    first, size = segments[0][0][0], sum(end - begin for begin, end in segments[0])
    if all(row == ((first + i * size, first + (i + 1) * size),) for i, row in enumerate(segments)):
        return flat[first : first + len(segments) * size].view(len(segments), size)
    return torch.stack([gathered(flat, row) for row in segments])


def scattered(
    values: torch.Tensor, flat: torch.Tensor, segments: tuple[Segment, ...], scale: float = 1.0
) -> None:
    """Write ``values`` times ``scale`` into the segments of ``flat``."""
    position = 0
    for begin, end in segments:
        torch.mul(values[position : position + end - begin], scale, out=flat[begin:end])
        position += end - begin
