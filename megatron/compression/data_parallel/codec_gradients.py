"""Any codec as a gradient compressor: all-to-all inside the node, then between nodes; sums in fp32.

Source of the scheme: SDP4Bit (arXiv 2410.15526), two-level gradient quantisation. Rank (node,
index) first sums, over its node, the shards of the ranks with its index on every node; then, over
the nodes, its own. With one node, or one rank a node, there is one exchange. Sums that all ranks
keep are gathered in another.
"""

from dataclasses import dataclass
from functools import partial

import torch

from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS, Codec, parse_codec
from megatron.compression.codecs.base import offered
from megatron.compression.communication.collectives import sum_of_two
from megatron.compression.communication.overflow import encode, sum_and_encode
from megatron.compression.communication.topology import INTER, INTRA
from megatron.compression.communication.work import Work, join
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientCompressor,
    GradientSync,
)
from megatron.compression.errors import CompressionConfigError
from taco_kernels.common import ceil_div

ALIGNMENT = 4096
"""Pieces begin at multiples of this many values, and are never smaller. The group sizes of our own
codecs divide it, so that only a bucket's end is padded."""
PIECES = 8
"""Pieces of a bucket where the exchange between nodes can overlap with the one inside the node."""


@dataclass(frozen=True)
class CodecGradients(GradientCompressor):
    """Any codec: its first hop inside a node, its second between nodes; sums in fp32."""

    codec: Codec

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def lossless(self) -> bool:
        return self.codec.lossless

    def build(self, bucket: GradientBucket) -> GradientSync:
        return CodecGradientSync(bucket, self.codec)

    def describe(self) -> str:
        intra, inter = self.codec.hops
        if intra == inter:
            return f"gradients {self.name}"
        return (
            f"gradients {self.name}, {intra.bits_per_value():.3g} bits a value inside a node, "
            f"{inter.bits_per_value():.3g} between nodes"
        )


def parse_gradient_compressor(text: str) -> GradientCompressor:
    """Parse a spec of ``--dp-compression``, which names a gradient compressor or a codec.

    Raises:
        CompressionConfigError: an unknown name or setting, or a value that it refuses.
    """
    if "/" in text:
        return CodecGradients(parse_codec(text, "data_parallel"))
    name = text.partition(":")[0]
    registry = CODECS if GRADIENT_COMPRESSORS.entry(name) is None else GRADIENT_COMPRESSORS
    made = registry.parse(text, partial(offered, "data_parallel"))
    if isinstance(made, Codec):
        return CodecGradients(made)
    if not isinstance(made, GradientCompressor):
        raise CompressionConfigError(
            f"{text}: {type(made).__qualname__} is neither a GradientCompressor nor a Codec"
        )
    return made


