"""TAGC: sparsified gradients with a memory, summed as count sketches, or as values with a bitmap.

Source: TAGC (arXiv 2504.05638) over LHC (arXiv 2402.07529). A reduction takes two exchanges:

1. Metadata of sketches: the exponents that fix a common grid, and classes of sampled magnitudes. By
   their maximum all ranks choose the same share of their largest values, one whose union fits the
   sketch (taco_kernels.count_sketch.selection).
2. Payloads, each to the owner of its share, which adds them up. What is not sent, by choice or by
   rounding, is remembered.

Without the distributed optimizer a third exchange gathers the sums: the same bits everywhere.

A payload is what one rank sends to one owner. Its parts lie end to end, each a multiple of
ALIGNMENT bytes:

    | exact values, padded | wire of the compressed values |
      none without the       none where nothing of the
      distributed optimizer  share is compressed
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.compression.communication.collectives import sum_in_order
from megatron.compression.communication.topology import INTER, INTRA
from megatron.compression.communication.work import Work
from megatron.compression.data_parallel.compressor import GradientBucket, GradientSync
from megatron.compression.tagc.parts import Part, Segment, Share, numel_of, shares_of
from taco_kernels.common import ALIGNMENT


class TagcGradientSync(GradientSync):
    """A ``GradientSync`` by sparsification."""

    def __init__(
        self, bucket: GradientBucket, layers: frozenset[str], make: Callable[..., Part]
    ) -> None:
        """Cut a bucket into shares.

        Args:
            bucket: what is summed.
            layers: names of ``LAYERS`` whose matrices are compressed.
            make: makes the ``Part`` of (owners, numel, device, topology).
        """
        self.bucket = bucket
        self.shares: list[Share] = shares_of(bucket, layers)
        """By owner."""
        self.parts: list[Part] = []
        """One for each size of a share's compressed values, the largest first."""
        sizes = sorted({share.compressed_numel for share in self.shares} - {0}, reverse=True)
        for size in sizes:
            owners = [
                owner for owner, share in enumerate(self.shares) if share.compressed_numel == size
            ]
            self.parts.append(make(owners, size, bucket.gradients.device, bucket.topology))
        self.part_of = {owner: part for part in self.parts for owner in part.owners}

    def start(self, gradients: Tensor | None = None) -> Work:
        bucket = self.bucket
        flat = bucket.gradients if gradients is None else gradients
        compressed = sum(share.compressed_numel for share in self.shares)
        # For the ledger; exact values are counted as they are sent.
        if compressed:
            bucket.record_plain(compressed * flat.element_size())
        # Without the distributed optimizer the exact values are one all-reduce, in their own type.
        segments = () if bucket.sharded else self.shares[0].exact
        exact = None
        exact_work = None
        if segments:
            exact = gathered(flat, segments)
            exact_work = bucket.all_reduce(exact, "excluded")
        metadata, agreement = self._agree(flat)
        if agreement is None and exact is None:
            return self._send(flat, metadata)  # nothing to wait for before the payloads

        def send() -> Work | Tensor:
            if exact is not None:
                exact_work.wait()
                scattered(exact, flat, segments, bucket.scale)
            if not self.parts and not bucket.sharded:
                return flat
            return self._send(flat, metadata)

        return Work(agreement, send)

    def _agree(self, flat: Tensor) -> tuple[list[Tensor | None], Work | dist.Work | None]:
        """Give the parts their gradients, and start to agree on what is chosen.

        Returns:
            The metadata of each part, None where it needs none; and the all-reduce that maximises
            them in place, of all parts together, or None.
        """
        metadata: list[Tensor | None] = []
        for part in self.parts:
            rows = rows_of(flat, [self.shares[owner].compressed for owner in part.owners])
            metadata.append(part.add_memory(rows))
        asked = [values for values in metadata if values is not None]
        if not asked:  # the parts of a sync are of one kind: all ask, or none
            return metadata, None
        # One all-reduce for all parts: metadata are some hundred bytes each.
        joined = torch.cat([values.view(-1) for values in asked])
        pieces = joined.split([values.numel() for values in asked])
        # Views, which the all-reduce fills in place.
        views = [piece.view_as(values) for piece, values in zip(pieces, asked, strict=True)]
        return [*views], self.bucket.all_reduce(joined, op=dist.ReduceOp.MAX)

    def _send(self, flat: Tensor, metadata: list[Tensor | None]) -> Work:
        """Send every owner its payload."""
        bucket = self.bucket
        topology = bucket.topology
        # By owner; an owner of exact values alone, or of nothing, has no wire.
        wire_of: dict[int, Tensor] = {}
        for part, agreed in zip(self.parts, metadata, strict=True):
            for owner, wire in zip(part.owners, part.encode(agreed), strict=True):
                wire_of[owner] = wire
        payloads = []
        exact_bytes = []
        for owner, share in enumerate(self.shares):
            exact = gathered(flat, share.exact) if bucket.sharded and share.exact else None
            payload, size = joined_payload(exact, wire_of.get(owner), flat)
            payloads.append(payload)
            exact_bytes.append(size)
        if topology.two_hops:
            return self._inside_node(flat, payloads, exact_bytes)
        received, work = start_to_owners(payloads, exact_bytes, bucket)
        # Shares are the same on all ranks, so every sender's payload for this rank looks alike.
        exact_here = exact_bytes[topology.rank]
        return Work(work, lambda: self._finish(flat, received, exact_here, flat.dtype, 1))

    def _inside_node(self, flat: Tensor, payloads: list[Tensor], exact_bytes: list[int]) -> Work:
        """Sum inside the node first: a sum is less between nodes than all that is in it.

        Each rank of the node is given what goes to the ranks with its index, on every node. A sum
        of sketches is as large as one of them, a sum of packed values as their union.

        Args:
            flat: ``[numel]``, the gradients, where the sum goes.
            payloads: by owner.
            exact_bytes: how many bytes of each are exact values.
        """
        bucket = self.bucket
        topology = bucket.topology
        owners_of_index = [
            range(index, topology.world_size, topology.local) for index in range(topology.local)
        ]
        received, work = start_to_owners(
            [torch.cat([payloads[owner] for owner in owners]) for owners in owners_of_index],
            [sum(exact_bytes[owner] for owner in owners) for owners in owners_of_index],
            bucket,
            INTRA,
        )

        def between_nodes() -> Work:
            sums = []
            sum_exact_bytes = []
            position = 0
            # What came is one payload after the other, for the owners with this rank's index.
            for owner in owners_of_index[topology.index]:
                end = position + payloads[owner].numel()
                payload, size = self._node_sum(
                    received[:, position:end], owner, exact_bytes[owner], flat
                )
                sums.append(payload)
                sum_exact_bytes.append(size)
                position = end
            arrived, work = start_to_owners(sums, sum_exact_bytes, bucket, INTER)
            # ``sums`` are in the order of nodes, since the owners of one index are.
            node = topology.rank // topology.local
            exact_here = sum_exact_bytes[node]
            return Work(
                work,
                lambda: self._finish(flat, arrived, exact_here, torch.float32, topology.local),
            )

        return Work(work, between_nodes)

    def _node_sum(
        self, rows: Tensor, owner: int, exact_bytes: int, flat: Tensor
    ) -> tuple[Tensor, int]:
        """Add up one owner's payloads of a node, as ``joined_payload``; exact values are fp32 from
        here on.

        Args:
            rows: uint8 ``[local, bytes]``, a payload from each rank of the node.
            owner: whose share it is.
            exact_bytes: how many bytes of a row are exact values.
            flat: the gradients, of whose type they are.
        """
        share = self.shares[owner]
        exact = None
        wire = None
        if exact_bytes:
            exact = exact_sum(rows, numel_of(share.exact), flat.dtype)
        if share.compressed:
            wires = rows[:, exact_bytes:]
            local = self.bucket.topology.local
            wire = self.part_of[owner].add_up(wires, owner, 1, local)
        return joined_payload(exact, wire, flat)

    def _finish(
        self, flat: Tensor, received: Tensor, exact_bytes: int, dtype: torch.dtype, ranks: int
    ) -> Tensor | Work:
        """Add up this rank's share.

        Args:
            flat: ``[numel]``, the gradients, where the sum goes.
            received: uint8 ``[S, bytes]``, a payload from each sender.
            exact_bytes: how many bytes of a row are exact values.
            dtype: their type.
            ranks: how many ranks each row is the sum of.
        """
        if not self.bucket.sharded:
            return self._gather_sums(flat, received, ranks)
        rank = self.bucket.topology.rank
        share = self.shares[rank]
        if share.exact:
            total = exact_sum(received, numel_of(share.exact), dtype)
            scattered(total, flat, share.exact, self.bucket.scale)
        if share.compressed:
            total = self.part_of[rank].decode(received[:, exact_bytes:], rank, ranks)
            self._write(total, flat, rank)
        return self.bucket.shard_of(flat)

    def _gather_sums(self, flat: Tensor, received: Tensor, ranks: int) -> Work:
        """Add up the wires of this rank's share, as ``_finish``, and gather every owner's sum."""
        topology = self.bucket.topology
        rank = topology.rank
        # Shares differ in size; every rank gathers rows of the largest.
        row = received.new_zeros((1, max(part.sum_bytes for part in self.parts)))
        if rank in self.part_of:
            part = self.part_of[rank]
            row[0, : part.sum_bytes] = part.add_up(received, rank, ranks, topology.world_size)
        sums, work = self.bucket.transport().all_gather(row)

        def spread() -> Tensor:
            for owner, part in self.part_of.items():
                wire = sums[owner : owner + 1, : part.sum_bytes]
                self._write(part.decode(wire, owner, topology.world_size), flat, owner)
            return flat

        return Work(work, spread)

    def _write(self, values: Tensor, flat: Tensor, owner: int) -> None:
        """Write an owner's share of the sum into the gradients."""
        scattered(values, flat, self.shares[owner].compressed, self.bucket.scale)

    def state(self) -> dict[str, Tensor]:
        return {f"memory{number}": part.memory for number, part in enumerate(self.parts)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for number, part in enumerate(self.parts):
            part.memory.copy_(state[f"memory{number}"])

    def left_over(self) -> Tensor:
        left_over = torch.zeros(self.bucket.numel, device=self.bucket.gradients.device)
        for part in self.parts:
            for owner, values in zip(part.owners, part.memory, strict=True):
                scattered(values, left_over, self.shares[owner].compressed)
        return left_over


def start_to_owners(
    payloads: list[Tensor], exact_bytes: list[int], bucket: GradientBucket, link: str | None = None
) -> tuple[Tensor, Work | dist.Work]:
    """Start sending every rank of a group its payload, counted: what is compressed, and what is
    not.

    Args:
        payloads: uint8, by rank of the group; sizes are multiples of ALIGNMENT and may differ.
        exact_bytes: how many bytes of each are exact values.
        bucket: its topology and ledger.
        link: as for ``Topology.transport_over``: None for all ranks, intra or inter for some.

    Returns:
        uint8 ``[ranks, bytes]``, what this rank is sent, row r from rank r; and the work handle.
    """
    topology = bucket.topology
    transport = topology.transport_over(link)
    rank = transport.group.rank()
    send_counts = [payload.numel() // ALIGNMENT for payload in payloads]
    recv_counts = [send_counts[rank]] * transport.world_size  # every rank sends this one as much
    rows = torch.cat(payloads).view(-1, ALIGNMENT)
    received, work = transport.all_to_all(rows, send_counts, recv_counts)
    for peer, (payload, exact) in enumerate(zip(payloads, exact_bytes, strict=True)):
        if peer == rank:
            continue
        same_node = peer // topology.local == rank // topology.local
        peer_link = link or (INTRA if same_node else INTER)
        wire = payload.numel() - exact
        if wire:
            bucket.ledger.record("dp.gradient", "compressed", "all_to_all", wire, 0, peer_link)
        if exact:
            bucket.ledger.record("dp.gradient", "excluded", "all_to_all", exact, exact, peer_link)
    return received.view(transport.world_size, payloads[rank].numel()), work


def joined_payload(exact: Tensor | None, wire: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """Put a payload together.

    Args:
        exact: values of any type, sent as they are; None: none.
        wire: uint8, a multiple of ALIGNMENT bytes; None: none.
        like: a tensor of the payload's device.

    Returns:
        uint8 ``[bytes]``, and how many of them are before the wire.
    """
    pieces = []
    exact_bytes = 0
    if exact is not None:
        # Rows of ALIGNMENT bytes travel, and a wire begins at one: kernels read whole words.
        raw = exact.view(torch.uint8)
        padded = torch.nn.functional.pad(raw, (0, -raw.numel() % ALIGNMENT))
        exact_bytes = padded.numel()
        pieces.append(padded)
    if wire is not None:
        pieces.append(wire)
    payload = torch.cat(pieces) if pieces else like.new_empty(0, dtype=torch.uint8)
    return payload, exact_bytes


def exact_sum(rows: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return fp32 ``[numel]``: exact values, added in the order of the senders.

    Args:
        rows: uint8 ``[S, bytes]``, payloads; the values are at their front.
        numel: how many values.
        dtype: their type.
    """
    return sum_in_order(rows[:, : numel * dtype.itemsize].contiguous().view(dtype))


def gathered(flat: Tensor, segments: tuple[Segment, ...]) -> Tensor:
    """Return the segments of ``flat`` end to end, a copy."""
    return torch.cat([flat[begin:end] for begin, end in segments])


def rows_of(flat: Tensor, segments: list[tuple[Segment, ...]]) -> Tensor:
    """Return ``[rows, n]``: each row's segments end to end; a view if they lie side by side in
    ``flat``."""
    first = segments[0][0][0]
    size = numel_of(segments[0])
    side_by_side = all(
        row == ((first + index * size, first + (index + 1) * size),)
        for index, row in enumerate(segments)
    )
    if side_by_side:
        return flat[first : first + len(segments) * size].view(len(segments), size)
    return torch.stack([gathered(flat, row) for row in segments])


def scattered(
    values: Tensor, flat: Tensor, segments: tuple[Segment, ...], scale: float = 1.0
) -> None:
    """Write values into the segments of a bucket.

    Args:
        values: ``[n]``, of all segments end to end.
        flat: ``[numel]``, the bucket.
        segments: where they go.
        scale: what they are multiplied by.
    """
    position = 0
    for begin, end in segments:
        size = end - begin
        torch.mul(values[position : position + size], scale, out=flat[begin:end])
        position += size
