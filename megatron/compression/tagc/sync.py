"""TAGC: sparsified gradients with a memory, summed as count sketches, or as values with a bitmap.

Source: TAGC (arXiv 2504.05638) over LHC (arXiv 2402.07529). A reduction takes two exchanges:

1. Metadata of sketches: the exponents that fix a common grid, and classes of sampled magnitudes, by whose
   maximum all ranks choose alike (taco_kernels.count_sketch.selection).
2. Payloads, each to the owner of its shard, which adds them up. What is not sent is remembered.

Without the distributed optimizer a third exchange gathers the sums: the same bits everywhere.
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
    """A ``GradientSync`` by sparsification; ``make`` makes the ``Part`` of (owners, numel, device,
    topology)."""

    def __init__(
        self, bucket: GradientBucket, layers: frozenset[str], make: Callable[..., Part]
    ) -> None:
        self.bucket = bucket
        self.shares: list[Share] = shares_of(bucket, layers)
        sizes = sorted({share.compressed_numel for share in self.shares} - {0}, reverse=True)
        self.parts: list[Part] = []
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
        work = None
        if sizes := [
            one.numel() for one in metadata if one is not None
        ]:  # of sketches: of all parts
            joined = torch.cat([one.view(-1) for one in metadata])
            metadata = [
                part.view_as(one) for part, one in zip(joined.split(sizes), metadata, strict=True)
            ]
            work = bucket.all_reduce(joined, op=dist.ReduceOp.MAX)
        if work is None and exact is None:
            return self._send(flat, metadata)  # nothing to wait for before the payloads

        def send() -> Work | Tensor:
            if exact is not None:
                exact_work.wait()
                scattered(exact, flat, self.shares[0].exact, bucket.scale)
            return self._send(flat, metadata) if self.parts or bucket.sharded else flat

        return Work(work, send)

    def _send(self, flat: Tensor, metadata: list[Tensor | None]) -> Work:
        """Send every owner what it adds up; see the head of the file."""
        bucket = self.bucket
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
            return self._inside_node(flat, payloads, exact_bytes)
        received, work = start_to_owners(payloads, exact_bytes, bucket)
        own = exact_bytes[topology.rank]
        return Work(work, lambda: self._finish(flat, received, own, flat.dtype, 1))

    def _inside_node(self, flat: Tensor, payloads: list[Tensor], exact_bytes: list[int]) -> Work:
        """Give each rank of the node what goes to the ranks with its index, to add it up first: a sum is less
        between nodes than all that is in it."""
        bucket, topology = self.bucket, self.bucket.topology
        of_index = [
            range(index, topology.world_size, topology.local) for index in range(topology.local)
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
                    exact = exact_sum(rows, numel_of(share.exact), flat.dtype)
                if share.compressed:
                    wires = rows[:, exact_bytes[owner] :]
                    wire = self.part_of[owner].add_up(wires, owner, 1, topology.local)
                payload, size = joined_payload(exact, wire, flat)
                sums.append(payload)
                sizes.append(size)
                position = end
            arrived, work = start_to_owners(sums, sizes, bucket, INTER)
            own = sizes[topology.rank // topology.local]
            return Work(
                work, lambda: self._finish(flat, arrived, own, torch.float32, topology.local)
            )

        return Work(work, between_nodes)

    def _finish(
        self, flat: Tensor, received: Tensor, exact_bytes: int, dtype: torch.dtype, of: int
    ) -> Tensor | Work:
        """Add up this rank's share.

        Args:
            flat: ``[numel]``, the gradients, where the sum goes.
            received: uint8 ``[S, bytes]``, a row from each sender: exact values, then a wire.
            exact_bytes: how many bytes of a row are exact values.
            dtype: their type.
            of: how many ranks' sum each row is.
        """
        if not self.bucket.sharded:
            return self._gather_sums(flat, received, of)
        rank = self.bucket.topology.rank
        share = self.shares[rank]
        if share.exact:
            total = exact_sum(received, numel_of(share.exact), dtype)
            scattered(total, flat, share.exact, self.bucket.scale)
        if share.compressed:
            total = self.part_of[rank].decode(received[:, exact_bytes:], rank, of)
            self._write(total, flat, rank)
        return self.bucket.shard_of(flat)

    def _gather_sums(self, flat: Tensor, received: Tensor, of: int) -> Work:
        """Add up the wires of this rank's share, as ``_finish``, and gather every owner's sum."""
        topology = self.bucket.topology
        rank = topology.rank
        # Shares differ in size; every rank gathers rows of the largest.
        row = received.new_zeros((1, max(part.sum_bytes for part in self.parts)))
        if rank in self.part_of:
            part = self.part_of[rank]
            row[0, : part.sum_bytes] = part.add_up(received, rank, of, topology.world_size)
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


def start_to_owners(
    payloads: list[Tensor], exact_bytes: list[int], bucket: GradientBucket, link: str | None = None
) -> tuple[Tensor, Work | dist.Work]:
    """Start sending every rank of a group its payload, counted: what is compressed, and what is not.

    Args:
        payloads: uint8, by rank of the group; sizes are multiples of ALIGNMENT and may differ.
        link: as for ``Topology.transport_over``.
    Returns: uint8 ``[ranks, own bytes]``, row r from rank r, and the work handle.
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
    """uint8: exact values, zeros up to a multiple of ALIGNMENT, a wire; and the bytes before the wire."""
    pieces, size = [], 0
    if exact is not None:
        raw = exact.view(torch.uint8)
        pieces.append(torch.nn.functional.pad(raw, (0, -raw.numel() % ALIGNMENT)))
        size = pieces[0].numel()
    if wire is not None:
        pieces.append(wire)
    return (torch.cat(pieces) if pieces else like.new_empty(0, dtype=torch.uint8)), size


def exact_sum(rows: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """fp32 ``[numel]``: the values at the front of each sender's bytes, added in the order of the senders."""
    return sum_in_order(rows[:, : numel * dtype.itemsize].contiguous().view(dtype))


def gathered(flat: Tensor, segments: tuple[Segment, ...]) -> Tensor:
    """The segments of ``flat`` end to end."""
    return torch.cat([flat[begin:end] for begin, end in segments])


def rows_of(flat: Tensor, segments: list[tuple[Segment, ...]]) -> Tensor:
    """``[rows, n]``: each row's segments end to end; a view if they lie side by side in ``flat``."""
    first, size = segments[0][0][0], numel_of(segments[0])
    if all(row == ((first + i * size, first + (i + 1) * size),) for i, row in enumerate(segments)):
        return flat[first : first + len(segments) * size].view(len(segments), size)
    return torch.stack([gathered(flat, row) for row in segments])


def scattered(
    values: Tensor, flat: Tensor, segments: tuple[Segment, ...], scale: float = 1.0
) -> None:
    """Write ``values`` times ``scale`` into the segments of ``flat``."""
    position = 0
    for begin, end in segments:
        torch.mul(values[position : position + end - begin], scale, out=flat[begin:end])
        position += end - begin
