"""Sums a bucket's gradients over a codec: all-to-all inside the node, then between nodes.

Source of the scheme: SDP4Bit (arXiv 2410.15526), two-level gradient quantisation. Rank (node, index) first
sums, over its node, the shards of the ranks with its index on every node; then, over the nodes, its own.
With one node, or one rank a node, there is one exchange.
"""

import torch

from megatron.compression.codecs import Codec
from megatron.compression.communication.overflow import encode, sum_and_encode
from megatron.compression.communication.topology import INTER, INTRA
from megatron.compression.communication.work import Work, join
from megatron.compression.data_parallel.compressor import GradientBucket
from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from megatron.compression.data_parallel.flat_rows import flat_rows

ALIGNMENT = 4096
"""Pieces begin at multiples of this many values (every group size divides it), and are never smaller."""
PIECES = 8
"""In which a bucket travels where the exchange between nodes can run behind the one inside the node."""


class CodecGradientSync:
    """A ``GradientSync`` over a codec, with its first hop inside a node and its second between nodes.

    Args:
        codec: any; one that sees shapes gets tokens of 1024 values.
        feedback: remembers what the compression that matters lost: the one before the exchange between nodes,
            or before the only exchange, and without shards that of the sum that is gathered. Not the one
            before the exchange inside a node, where another follows. None forgets it.
        pieces: in how many pieces at most the bucket travels; None: 8 where there are two exchanges, else 1.
    """

    def __init__(
        self,
        bucket: GradientBucket,
        codec: Codec,
        feedback: ErrorFeedback | None = None,
        pieces: int | None = None,
    ) -> None:
        self.bucket = bucket
        topology = self.topology = bucket.topology
        self.shard_numel = -(-bucket.numel // topology.world_size)
        intra, inter = flat_rows(codec).hops
        self.first = inter if topology.nodes > 1 and topology.local == 1 else intra
        self.last = inter if topology.nodes > 1 else intra
        pieces = pieces or (PIECES if topology.two_hops else 1)
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

    @property
    def covering_ranks(self) -> int:
        return self.topology.nodes if self.topology.two_hops else self.topology.world_size

    def start(self) -> Work:
        self.bucket.record_plain()
        source = self._source()
        return join([self._start_piece(number, source) for number in range(len(self.pieces))])

    def _source(self) -> torch.Tensor:
        """[local, nodes, shard]: element (i, n) is the shard of rank n * local + i; zeros behind the end."""
        topology, size = self.topology, self.shard_numel
        flat = self.bucket.gradients
        if flat.numel() < topology.world_size * size:
            padded = flat.new_zeros(topology.world_size * size)
            padded[: flat.numel()] = flat
            flat = padded
        return flat.view(topology.nodes, topology.local, size).transpose(0, 1)

    def _start_piece(self, number: int, source: torch.Tensor) -> Work:
        begin, end = self.pieces[number]
        values = source[:, :, begin:end]
        if self.topology.two_hops:
            return self._start_two_hops(number, values)
        # With one rank a node or one node the rows are in the order of the ranks.
        rows = values.reshape(self.topology.world_size, end - begin)
        transport = self.bucket.transport()
        if self.feedback is None:
            codec, payloads = encode(self.first, rows, transport)
        else:
            codec, payloads = self.first, self._encode_and_remember(number, rows)
        received, pending = transport.all_to_all(payloads)
        exchanges = 1 if self.bucket.sharded else 2
        return Work(pending, lambda: self._finish_piece(number, codec, received), exchanges)

    def _start_two_hops(self, number: int, values: torch.Tensor) -> Work:
        bucket = self.bucket
        shape = values.shape[2:]
        exchanges = 2 if bucket.sharded else 3

        inside = bucket.transport(INTRA)
        if self.first.lossless:
            first, payloads = encode(self.first, values.flatten(0, 1), inside)
            payloads = payloads.view(*values.shape[:2], -1)
        else:
            first, payloads = self.first, self.first.encode_grid(values)
        senders, pending = inside.all_to_all(payloads.flatten(1))

        def between_nodes() -> Work:
            rows = senders.view(*payloads.shape)
            transport = bucket.transport(INTER)
            if self.feedback is None:
                last, partial = sum_and_encode(first, rows, shape, values.dtype, self.last, transport)
            else:
                total = first.decode_sum(rows, shape, torch.float32)
                last, partial = self.last, self._encode_and_remember(number, total)
            arrived, pending = transport.all_to_all(partial)
            return Work(pending, lambda: self._finish_piece(number, last, arrived), exchanges - 1)

        return Work(pending, between_nodes, exchanges)

    def _encode_and_remember(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        total = self.feedback.compensated(number, rows)
        payloads = self.last.encode(total)
        self.feedback.remember(number, total, self._decoded(payloads, total))
        return payloads

    def _encode_sum_and_remember(self, number: int, senders: torch.Tensor) -> torch.Tensor:
        """The own shard's sum of uint8 ``[S, 1, bytes]``, encoded to be gathered; its owner remembers the
        loss, beside that of its own addend."""
        begin, end = self.pieces[number]
        total = self.last.decode_sum(senders, (end - begin,), torch.float32)
        own = self.last.encode(total)
        topology = self.topology
        row = topology.rank // topology.local if topology.two_hops else topology.rank
        self.feedback.add(number, row, total, self._decoded(own, total))
        return own

    def _decoded(self, payloads: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return self.last.decode(payloads, like.shape[1:], like.dtype, torch.empty_like(like))

    def _finish_piece(self, number: int, codec: Codec, payloads: torch.Tensor) -> torch.Tensor | Work:
        """Sum this rank's part of a piece from all senders' uint8 [S, bytes]; gather it where needed."""
        begin, end = self.pieces[number]
        bucket, senders = self.bucket, payloads[:, None]
        shape, dtype = (end - begin,), bucket.gradients.dtype
        if bucket.sharded:
            own = bucket.shard[None, begin:end]
            return codec.decode_sum(senders, shape, dtype, bucket.scale, own)
        transport = bucket.transport()
        if self.feedback is None:
            last, payload = sum_and_encode(codec, senders, shape, dtype, self.last, transport)
        else:
            last, payload = self.last, self._encode_sum_and_remember(number, senders)
        gathered, pending = transport.all_gather(payload[0])
        return Work(pending, lambda: self._spread(last, gathered, begin, end))

    def _spread(self, last: Codec, gathered: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Decode one piece of every rank's shard, uint8 ``[W, bytes]``, into the bucket."""
        bucket, size = self.bucket, self.shard_numel
        flat, dtype = bucket.gradients, bucket.gradients.dtype
        if bucket.numel == self.topology.world_size * size:
            rows = flat.view(-1, size)[:, begin:end]
            return last.decode_sum(gathered[None], (end - begin,), dtype, bucket.scale, rows)
        values = last.decode_sum(gathered[None], (end - begin,), dtype, bucket.scale)
        for rank, row in enumerate(values):
            inside = flat[rank * size + begin : min(rank * size + end, bucket.numel)]
            inside.copy_(row[: inside.numel()])
        return flat

    def state(self) -> dict[str, torch.Tensor]:
        if self.feedback is None:
            return {}
        flat = torch.zeros(self.topology.world_size, self.shard_numel, device=self.bucket.gradients.device)
        flat[self._covered()] = self.feedback.values()
        return {"error_feedback": flat.view(-1)[: self.bucket.numel]}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        if self.feedback is None:
            return
        flat = torch.zeros(self.topology.world_size * self.shard_numel, device=self.bucket.gradients.device)
        if "error_feedback" in state:
            flat[: self.bucket.numel] = state["error_feedback"]
        self.feedback.set_values(flat.view(self.topology.world_size, self.shard_numel)[self._covered()])

    def _covered(self) -> slice:
        """Shards whose sums this rank encodes where error feedback is taken."""
        if self.topology.two_hops:
            return slice(self.topology.index, None, self.topology.local)
        return slice(None)
