"""TAGC's settings."""

from dataclasses import dataclass
from functools import partial

from megatron.compression.codecs import register_gradient_compressor
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientCompressor,
    GradientSync,
)
from megatron.compression.errors import CompressionConfigError
from megatron.compression.tagc.parts import BitmapPart, SketchPart, parse_layers
from megatron.compression.tagc.sync import TagcGradientSync
from taco_kernels.count_sketch import EXACT_LOAD, SketchConfig

DENSEST = 0.5
SPARSEST = 0.98
"""Sparsities between which the sketch is smaller than the gradients and larger than its index."""
WARMUP_SHARE = 0.2
LONGEST_WARMUP = 1000
"""Iterations whose gradients go uncompressed first, of --train-iters, and their most. Not of the
paper."""
BITS = {"packed": (8, 16), "sketch": (16, 32)}
"""By wire."""


@register_gradient_compressor("tagc")
@dataclass(frozen=True)
class Tagc(GradientCompressor):
    """TAGC (arXiv 2504.05638): the largest gradients only; the others are added to the next
    iteration's."""

    sparsity: float = 0.8
    """Share of its gradients that a rank leaves out of an iteration, from 0.5 to 0.98: the
    smallest."""

    wire: str = "packed"
    """How the values are sent: packed = end to end with a bitmap, exact at any density and a third
    of the sketch's bytes at 0.8 and 4 ranks; sketch = the paper's, whose sums need no decoding."""

    layers: str = "mlp+embedding"
    """Weight matrices whose gradients are compressed: mlp, embedding (with the output layer),
    attention, joined by +, or all. The others go uncompressed, and so do biases and norms."""

    bits: int = 16
    """Bits of a packed value (8, 16) or of a cell of the sketch (16, 32): precision of what is
    sent, counted from the largest of 1024 neighbours, less log2 of the ranks in a sketch. The
    memory keeps what rounding loses."""

    has_memory = True

    def __post_init__(self) -> None:
        if not DENSEST <= self.sparsity <= SPARSEST:
            raise ValueError(
                f"sparsity={self.sparsity} must lie in [{DENSEST}, {SPARSEST}]: denser gradients "
                "are larger as a sketch than as they are, sparser ones are nearly all index"
            )
        if self.wire not in BITS:
            raise ValueError(f"wire={self.wire} must be packed or sketch")
        if self.bits not in BITS[self.wire]:
            allowed = ", ".join(map(str, BITS[self.wire]))
            raise ValueError(f"bits={self.bits} must be {allowed} with wire={self.wire}")
        parse_layers(self.layers)

    def build(self, bucket: GradientBucket) -> GradientSync:
        keep = 1 - self.sparsity
        if self.wire == "sketch":
            make_part = partial(SketchPart, keep=keep, config=self.sketch(bucket))
        else:
            make_part = partial(BitmapPart, keep=keep, bits=self.bits)
        return TagcGradientSync(bucket, parse_layers(self.layers), make_part)

    def default_start_iteration(self, train_iters: int | None) -> int:
        """Return a fifth of the run, at most 1000 iterations; 0 in a run of unknown length."""
        return min(int(WARMUP_SHARE * (train_iters or 0)), LONGEST_WARMUP)

    def sketch(self, bucket: GradientBucket) -> SketchConfig:
        """Return sketches with room for the union of the ranks' choices, were they independent.

        That is 1.3 values a cell for 4 ranks at 0.8. Ranks that choose less alike agree on sending
        fewer.

        Raises:
            CompressionConfigError: the sketches would be larger than the gradients.
        """
        ranks = bucket.topology.world_size
        # A value is in the sum unless every rank has left it out.
        union = 1 - self.sparsity**ranks
        sketch = SketchConfig(EXACT_LOAD / union, cell_bits=self.bits)
        # Cells by values, and one bit a value for the index.
        bits = sketch.cell_bits / sketch.ratio + 1
        uncompressed_bits = 8 * bucket.gradients.element_size()
        if bits >= uncompressed_bits:
            raise CompressionConfigError(
                f"{self.name}: sketches of {ranks} ranks have {bits:.2f} bits a value, a "
                f"gradient {uncompressed_bits}; give wire=packed, or more sparsity"
            )
        return sketch

    def describe(self) -> str:
        layers = " and ".join(sorted(parse_layers(self.layers)))
        if self.wire == "sketch":
            sent = "sent as sketches"
        else:
            sent = f"packed, {self.bits} bits each"
        return (
            f"each rank leaves out {self.sparsity:g} of its gradients of {layers} for the next "
            f"iteration; the others are {sent}"
        )
