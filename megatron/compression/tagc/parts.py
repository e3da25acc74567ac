"""Shares of a gradient bucket: which values TAGC compresses, who owns them, how they are encoded and summed.

Layer-selective compression (TAGC, arXiv 2504.05638): the weight matrices of MLPs and the embeddings are most
of a model and bear sparse gradients well; attention's matrices go uncompressed unless asked for, and so do
vectors (norms, biases) always. Shares of one size make a part, which has a memory: what it leaves out of an
iteration, by choice or by rounding, it adds to the next one's gradients, in fp32.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.compression.communication.topology import Topology
from megatron.compression.data_parallel.compressor import GradientBucket, ParameterSpan
from taco_kernels import bitmap_sparse, count_sketch
from taco_kernels.bitmap_sparse import BitmapLayout
from taco_kernels.common.reference import NON_FINITE
from taco_kernels.count_sketch.selection import share_threshold

LAYERS = {
    "mlp": (".mlp.", ".feed_forward."),
    "embedding": ("embedding.", "output_layer.", "embed_tokens.", "tok_embeddings.", "lm_head."),
    "attention": (".self_attention.", ".cross_attention.", ".self_attn.", ".attention."),
}
"""What ``layers`` names, and how their parameters' names are told."""

SMALLEST = 16384
"""Values of a shard under which hashing is too coarse to be reliable: they go uncompressed."""

SEED = 0x7A6C
ROOM = 1.02
"""Room for the union of the ranks' choices in a packed sum, over what independent choices need."""

Segment = tuple[int, int]
"""Begin and end in the bucket."""


def parse_layers(text: str) -> frozenset[str]:
    """``mlp+embedding`` or ``all`` as names of LAYERS; all of them mean every matrix, also of other layers.

    Raises: ValueError: something else.
    """
    if text == "all":
        return frozenset(LAYERS)
    names = frozenset(text.split("+"))
    if unknown := sorted(names - set(LAYERS)):
        raise ValueError(
            f"layers={text}: {', '.join(map(repr, unknown))} is unknown; give {', '.join(LAYERS)}, joined by "
            "+, or all"
        )
    return names


def is_compressed(span: ParameterSpan, layers: frozenset[str]) -> bool:
    """Whether a parameter is a matrix of one of ``layers``."""
    name, everything = "." + span.name, layers == LAYERS.keys()
    named = everything or any(part in name for layer in layers for part in LAYERS[layer])
    return named and span.parameter.dim() > 1


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
    """Values in segments."""
    return sum(end - begin for begin, end in segments)


