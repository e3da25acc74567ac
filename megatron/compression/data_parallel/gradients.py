"""Sums a bucket's gradients over a codec: all-to-all inside the node, then between nodes.

Source of the scheme: SDP4Bit (arXiv 2410.15526), two-level gradient quantisation. Rank (node, index) first
sums, over its node, the shards of the ranks with its index on every node; then, over the nodes, its own.
With one node, or one rank a node, there is one exchange.
"""

from typing import Protocol

import torch

from megatron.compression.collectives.work import CompressedWork
from megatron.compression.data_parallel.bucket import GradientBucket
from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from megatron.compression.data_parallel.in_flight import Works

ALIGNMENT = 4096
"""Pieces begin at multiples of this many values (every group size divides it), and are never smaller."""


class GradientCodec(Protocol):
    """Rows of values to payloads and back. Pure, of a size that depends on the number of values alone."""

    name: str

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., n]`` (bf16, fp16, fp32; rows contiguous) to uint8 ``[rows, bytes]``."""
        ...

    def decode(self, wires: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """uint8 ``[rows, bytes]`` times ``scale`` into ``out [rows, n]``, which it returns."""
        ...

    def decode_sum(self, wires: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """uint8 ``[S, rows, bytes]``, summed in fp32 in the order of S, times ``scale``, into
        ``out [rows, n]``."""
        ...

    def decode_sum_encode(self, wires: torch.Tensor, numel: int, codec: "GradientCodec") -> torch.Tensor:
        """uint8 ``[S, rows, bytes]`` of ``numel`` values a row: the sum over S, encoded by ``codec`` (of the
        same kind) as uint8 ``[rows, bytes']``."""
        ...


class ExactGradientCodec:
    """fp32 values as they are: the control that tests everything around a codec."""

    name = "exact"

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """See ``GradientCodec.encode``."""
        return x.float().contiguous().view(-1, x.shape[-1]).view(torch.uint8)

    def decode(self, wires: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """See ``GradientCodec.decode``."""
        return out.copy_(wires.view(torch.float32) * scale)

    def decode_sum(self, wires: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """See ``GradientCodec.decode_sum``."""
        values = wires.view(torch.float32)
        total = values[0].clone()
        for row in values[1:]:
            total += row
        return out.copy_(total * scale)

    def decode_sum_encode(self, wires: torch.Tensor, numel: int, codec: GradientCodec) -> torch.Tensor:
        """See ``GradientCodec.decode_sum_encode``."""
        total = torch.empty(wires.shape[1], numel, device=wires.device)
        return codec.encode(self.decode_sum(wires, total))


class CodedGradientSync:
    """A ``GradientSync`` over two codecs.

    Args:
        bucket: what to sum.
        intra: codec inside a node.
        inter: codec between nodes.
        pieces: in how many pieces at most the bucket travels, where one exchange can run behind another.
        feedback: remembers what the compression that matters lost: the one before the exchange between nodes,
            or before the only exchange, and without shards that of the sum that is gathered. Not the one
            before the exchange inside a node, where another follows. None forgets it.
    """

    def __init__(
        self,
        bucket: GradientBucket,
        intra: GradientCodec,
        inter: GradientCodec,
        pieces: int = 1,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.bucket = bucket
        topology = self.topology = bucket.topology
        self.shard_numel = -(-bucket.numel // topology.world_size)
        self.intra, self.inter = intra, inter
        self.first = inter if topology.nodes > 1 and topology.local == 1 else intra
        self.last = inter if topology.nodes > 1 else intra
        self.name = (
            f"{intra.name} inside nodes, {inter.name} between" if topology.two_hops else self.last.name
        )
        if bucket.sharded and not topology.two_hops:
            pieces = 1  # there is no second exchange to run behind the first
        size = -(-self.shard_numel // pieces)
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        starts = range(0, self.shard_numel, size)
        self.pieces = [(start, min(start + size, self.shard_numel)) for start in starts]
        self.feedback = feedback
        if feedback is not None:
            rows = topology.nodes if topology.two_hops else topology.world_size
            feedback.allocate(rows, self.pieces, bucket.gradients.device)

    def start(self) -> Works:
        """See ``GradientSync.start``."""
        bucket = self.bucket
        operation = "reduce_scatter" if bucket.sharded else "all_reduce"
        self.topology.record_plain(bucket.ledger, "dp.gradient", operation, bucket.gradients.nbytes)
        source = self._source()
        return Works([self._start_piece(number, source) for number in range(len(self.pieces))])

    def _source(self) -> torch.Tensor:
        """[local, nodes, shard]: element (i, n) is the shard of rank n * local + i; zeros behind the end."""
        topology, size = self.topology, self.shard_numel
        flat = self.bucket.gradients
        if flat.numel() < topology.world_size * size:
            padded = flat.new_zeros(topology.world_size * size)
            padded[: flat.numel()] = flat
            flat = padded
        return flat.view(topology.nodes, topology.local, size).transpose(0, 1)

    def _start_piece(self, number: int, source: torch.Tensor) -> CompressedWork:
        begin, end = self.pieces[number]
        values = source[:, :, begin:end]
        if self.topology.two_hops:
            return self._start_two_hops(number, values)
        # With one rank a node or one node the rows are in the order of the ranks.
        rows = values.reshape(self.topology.world_size, end - begin)
        wires = self.first.encode(rows) if self.feedback is None else self._encode_with_feedback(number, rows)
        received, work = self.bucket.transport().all_to_all(wires, async_op=True)
        return CompressedWork(work, lambda: self._finish_piece(number, received))

    def _start_two_hops(self, number: int, values: torch.Tensor) -> CompressedWork:
        topology, bucket = self.topology, self.bucket
        numel = values.shape[-1]
        wires = self.first.encode(values).view(topology.local, -1)
        received, work = bucket.transport("intra").all_to_all(wires, async_op=True)

        def between_nodes() -> CompressedWork:
            senders = received.view(topology.local, topology.nodes, -1)
            if self.feedback is None:
                partial = self.first.decode_sum_encode(senders, numel, self.last)
            else:
                total = torch.empty(topology.nodes, numel, device=senders.device)
                partial = self._encode_with_feedback(number, self.first.decode_sum(senders, total))
            arrived, work = bucket.transport("inter").all_to_all(partial, async_op=True)
            return CompressedWork(work, lambda: self._finish_piece(number, arrived))

        return CompressedWork(work, between_nodes)

    def _encode_with_feedback(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        total = self.feedback.compensated(number, rows)
        wires = self.last.encode(total)
        self.feedback.remember(number, total, self.last.decode(wires, torch.empty_like(total)))
        return wires

    def _encode_sum_with_feedback(self, number: int, wires: torch.Tensor) -> torch.Tensor:
        """The own shard's sum of uint8 ``[S, 1, bytes]``, encoded to be gathered; its owner remembers the
        loss, beside that of its own addend."""
        begin, end = self.pieces[number]
        total = self.last.decode_sum(wires, torch.empty(1, end - begin, device=wires.device))
        own = self.last.encode(total)
        topology = self.topology
        row = topology.rank // topology.local if topology.two_hops else topology.rank
        self.feedback.add(number, row, total, self.last.decode(own, torch.empty_like(total)))
        return own

    def _finish_piece(self, number: int, wires: torch.Tensor) -> torch.Tensor | CompressedWork:
        """Sum this rank's part of a piece from all senders' uint8 [S, bytes]; gather it where needed."""
        begin, end = self.pieces[number]
        bucket, topology = self.bucket, self.topology
        wires = wires[:, None]
        if bucket.sharded:
            return self.last.decode_sum(wires, bucket.shard[None, begin:end], bucket.scale)
        if self.feedback is None:
            own = self.last.decode_sum_encode(wires, end - begin, self.last)
        else:
            own = self._encode_sum_with_feedback(number, wires)
        gathered, work = bucket.transport().all_gather(own[0], async_op=True)

        def spread() -> torch.Tensor:
            size, numel = self.shard_numel, bucket.numel
            if numel == topology.world_size * size:
                return self.last.decode(gathered, bucket.gradients.view(-1, size)[:, begin:end], bucket.scale)
            values = torch.empty(
                topology.world_size, end - begin, dtype=bucket.gradients.dtype, device=gathered.device
            )
            self.last.decode(gathered, values, bucket.scale)
            for rank, row in enumerate(values):
                inside = bucket.gradients[rank * size + begin : min(rank * size + end, numel)]
                inside.copy_(row[: inside.numel()])
            return bucket.gradients

        return CompressedWork(work, spread)

    def state(self) -> dict[str, torch.Tensor]:
        """See ``GradientSync.state``: what error feedback holds back."""
        if self.feedback is None:
            return {}
        flat = torch.zeros(self.topology.world_size, self.shard_numel, device=self.bucket.gradients.device)
        flat[self._covered()] = self.feedback.values()
        return {"error_feedback": flat.view(-1)[: self.bucket.numel]}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See ``GradientSync.load_state``."""
        if self.feedback is None:
            return
        flat = torch.zeros(self.topology.world_size * self.shard_numel, device=self.bucket.gradients.device)
        if "error_feedback" in state:
            flat[: self.bucket.numel] = state["error_feedback"]
        self.feedback.set_values(flat.view(self.topology.world_size, self.shard_numel)[self._covered()])

    @property
    def covering_ranks(self) -> int:
        """Ranks whose error feedback covers the same value."""
        return self.topology.nodes if self.topology.two_hops else self.topology.world_size

    def _covered(self) -> slice:
        """Shards whose sums this rank encodes where error feedback is taken."""
        if self.topology.two_hops:
            return slice(self.topology.index, None, self.topology.local)
        return slice(None)