class CodecGradientSync(GradientSync):
    """A codec's first hop inside a node and its second between nodes; sums in fp32.

    A bucket is cut into pieces where there are two hops, so that one piece's exchange between nodes
    overlaps with the next one's inside the node. ``[b:e]`` are a piece's positions in every rank's
    shard:

        gradients     | shard of rank 0    | shard of rank 1    | ...
                          |b..e|               |b..e|
    """

    def __init__(self, bucket: GradientBucket, codec: Codec) -> None:
        self.bucket = bucket
        self.topology = bucket.topology
        topology = self.topology
        self.shard_numel = ceil_div(bucket.numel, topology.world_size)
        intra, inter = codec.hops
        # The only exchange crosses nodes where each rank is a node; it takes the codec for that.
        one_rank_a_node = topology.nodes > 1 and topology.local == 1
        self.first = inter if one_rank_a_node else intra
        self.last = inter if topology.nodes > 1 else intra
        pieces = PIECES if topology.two_hops else 1
        # Each piece is encoded by itself, and padded to whole groups.
        size = ceil_div(ceil_div(self.shard_numel, pieces), ALIGNMENT) * ALIGNMENT
        size = max(ALIGNMENT, size)
        starts = range(0, self.shard_numel, size)
        self.pieces = [(start, min(start + size, self.shard_numel)) for start in starts]

    def start(self, gradients: torch.Tensor | None = None) -> Work:
        bucket = self.bucket
        flat = bucket.gradients if gradients is None else gradients
        bucket.record_plain()
        # Two ranks that both keep the sum need one exchange: each sends the other all that it has.
        if self.topology.world_size == 2 and not bucket.sharded:
            return sum_of_two(flat, self.first, bucket.transport(), flat, bucket.scale)
        source = self._source(flat)
        return join([self._start_piece(flat, source, begin, end) for begin, end in self.pieces])

    def _source(self, flat: torch.Tensor) -> torch.Tensor:
        """``[local, nodes, shard]``: element (i, n) is the shard of rank n * local + i, zero
        padded."""
        topology = self.topology
        size = self.shard_numel
        # Without the distributed optimizer a bucket need not divide by the ranks.
        if flat.numel() < topology.world_size * size:
            padded = flat.new_zeros(topology.world_size * size)
            padded[: flat.numel()] = flat
            flat = padded
        return flat.view(topology.nodes, topology.local, size).transpose(0, 1)

    def _start_piece(self, flat: torch.Tensor, source: torch.Tensor, begin: int, end: int) -> Work:
        """Start to sum one piece over the group, in one hop or in two.

        Args:
            flat: ``[numel]``, where the sum goes.
            source: what ``_source`` gives.
            begin: the piece's first position in a shard.
            end: the one after its last.
        """
        values = source[:, :, begin:end]
        if self.topology.two_hops:
            return self._start_two_hops(flat, values, begin, end)
        # With one rank a node or one node the rows are in the order of the ranks.
        rows = values.reshape(self.topology.world_size, end - begin)
        transport = self.bucket.transport()
        codec, payloads = encode(self.first, rows, transport)
        received, pending = transport.all_to_all(payloads)
        exchanges = 1 if self.bucket.sharded else 2
        return Work(
            pending, lambda: self._finish_piece(flat, codec, received, begin, end), exchanges
        )

    def _start_two_hops(
        self, flat: torch.Tensor, values: torch.Tensor, begin: int, end: int
    ) -> Work:
        """Sum a piece inside the node, then between nodes.

        Args:
            flat: ``[numel]``, where the sum goes.
            values: ``[local, nodes, piece]``, this rank's piece for every rank.
            begin: the piece's first position in a shard.
            end: the one after its last.
        """
        bucket = self.bucket
        shape = values.shape[2:]
        exchanges = 2 if bucket.sharded else 3
        inside = bucket.transport(INTRA)
        if self.first.lossless:
            # it may not fit, and has to be asked about; a grid of rows is not
            first, payloads = encode(self.first, values.flatten(0, 1), inside)
            payloads = payloads.view(*values.shape[:2], -1)
        else:
            first = self.first
            payloads = self.first.encode_grid(values)
        # Rank i of the node is sent row i: this rank's piece for the ranks with index i, on every
        # node.
        senders, pending = inside.all_to_all(payloads.flatten(1))

        def between_nodes() -> Work:
            rows = senders.view(*payloads.shape)
            transport = bucket.transport(INTER)
            # Decoded, summed over the node in fp32 and encoded anew, in one kernel where the codec
            # has one.
            last, partial = sum_and_encode(first, rows, shape, values.dtype, self.last, transport)
            # One row a node: the sum of this rank's node for the rank of its index there.
            arrived, pending = transport.all_to_all(partial)
            return Work(
                pending,
                lambda: self._finish_piece(flat, last, arrived, begin, end),
                exchanges - 1,
            )

        return Work(pending, between_nodes, exchanges)

    def _finish_piece(
        self, flat: torch.Tensor, codec: Codec, wires: torch.Tensor, begin: int, end: int
    ) -> torch.Tensor | Work:
        """Sum this rank's part of a piece from all senders' uint8 ``[S, bytes]``; gather it where
        needed."""
        bucket = self.bucket
        senders = wires[:, None]  # one row: this rank's part
        shape = (end - begin,)
        dtype = flat.dtype
        if bucket.sharded:
            target = bucket.shard_of(flat)[None, begin:end]
            return codec.decode_sum(senders, shape, dtype, bucket.scale, target)
        transport = bucket.transport()
        # All ranks decode the same payload, the owner too: replicas have the same bits.
        last, payload = sum_and_encode(codec, senders, shape, dtype, self.last, transport)
        gathered, pending = transport.all_gather(payload)
        return Work(pending, lambda: self._spread(flat, last, gathered, begin, end))

    def _spread(
        self, flat: torch.Tensor, last: Codec, gathered: torch.Tensor, begin: int, end: int
    ) -> torch.Tensor:
        """Decode one piece of every rank's shard, uint8 ``[W, bytes]``, into the gradients."""
        bucket = self.bucket
        size = self.shard_numel
        dtype = flat.dtype
        # [ranks, piece] of one stride, unless the last shard is shorter than the others.
        if bucket.numel == self.topology.world_size * size:
            rows = flat.view(-1, size)[:, begin:end]
            return last.decode_sum(gathered[None], (end - begin,), dtype, bucket.scale, rows)
        values = last.decode_sum(gathered[None], (end - begin,), dtype, bucket.scale)
        for rank, row in enumerate(values):
            last_position = min(rank * size + end, bucket.numel)
            inside = flat[rank * size + begin : last_position]
            inside.copy_(row[: inside.numel()])
        return flat