def shares_of(bucket: GradientBucket, layers: frozenset[str]) -> list[Share]:
    """The bucket's shares, by owner: with the distributed optimizer its shard; without it equal cuts of the
    compressed segments, and the first owner stands for all exact ones, which are all-reduced."""
    compressed = merged((s.start, s.end) for s in bucket.spans if is_compressed(s, layers))
    exact = merged((s.start, s.end) for s in bucket.spans if not is_compressed(s, layers))
    world = bucket.topology.world_size
    if bucket.sharded:
        size = bucket.numel // world
        shares = []
        for cut in [(owner * size, owner * size + size) for owner in range(world)]:
            share = Share(clipped(compressed, *cut), clipped(exact, *cut))
            large = share.compressed_numel >= SMALLEST
            shares.append(share if large else Share((), merged([*share.compressed, *share.exact])))
        return shares
    piece = -(-numel_of(compressed) // world)
    if piece < SMALLEST:
        compressed, exact = (), merged([*compressed, *exact])
    parts = [cut_out(compressed, owner * piece, owner * piece + piece) for owner in range(world)]
    return [Share(part, () if owner else exact) for owner, part in enumerate(parts)]


def merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Sorted, with neighbours joined."""
    result: list[Segment] = []
    for begin, end in sorted(segments):
        if result and result[-1][1] == begin:
            result[-1] = (result[-1][0], end)
        elif end > begin:
            result.append((begin, end))
    return tuple(result)


def clipped(segments: Iterable[Segment], begin: int, end: int) -> tuple[Segment, ...]:
    """What lies between two positions of the bucket."""
    inside = ((max(b, begin), min(e, end)) for b, e in segments)
    return tuple((b, e) for b, e in inside if e > b)


def cut_out(segments: Iterable[Segment], begin: int, end: int) -> tuple[Segment, ...]:
    """Values ``begin`` to ``end`` of the segments joined end to end."""
    result, passed = [], 0
    for b, e in segments:
        low, high = max(begin - passed, 0), min(end - passed, e - b)
        if high > low:
            result.append((b + low, b + high))
        passed += e - b
    return tuple(result)


class Part:
    """Shares of one size, of these ranks."""

    sum_bytes: int
    """Of the wire of all ranks' sum."""

    def __init__(self, owners: list[int], numel: int, device: torch.device) -> None:
        self.owners = owners
        self.memory = torch.zeros(len(owners), numel, device=device)
        """fp32 ``[owners, numel]``, in units of the gradients' sum, before scaling."""

    def add_memory(self, values: torch.Tensor) -> torch.Tensor | None:
        """Take gradients ``[owners, numel]`` of any float type, and add the memory to them; metadata uint8
        ``[owners, n]`` to be maximised over the ranks, or None."""
        self.values = self.memory + values
        return None

    def encode(self, metadata: torch.Tensor | None) -> torch.Tensor:
        """Wires uint8 ``[owners, bytes]``; what they leave out is remembered."""
        raise NotImplementedError

    def add_up(self, wires: torch.Tensor, owner: int, of: int, to: int) -> torch.Tensor:
        """The wire of a sum over ``to`` ranks, from uint8 ``[S, bytes]``, sums over ``of`` ranks each."""
        raise NotImplementedError

    def decode(self, wires: torch.Tensor, owner: int, of: int) -> torch.Tensor:
        """fp32 ``[numel]``: the sum over all ranks, from the wires of sums over ``of`` ranks each."""
        raise NotImplementedError

    def _remember(self, left: torch.Tensor, exponents: torch.Tensor) -> None:
        """Remember what was left out, unless an exponent says that the step is skipped for a NaN or an
        infinity."""
        self.memory = torch.where((exponents == NON_FINITE).any(), self.memory, left)


class SketchPart(Part):
    """Sketches: they add up without being decoded. A rank sends at most the share ``keep`` of its values."""

    def __init__(
        self,
        owners: list[int],
        numel: int,
        device: torch.device,
        topology: Topology,
        keep: float,
        config: count_sketch.SketchConfig,
    ) -> None:
        super().__init__(owners, numel, device)
        self.keep, self.senders = keep, topology.world_size
        self.layout = count_sketch.SketchLayout(config, numel)
        self.sum_bytes = self.layout.wire_bytes

    def add_memory(self, values: torch.Tensor) -> torch.Tensor | None:
        super().add_memory(values)
        self.thresholds, classes = count_sketch.candidates(self.values, self.keep)
        return torch.cat([count_sketch.row_exponents(self.values, self.layout), classes], dim=1)

    def encode(self, metadata: torch.Tensor | None) -> torch.Tensor:
        rows = self.layout.rows
        self.exponents, classes = metadata[:, :rows].contiguous(), metadata[:, rows:]
        threshold = count_sketch.choose(self.thresholds, classes, self.layout.exact_density)
        values, self.values, self.thresholds = self.values, None, None
        about = self.layout, self.senders, SEED
        wires = count_sketch.encode(values, threshold, self.exponents, *about, values)
        self._remember(values, self.exponents)
        return wires

    def add_up(self, wires: torch.Tensor, owner: int, of: int, to: int) -> torch.Tensor:
        return count_sketch.pack(*count_sketch.combine(wires, self.layout), self.layout)

    def decode(self, wires: torch.Tensor, owner: int, of: int) -> torch.Tensor:
        cells, words = count_sketch.combine(wires, self.layout)
        exponents = self.exponents[self.owners.index(owner)]
        return count_sketch.decode(cells, words, exponents, self.layout, self.senders, SEED).values


class BitmapPart(Part):
    """Values end to end and a bitmap: fewer bytes, but every sum on the way is decoded and packed again."""

    def __init__(
        self,
        owners: list[int],
        numel: int,
        device: torch.device,
        topology: Topology,
        keep: float,
        bits: int,
    ) -> None:
        super().__init__(owners, numel, device)
        self.layout = BitmapLayout(numel, keep, bits)
        self.layouts = {1: self.layout}
        """Of sums, by how many ranks they are over."""
        for ranks in {topology.local, topology.world_size} - {1}:
            share = min(1.0, ROOM * (1 - (1 - keep) ** ranks))
            self.layouts[ranks] = BitmapLayout(numel, share, bits)
        self.sum_bytes = self.layouts[topology.world_size].wire_bytes

    def encode(self, metadata: torch.Tensor | None) -> torch.Tensor:
        values, self.values = self.values, None
        wires = bitmap_sparse.encode(
            values, share_threshold(values, self.layout.share), self.layout, values
        )
        self._remember(values, wires[:, self.layout.exponents_at :][:, : self.layout.rows])
        return wires

    def add_up(self, wires: torch.Tensor, owner: int, of: int, to: int) -> torch.Tensor:
        """As ``Part.add_up``; what the wire leaves out, this rank remembers."""
        total, layout = bitmap_sparse.decode_sum(wires, self.layouts[of])[None], self.layouts[to]
        # zero where the union has room, else the least that has: ranks may choose less alike than by chance
        threshold = share_threshold(total, layout.share)
        wire = bitmap_sparse.encode(total, threshold, layout, total)
        row = self.memory[self.owners.index(owner)]
        more = row + total[0]
        row.copy_(torch.where(more.isfinite(), more, row))
        return wire[0]

    def decode(self, wires: torch.Tensor, owner: int, of: int) -> torch.Tensor:
        return bitmap_sparse.decode_sum(wires, self.layouts[of])
