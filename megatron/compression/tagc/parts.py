"""What TAGC does with shares of one size: choose values, encode them, add them up."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch

from megatron.compression.communication.topology import Topology
from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from taco_kernels import bitmap_sparse, count_sketch
from taco_kernels.bitmap_sparse import BitmapLayout
from taco_kernels.common.magnitudes import NON_FINITE
from taco_kernels.count_sketch.selection import share_threshold

SEED = 0x7A6C
ROOM = 1.02
"""Room for the union of the ranks' choices in a packed sum, over what independent choices need."""


class Sum(Enum):
    """Whose values a wire holds."""

    OWN = "one rank's"
    NODE = "those of a node's ranks"
    ALL = "all ranks'"


@dataclass(frozen=True)
class PartSettings:
    """What the settings say, in the terms of the wires."""

    keep: float
    """Largest share of its values that a rank sends."""
    layers: frozenset[str]
    wire: Literal["sketch", "packed"]
    sketch: count_sketch.SketchConfig
    bits: int = 16
    """Of a packed value."""


class SketchPart:
    """Sketches: they add up without being decoded.

    Args:
        owners: ranks whose share has this size.
        topology: of the ranks whose gradients are added up.
        feedback: allocated for ``[owners, numel]``.
    """

    def __init__(
        self,
        owners: list[int],
        numel: int,
        settings: PartSettings,
        topology: Topology,
        feedback: ErrorFeedback,
    ) -> None:
        self.owners, self.keep, self.feedback = owners, settings.keep, feedback
        self.senders = topology.world_size
        self.layout = count_sketch.Layout(settings.sketch, numel)
        self.sum_bytes = self.layout.wire_bytes
        """Of a sum's wire."""
        self.room = self.layout.exact_density * numel

    def take_metadata(self, values: torch.Tensor) -> torch.Tensor | None:
        """Take in gradients ``[owners, numel]``; metadata uint8 ``[owners, n]``, to be maximised over the
        ranks."""
        self.values = self.feedback.compensated(0, values)
        self.thresholds, classes = count_sketch.candidates(self.values, self.keep)
        return torch.cat([count_sketch.row_exponents(self.values, self.layout), classes], dim=1)

    def encode(self, metadata: torch.Tensor | None) -> torch.Tensor:
        """Wires uint8 ``[owners, bytes]``; what they leave out is remembered."""
        rows = self.layout.rows
        self.exponents, classes = metadata[:, :rows].contiguous(), metadata[:, rows:]
        threshold = count_sketch.choose(self.thresholds, classes, self.layout.exact_density)
        values, self.values, self.thresholds = self.values, None, None
        wires = count_sketch.encode(
            values, threshold, self.exponents, self.layout, self.senders, SEED, values
        )
        # a step with a NaN or infinity is skipped: keep what was remembered before it
        self.feedback.replace(0, values, (self.exponents == NON_FINITE).any())
        return wires

    def add_up(self, wires: torch.Tensor, owner: int, of: Sum, to: Sum) -> torch.Tensor:
        """The wire of the sum ``to``, from uint8 ``[S, bytes]``, sums ``of`` fewer. Nothing is decoded."""
        return count_sketch.pack(*count_sketch.combine(wires, self.layout), self.layout)

    def decode(self, wires: torch.Tensor, owner: int, of: Sum) -> count_sketch.Decoded:
        """The sum of what all ranks have sent, from the wires of all sums ``of`` some of them."""
        cells, words = count_sketch.combine(wires, self.layout)
        exponents = self.exponents[self.owners.index(owner)]
        return count_sketch.decode(cells, words, exponents, self.layout, self.senders, SEED)


class BitmapPart:
    """Values end to end and a bitmap: fewer bytes, but every sum on the way is decoded and packed again.

    Arguments as ``SketchPart``'s.
    """

    def __init__(
        self,
        owners: list[int],
        numel: int,
        settings: PartSettings,
        topology: Topology,
        feedback: ErrorFeedback,
    ) -> None:
        self.owners, self.feedback = owners, feedback

        def union(ranks: int) -> BitmapLayout:
            share = min(1.0, ROOM * (1 - (1 - settings.keep) ** ranks))
            return BitmapLayout(numel, share, settings.bits)

        self.layout = BitmapLayout(numel, settings.keep, settings.bits)
        unions = {Sum.NODE: union(topology.local), Sum.ALL: union(topology.world_size)}
        self.layouts = {Sum.OWN: self.layout, **unions}
        self.sum_bytes = self.layouts[Sum.ALL].wire_bytes
        self.room = float(numel)

    def take_metadata(self, values: torch.Tensor) -> torch.Tensor | None:
        """Take in the gradients; nothing has to be agreed on."""
        self.values = self.feedback.compensated(0, values)
        return None

    def encode(self, metadata: torch.Tensor | None) -> torch.Tensor:
        values, self.values = self.values, None
        wires = bitmap_sparse.encode(values, share_threshold(values, self.layout.share), self.layout, values)
        exponents = wires[:, self.layout.exponents_at : self.layout.exponents_at + self.layout.rows]
        self.feedback.replace(0, values, (exponents == NON_FINITE).any())
        return wires

    def add_up(self, wires: torch.Tensor, owner: int, of: Sum, to: Sum) -> torch.Tensor:
        """As ``SketchPart.add_up``; what the wire leaves out, this rank remembers."""
        total, layout = bitmap_sparse.decode_sum(wires, self.layouts[of])[None], self.layouts[to]
        # zero where the union has room, else the least that has: ranks may choose less alike than by chance
        threshold = share_threshold(total, layout.share)
        wire = bitmap_sparse.encode(total, threshold, layout, total)
        self.feedback.add(0, self.owners.index(owner), total[0])
        return wire[0]

    def decode(self, wires: torch.Tensor, owner: int, of: Sum) -> count_sketch.Decoded:
        values = bitmap_sparse.decode_sum(wires, self.layouts[of])
        union = values.count_nonzero()
        counters = torch.stack([union, torch.zeros_like(union)])
        return count_sketch.Decoded(values, counters, values.new_zeros(2))
