"""Geometry of a count sketch that decodes without loss, and what goes on its wire.

A shard of ``numel`` values is seen as rows of ``width`` consecutive values. Row r belongs to block ``r %
blocks`` (interleaved, so that regions of different density mix) and is number ``r // blocks`` there. A block
has ``3 * third`` sketch rows in three subtables of ``third``; element (r, c) is added, with a random sign
each, to one cell of every subtable: sketch row h_j(r), column ``c ^ mask_j(r)``. The masks spread what lies
in one column of a weight matrix (an outlier channel) over all columns of the sketch, and they tell apart rows
whose three sketch rows are the same.

The wire of a shard is::

    cells, blocks * 3 * third * width integers | bitmap, one bit a value, 32 values an int32 word | zeros

padded to a multiple of 64 bytes. Cells hold sums modulo 2^32 (or 2^16), so a sum of wires' cells, in any
order and by any means, is the cells of the sum; the bitmaps of W senders are joined with OR where they meet.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from taco_kernels.common.sizes import aligned, ceil_div, described

ALIGNMENT = 64
MAX_WIDTH = 1024
MIN_WIDTH = 32
MAX_SENDERS = 1024
MAX_MANTISSA = 22
"""Most bits of a value on the grid: what fp32 rounds exactly by adding 1.5 * 2^23."""
EXACT_LOAD = 0.77
"""Members a cell up to which peeling recovers everything: 0.818 for endless sketches, less what chance needs
in slabs of 32 columns of 1024 to 2048 rows."""
COUNT_SHIFT = 20
"""A cell's key is ``members << 20`` plus the sum of its members' row numbers."""


@dataclass(frozen=True)
class SketchConfig:
    """Settings of a sketch. Validated on construction (ValueError)."""

    ratio: float = 4.0
    """Values a cell: the sketch has ``numel / ratio`` cells (rounded up to whole rows)."""
    width: int = MAX_WIDTH
    """Values a row, a power of two from 32 to 1024; narrower where the shard is small, see Layout."""
    block_rows: int = 2048
    """Most rows a block (32 to 4096). Fewer give more blocks to decode side by side, and less certainty."""
    cell_bits: int = 32
    """Bits of a cell, 32 or 16: 16 halves the sketch and leaves a value 15 bits less log2 of the senders."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and 0.5 <= self.ratio <= 64):
            raise ValueError(f"ratio={self.ratio} must be from 0.5 to 64 values a cell")
        if not MIN_WIDTH <= self.width <= MAX_WIDTH or self.width & (self.width - 1):
            raise ValueError(f"width={self.width} must be a power of two from {MIN_WIDTH} to {MAX_WIDTH}")
        if not 32 <= self.block_rows <= 4096:
            raise ValueError(f"block_rows={self.block_rows} must be from 32 to 4096")
        if self.cell_bits not in (16, 32):
            raise ValueError(f"cell_bits={self.cell_bits} must be 16 or 32")

    def mantissa(self, senders: int) -> int:
        """Bits of a value on the grid below the largest of its row, so that ``senders`` of them add exactly.

        Any sum of ``senders`` values stays below 2^24 grid steps, where fp32 addition is exact in every
        order, and inside a cell's range.
        """
        if not 1 <= senders <= MAX_SENDERS:
            raise ValueError(f"senders={senders} must be from 1 to {MAX_SENDERS}")
        headroom = math.ceil(math.log2(senders))
        return min(MAX_MANTISSA, 24 - headroom, self.cell_bits - 1 - headroom)


@dataclass(frozen=True)
class Layout:
    """A SketchConfig applied to shards of ``numel`` values."""

    config: SketchConfig
    numel: int

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ValueError(f"numel={self.numel} must be at least 1")

    @cached_property
    def width(self) -> int:
        """Values a row: the config's, halved until there are 1024 rows, as hashing needs many."""
        width = self.config.width
        while width > MIN_WIDTH and self.numel < 1024 * width:
            width //= 2
        return width

    @cached_property
    def rows(self) -> int:
        """Rows, the last one padded."""
        return ceil_div(self.numel, self.width)

    @cached_property
    def blocks(self) -> int:
        """Sketches side by side, each of every blocks-th row."""
        return ceil_div(self.rows, self.config.block_rows)

    @cached_property
    def block_rows(self) -> int:
        """Rows of the largest block."""
        return ceil_div(self.rows, self.blocks)

    @cached_property
    def third(self) -> int:
        """Sketch rows of one of a block's three subtables."""
        return math.ceil(self.block_rows / (3 * self.config.ratio))

    @property
    def sketch_rows(self) -> int:
        """Sketch rows of all blocks; row ``(block * 3 + j) * third + h`` is row h of a block's subtable j."""
        return self.blocks * 3 * self.third

    @property
    def cells(self) -> int:
        """Cells of the sketch."""
        return self.sketch_rows * self.width

    @property
    def cell_bytes(self) -> int:
        """Bytes of the cells on the wire."""
        return self.cells * self.config.cell_bits // 8

    @property
    def words(self) -> int:
        """int32 words of the bitmap."""
        return self.rows * (self.width // 32)

    @property
    def exact_density(self) -> float:
        """Density of the union up to which decoding is exact."""
        return EXACT_LOAD * self.cells / (self.rows * self.width)

    @property
    def wire_bytes(self) -> int:
        """Exact bytes of one wire."""
        return aligned(self.cell_bytes + 4 * self.words, ALIGNMENT)

    def check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, last: int) -> None:
        """Raise ValueError unless ``tensor`` is dtype[*, last] with contiguous rows."""
        if tensor.dim() != 2 or tensor.shape[1] != last or tensor.dtype != dtype or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} is {described(tensor)}; this layout needs {dtype}[*, {last}] with contiguous rows"
            )
