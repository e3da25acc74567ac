"""Shares of a gradient bucket: which values TAGC compresses, who owns them, how they are encoded
and summed.

Layer-selective compression (TAGC, arXiv 2504.05638): the weight matrices of MLPs and the embeddings
are most of a model and bear sparse gradients well; attention's matrices go uncompressed unless
asked for, and so do vectors (norms, biases) always. Shares of one size make a part, which has a
memory: what it leaves out of an iteration, by choice or by rounding, it adds to the next one's
gradients, in fp32.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.compression.communication.topology import Topology
from megatron.compression.data_parallel.compressor import GradientBucket, ParameterSpan
from taco_kernels import bitmap_sparse, count_sketch
from taco_kernels.bitmap_sparse import BitmapLayout
from taco_kernels.common import ceil_div
from taco_kernels.common.reference import NON_FINITE
from taco_kernels.count_sketch.selection import share_threshold

LAYERS = {
    "mlp": (".mlp.", ".feed_forward."),
    "embedding": ("embedding.", "output_layer.", "embed_tokens.", "tok_embeddings.", "lm_head."),
    "attention": (".self_attention.", ".cross_attention.", ".self_attn.", ".attention."),
}
"""What ``layers`` names, and how their parameters' names are told."""

SMALLEST = 16384
"""Values of a share under which hashing is too coarse to be reliable: they go uncompressed."""

SEED = 0x7A6C
"""Of the sketches' hashes, the same on all ranks."""
ROOM = 1.02
"""Room for the union of the ranks' choices in a packed sum, over what independent choices need."""

Segment = tuple[int, int]
"""Begin and end in the bucket."""


def parse_layers(text: str) -> frozenset[str]:
    """Parse ``mlp+embedding`` or ``all`` into names of LAYERS.

    All of them mean every matrix, also of other layers.

    Raises:
        ValueError: something else.
    """
    if text == "all":
        return frozenset(LAYERS)
    names = frozenset(text.split("+"))
    unknown = sorted(names - set(LAYERS))
    if unknown:
        raise ValueError(
            f"layers={text}: {', '.join(map(repr, unknown))} is unknown; give {', '.join(LAYERS)}, "
            "joined by +, or all"
        )
    return names


def is_compressed(span: ParameterSpan, layers: frozenset[str]) -> bool:
    """Return whether a parameter is compressed: a matrix of one of ``layers``.

    With all kinds of layers every matrix is, whatever it is called: a model of other names too.
    """
    if span.parameter.dim() <= 1:
        return False
    if layers == LAYERS.keys():
        return True
    name = "." + span.name  # patterns begin with a dot: ".mlp." is also found at the beginning
    return any(fragment in name for layer in layers for fragment in LAYERS[layer])


@dataclass(frozen=True)
class Share:
    """What one rank of the group owns of a bucket: the sum of these segments ends there."""

    compressed: tuple[Segment, ...]
    exact: tuple[Segment, ...]

    @property
    def compressed_numel(self) -> int:
        """Values that are compressed."""
        return numel_of(self.compressed)


def numel_of(segments: Iterable[Segment]) -> int:
    """Return how many values segments have."""
    return sum(end - begin for begin, end in segments)


def shares_of(bucket: GradientBucket, layers: frozenset[str]) -> list[Share]:
    """Cut a bucket into shares, one for each rank.

    With the distributed optimizer a rank's share is its shard. Without it the compressed segments
    are joined and cut into equal pieces, and the first owner stands for all exact ones, which are
    all-reduced:

        bucket          | C  | E | C      | E |        C compressed, E exact
        sharded         | rank 0    | rank 1  |
        not sharded     | rank 0   | rank 1    |       of the C end to end; E is rank 0's

    A share of fewer than SMALLEST compressed values has none.
    """
    compressed = merged(
        (span.start, span.end) for span in bucket.spans if is_compressed(span, layers)
    )
    exact = merged(
        (span.start, span.end) for span in bucket.spans if not is_compressed(span, layers)
    )
    ranks = bucket.topology.world_size
    if bucket.sharded:
        size = bucket.numel // ranks
        return [_share_between(compressed, exact, rank * size, size) for rank in range(ranks)]
    # Every rank holds all of the sum, so how it is cut does not matter to Megatron: equally.
    piece = ceil_div(numel_of(compressed), ranks)
    if piece < SMALLEST:
        exact = merged([*compressed, *exact])
        compressed = ()
    shares = []
    for owner in range(ranks):
        own_piece = cut_out(compressed, owner * piece, owner * piece + piece)
        shares.append(Share(own_piece, exact if owner == 0 else ()))
    return shares


