"""What a sparse tensor travels as when it need not add up on the way: its values end to end, and a bitmap.

A shard of ``numel`` values is rows of 1024. Its wire is::

    values, capacity of 8, 16 or 32 bits, in order | bitmap, one bit a value
    | an int32 start every 4 rows: how many values come before these | a uint8 exponent a row

each part padded with zeros to a multiple of 64 bytes, and the values to their capacity. 8- and 16-bit values
are integers on their row's power-of-two grid, 32-bit ones are fp32.
"""

import math
from dataclasses import dataclass

ALIGNMENT = 64
WIDTH = 1024
TILE_ROWS = 4
"""Rows a start: what comes before a row of them is counted in the bitmap of at most three."""


def padded(size: int) -> int:
    """Bytes up to the next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PackedLayout:
    """Sizes of a shard's wire. Validated on construction (ValueError)."""

    numel: int
    share: float
    """Largest share of the values that is sent, in (0, 1]."""
    bits: int = 16
    """Bits of a value: 8, 16 or 32."""

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ValueError(f"numel={self.numel} must be at least 1")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} must lie in (0, 1]")
        if self.capacity >= 2**31 - 2**20:
            raise ValueError(f"{self.capacity} values to send of a shard: 2^31 - 2^20 cannot be counted")
        if self.bits not in (8, 16, 32):
            raise ValueError(f"bits={self.bits} must be 8, 16 or 32")

    @property
    def capacity(self) -> int:
        """Most values sent."""
        return math.ceil(self.share * self.numel)

    @property
    def rows(self) -> int:
        """Rows, the last one padded."""
        return -(-self.numel // WIDTH)

    @property
    def words(self) -> int:
        """int32 words of the bitmap."""
        return self.rows * (WIDTH // 32)

    @property
    def words_at(self) -> int:
        """Byte where the bitmap begins."""
        return padded(self.capacity * self.bits // 8)

    @property
    def tiles(self) -> int:
        """Starts, the last one perhaps of fewer rows."""
        return -(-self.rows // TILE_ROWS)

    @property
    def starts_at(self) -> int:
        """Byte where the starts begin."""
        return self.words_at + padded(4 * self.words)

    @property
    def exponents_at(self) -> int:
        """Byte where the exponents begin."""
        return self.starts_at + padded(4 * self.tiles)

    @property
    def wire_bytes(self) -> int:
        """Exact bytes of one wire."""
        return self.exponents_at + padded(self.rows)
