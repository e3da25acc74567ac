"""Which parts of a gradient bucket TAGC compresses, and who owns them.

Layer-selective compression (TAGC, arXiv 2504.05638): the weight matrices of MLPs and the embeddings are most
of a model and bear sparse gradients well; attention's matrices go uncompressed unless asked for, and so do
vectors (norms, biases) always.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.compression.data_parallel.compressor import GradientBucket, ParameterSpan

LAYERS = {
    "mlp": (".mlp.",),
    "embedding": ("embedding.", "output_layer."),
    "attention": (".self_attention.", ".cross_attention."),
}
"""What ``layers`` names, and how their parameters' names are told."""

SMALLEST = 16384
"""Values of a shard under which hashing is too coarse to be reliable: they go uncompressed."""

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

    @property
    def exact_numel(self) -> int:
        """Values that are not."""
        return numel_of(self.exact)


def numel_of(segments: Iterable[Segment]) -> int:
    """Values in segments."""
    return sum(end - begin for begin, end in segments)


def shares_of(bucket: GradientBucket, layers: frozenset[str]) -> list[Share]:
    """The bucket's shares, by owner.

    With the distributed optimizer an owner's share is its shard. Without it, compressed segments are cut into
    equal shares, and the first owner stands for all exact ones, which are all-reduced.
    """
    compressed = merged((s.start, s.end) for s in bucket.spans if is_compressed(s, layers))
    exact = merged((s.start, s.end) for s in bucket.spans if not is_compressed(s, layers))
    world = bucket.topology.world_size
    if bucket.sharded:
        size = bucket.numel // world
        cuts = [(owner * size, owner * size + size) for owner in range(world)]
        return [_large_enough(clipped(compressed, *cut), clipped(exact, *cut)) for cut in cuts]
    piece = -(-numel_of(compressed) // world)
    if piece < SMALLEST:
        compressed, exact = (), merged([*compressed, *exact])
    parts = [cut_out(compressed, owner * piece, owner * piece + piece) for owner in range(world)]
    return [Share(part, () if owner else exact) for owner, part in enumerate(parts)]


def _large_enough(compressed: tuple[Segment, ...], exact: tuple[Segment, ...]) -> Share:
    if numel_of(compressed) < SMALLEST:
        return Share((), merged([*compressed, *exact]))
    return Share(compressed, exact)


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