def _share_between(
    compressed: Iterable[Segment], exact: Iterable[Segment], begin: int, size: int
) -> Share:
    """Return the share that is a shard of the bucket."""
    share = Share(clipped(compressed, begin, begin + size), clipped(exact, begin, begin + size))
    if share.compressed_numel >= SMALLEST:
        return share
    return Share((), merged([*share.compressed, *share.exact]))


def merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return segments sorted, with neighbours joined and empty ones left out."""
    result: list[Segment] = []
    for begin, end in sorted(segments):
        if result and result[-1][1] == begin:
            result[-1] = (result[-1][0], end)
        elif end > begin:
            result.append((begin, end))
    return tuple(result)


def clipped(segments: Iterable[Segment], begin: int, end: int) -> tuple[Segment, ...]:
    """Return the parts of segments that lie between two positions of the bucket.

    Args:
        segments: sorted.
        begin: the first position.
        end: the one after the last.
    """
    inside = [(max(first, begin), min(last, end)) for first, last in segments]
    return tuple((first, last) for first, last in inside if last > first)


def cut_out(segments: Iterable[Segment], begin: int, end: int) -> tuple[Segment, ...]:
    """Return the parts of segments that hold some of their values.

    Args:
        segments: sorted; their values are numbered from 0, end to end.
        begin: the number of the first value.
        end: the one after the last.
    """
    result: list[Segment] = []
    passed = 0
    for first, last in segments:
        size = last - first
        low = max(begin - passed, 0)
        high = min(end - passed, size)
        if high > low:
            result.append((first + low, first + high))
        passed += size
    return tuple(result)


class Part:
    """Shares of one size, of these ranks: what is encoded together."""

    sum_bytes: int
    """Of the wire of all ranks' sum."""

    def __init__(self, owners: list[int], numel: int, device: torch.device) -> None:
        self.owners = owners
        self.memory = torch.zeros(len(owners), numel, device=device)
        """fp32 ``[owners, numel]``, in units of the gradients' sum, before scaling."""

    def add_memory(self, values: torch.Tensor) -> torch.Tensor | None:
        """Take gradients ``[owners, numel]`` of any float type, and add the memory to them.

        Returns:
            Metadata uint8 ``[owners, n]``, to be maximised over the ranks; None: there is nothing
            to agree on.
        """
        self.values = self.memory + values
        return None

    def encode(self, metadata: torch.Tensor | None) -> torch.Tensor:
        """Return wires uint8 ``[owners, bytes]``; what they leave out is remembered.

        ``metadata`` is what ``add_memory`` gave, maximised.
        """
        raise NotImplementedError

    def add_up(self, wires: torch.Tensor, owner: int, ranks: int, ranks_after: int) -> torch.Tensor:
        """Return the wire of a sum, uint8 ``[bytes]``.

        Args:
            wires: uint8 ``[S, bytes]``, what is added up.
            owner: whose share it is.
            ranks: how many ranks each of the wires is the sum of.
            ranks_after: how many the result is the sum of.
        """
        raise NotImplementedError

    def decode(self, wires: torch.Tensor, owner: int, ranks: int) -> torch.Tensor:
        """Return fp32 ``[numel]``: the sum over all ranks.

        Args:
            wires: uint8 ``[S, bytes]``, what is added up.
            owner: whose share it is.
            ranks: how many ranks each of the wires is the sum of.
        """
        raise NotImplementedError

    def _remember(self, left_out: torch.Tensor, exponents: torch.Tensor) -> None:
        """Remember what was left out, unless an exponent says that the step is skipped for a NaN or
        an infinity."""
        # Decided on the device. The gradients of a skipped step are lost, as without compression.
        is_skipped = (exponents == NON_FINITE).any()
        self.memory = torch.where(is_skipped, self.memory, left_out)


