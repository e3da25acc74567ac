"""What a sparse tensor travels as when it need not add up on the way: its values end to end, and a bitmap.

A shard of ``numel`` values is rows of 1024. Its wire is::

    values, capacity of 8 or 16 bits, in order | bitmap, one bit a value
    | an int32 start every 4 rows: how many values come before these | a uint8 exponent a row

each part padded with zeros to a multiple of 64 bytes, and the values to their capacity. Values are integers
on their row's power-of-two grid.
"""

import math
from dataclasses import dataclass

import torch

from taco_kernels.common.sizes import aligned, ceil_div, check_choice, described

ALIGNMENT = 64
WIDTH = 1024
TILE_ROWS = 4
"""Rows a start: what comes before a row of them is counted in the bitmap of at most three."""


@dataclass(frozen=True)
class BitmapLayout:
    """Sizes of a shard's wire. Validated on construction (ValueError)."""

    numel: int
    share: float
    """Largest share of the values that is sent, in (0, 1]."""
    bits: int = 16
    """Bits of a value: 8 or 16."""

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ValueError(f"numel={self.numel} must be at least 1")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} must lie in (0, 1]")
        if self.capacity >= 2**31 - 2**20:
            raise ValueError(f"{self.capacity} values to send of a shard: 2^31 - 2^20 cannot be counted")
        check_choice("bits", self.bits, (8, 16))

    @property
    def capacity(self) -> int:
        """Most values sent."""
        return math.ceil(self.share * self.numel)

    @property
    def rows(self) -> int:
        """Rows, the last one padded."""
        return ceil_div(self.numel, WIDTH)

    @property
    def words(self) -> int:
        """int32 words of the bitmap."""
        return self.rows * (WIDTH // 32)

    @property
    def words_at(self) -> int:
        """Byte where the bitmap begins."""
        return aligned(self.capacity * self.bits // 8, ALIGNMENT)

    @property
    def tiles(self) -> int:
        """Starts, the last one perhaps of fewer rows."""
        return ceil_div(self.rows, TILE_ROWS)

    @property
    def starts_at(self) -> int:
        """Byte where the starts begin."""
        return self.words_at + aligned(4 * self.words, ALIGNMENT)

    @property
    def exponents_at(self) -> int:
        """Byte where the exponents begin."""
        return self.starts_at + aligned(4 * self.tiles, ALIGNMENT)

    @property
    def wire_bytes(self) -> int:
        """Exact bytes of one wire."""
        return self.exponents_at + aligned(self.rows, ALIGNMENT)

    def check_values(self, x: torch.Tensor, remainder: torch.Tensor | None) -> None:
        """Raise ValueError unless both are fp32 [S, numel] with contiguous rows, and there is a shard."""
        if x.dim() != 2 or x.shape[1] != self.numel or x.dtype != torch.float32 or x.stride(1) != 1:
            raise ValueError(f"x is {described(x)}; this layout needs float32[*, {self.numel}]")
        if not len(x):
            raise ValueError("x has no shard to pack")
        if remainder is None:
            return
        if remainder.shape != x.shape or remainder.dtype != torch.float32 or remainder.stride(1) != 1:
            raise ValueError(
                f"remainder is {described(remainder)}; it must be float32{list(x.shape)} with contiguous rows"
            )

    def check_wires(self, wires: torch.Tensor) -> None:
        """Raise ValueError unless ``wires`` is uint8 [W, wire_bytes] of at least one sender."""
        shape = wires.shape
        if len(shape) != 2 or not shape[0] or shape[1] != self.wire_bytes or wires.dtype != torch.uint8:
            raise ValueError(f"wires is {described(wires)}; this layout needs uint8[*, {self.wire_bytes}]")