class SketchPart(Part):
    """Sketches, which add up without being decoded.

    Every rank chooses by the same rule, agreed on by metadata: see ``count_sketch.selection``.
    """

    def __init__(
        self,
        owners: list[int],
        numel: int,
        device: torch.device,
        topology: Topology,
        keep: float,
        config: count_sketch.SketchConfig,
    ) -> None:
        """Prepare shares.

        Args:
            owners: ranks whose shares these are.
            numel: values of a share.
            device: where the memory is.
            topology: the ranks whose gradients are added up.
            keep: the largest share of its values that a rank sends.
            config: of the sketches.
        """
        super().__init__(owners, numel, device)
        self.keep = keep
        self.senders = topology.world_size
        self.layout = count_sketch.SketchLayout(config, numel)
        self.sum_bytes = self.layout.wire_bytes

    def add_memory(self, values: torch.Tensor) -> torch.Tensor | None:
        super().add_memory(values)
        self.thresholds, classes = count_sketch.candidates(self.values, self.keep)
        # Rows of all ranks must have one grid, or their codes could not be added.
        exponents = count_sketch.row_exponents(self.values, self.layout)
        return torch.cat([exponents, classes], dim=1)

    def encode(self, metadata: torch.Tensor | None) -> torch.Tensor:
        rows = self.layout.rows
        self.exponents = metadata[:, :rows].contiguous()
        classes = metadata[:, rows:]
        # The same on all ranks: a share whose union still fits the sketch.
        threshold = count_sketch.choose(self.thresholds, classes, self.layout.exact_density)
        values, self.values, self.thresholds = self.values, None, None  # memory of one iteration
        # what is not sent is left in ``values``
        wires = count_sketch.encode(
            values, threshold, self.exponents, self.layout, self.senders, SEED, values
        )
        self._remember(values, self.exponents)
        return wires

    def add_up(self, wires: torch.Tensor, owner: int, ranks: int, ranks_after: int) -> torch.Tensor:
        """Return the wire of a sum: cells are added and bitmaps united, and nothing is decoded.

        Args:
            wires: uint8 ``[S, bytes]``, what is added up.
            owner: whose share it is; a sketch does not depend on it.
            ranks: how many ranks each of the wires is the sum of; sketches of any number have one
                size.
            ranks_after: how many the result is the sum of; likewise.
        """
        cells, words = count_sketch.combine(wires, self.layout)
        return count_sketch.pack(cells, words, self.layout)

    def decode(self, wires: torch.Tensor, owner: int, ranks: int) -> torch.Tensor:
        """Return fp32 ``[numel]``: the sum over all ranks.

        Args:
            wires: uint8 ``[S, bytes]``, what is added up first.
            owner: whose share it is; its exponents are those that all ranks agreed on.
            ranks: how many ranks each of the wires is the sum of; sketches do not depend on it.
        """
        cells, words = count_sketch.combine(wires, self.layout)
        exponents = self.exponents[self.owners.index(owner)]
        return count_sketch.decode(cells, words, exponents, self.layout, self.senders, SEED).values


class BitmapPart(Part):
    """Values end to end and a bitmap: fewer bytes, but every sum on the way is decoded and packed
    again."""

    def __init__(
        self,
        owners: list[int],
        numel: int,
        device: torch.device,
        topology: Topology,
        keep: float,
        bits: int,
    ) -> None:
        """Prepare shares.

        Args:
            owners: ranks whose shares these are.
            numel: values of a share.
            device: where the memory is.
            topology: the ranks whose gradients are added up.
            keep: the share of its values that a rank sends.
            bits: of a value.
        """
        super().__init__(owners, numel, device)
        self.layout = BitmapLayout(numel, keep, bits)
        self.layouts = {1: self.layout}
        """Of sums, by how many ranks they are over."""
        for ranks in {topology.local, topology.world_size} - {1}:
            # of independent choices: a value is in the union unless every rank leaves it out
            union = 1 - (1 - keep) ** ranks
            self.layouts[ranks] = BitmapLayout(numel, min(1.0, ROOM * union), bits)
        self.sum_bytes = self.layouts[topology.world_size].wire_bytes

    def encode(self, metadata: torch.Tensor | None) -> torch.Tensor:
        values, self.values = self.values, None  # memory of one iteration
        threshold = share_threshold(values, self.layout.share)
        # what is not sent is left in ``values``
        wires = bitmap_sparse.encode(values, threshold, self.layout, values)
        exponents = wires[:, self.layout.exponents_at :][:, : self.layout.rows]
        self._remember(values, exponents)
        return wires

    def add_up(self, wires: torch.Tensor, owner: int, ranks: int, ranks_after: int) -> torch.Tensor:
        """Return a sum's wire, as ``Part.add_up``; what it leaves out, this rank remembers."""
        total = bitmap_sparse.decode_sum(wires, self.layouts[ranks])[None]
        layout = self.layouts[ranks_after]
        # zero where the union has room, else the least that has: ranks may choose less alike than
        # by chance
        threshold = share_threshold(total, layout.share)
        wire = bitmap_sparse.encode(total, threshold, layout, total)
        row = self.memory[self.owners.index(owner)]
        remembered = row + total[0]
        row.copy_(torch.where(remembered.isfinite(), remembered, row))
        return wire[0]

    def decode(self, wires: torch.Tensor, owner: int, ranks: int) -> torch.Tensor:
        """Return fp32 ``[numel]``: the sum over all ranks.

        Args:
            wires: uint8 ``[S, bytes]``, what is decoded and added up.
            owner: whose share it is; the wires have all that is needed.
            ranks: how many ranks each of the wires is the sum of: it decides their layout.
        """
        return bitmap_sparse.decode_sum(wires, self.layouts[ranks])
