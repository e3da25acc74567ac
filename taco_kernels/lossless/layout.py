"""What a row of bf16 or fp32 values travels as when no bit may change.

The upper 16 bits of a value are a sign, an exponent of 8 bits and 7 bits of mantissa (those of bf16; fp32 has
16 more below). All but the exponent travels as it is. Of the exponents of trained tensors 2.6 bits in 8 are
information, so each is a code of 3 bits: how far it lies below its block's base, 0 to 6, or 7, an escape.
The base of a block (128 values) is the smaller of the largest exponents of its even and its odd groups (8
values), so that one outlier does not decide it. Escapes share an area for the whole row, in words of 32 bits
that each tile (2048 values) takes as many of as it needs: 4 bits an escape, its distance from the base being
-2, -1 or 7 to 19, or its exponent 0; in a tile with any other, 8 bits an escape, the exponent. ::

    header | escapes | starts, an int32 a tile | bases, a byte a block | codes, 24 bits a group: all int16,
    then all uint8 | sign and mantissa, a byte a value, of four the first, third, second, fourth | fp32: the
    lower 16 bits

A group's codes and escapes are those of its values 0, 4, 2, 6, 1, 5, 3, 7. Six codes are the lower 6 bits of
three bytes, in pairs; the upper 2 bits of the three are the last two codes. Distances are modulo 256.
Values after the row's end are zeros.

The area holds a share of the values' escapes, so a row may overflow. A flag in its header says so, and so
does that of the first row that was encoded with it. A payload with the flag decodes to zeros: whoever has not
looked computes on with finite values, and the flag tells that they are wrong.

A row for which the coded form would be longer is stored as it is, after the header, and never overflows.
"""

import functools
import math
from dataclasses import dataclass

import torch

from taco_kernels.common.sizes import aligned, ceil_div, described

HEADER = 16
"""Bytes: int32 words of escapes that the row needed, the overflow flag, zeros."""
FLAG_AT = 4
"""Byte of the overflow flag, 0 or 1."""
GROUP, BLOCK, TILE = 8, 128, 2048
WINDOW = 7
"""Distances that have a code of their own; the code of an escape."""
NEAR_BELOW, NEAR_ABOVE, ZERO = 2, 19, 15
"""Distances from -2 and to 19, without those of the window, are 4 bits from 0 on; so is an exponent of 0."""


@dataclass(frozen=True)
class LosslessLayout:
    """Bytes of a row of ``numel`` values. Validated on construction (ValueError)."""

    numel: int
    dtype: torch.dtype
    share: float = 0.07
    """Escapes that the area holds, of the row's values, in (0, 1]."""

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"lossless takes bf16 and fp32, not {self.dtype}: of fp16's 5 bits of exponent 3 would stay"
            )
        if not 1 <= self.numel < 2**31 - TILE:
            raise ValueError(f"numel={self.numel} must lie in [1, 2^31 - {TILE})")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} must lie in (0, 1]")

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize

    @property
    def blocks(self) -> int:
        """Blocks, the last one padded."""
        return ceil_div(self.numel, BLOCK)

    @property
    def tiles(self) -> int:
        """Tiles, the last one perhaps of fewer blocks."""
        return ceil_div(self.blocks, TILE // BLOCK)

    @functools.cached_property
    def words(self) -> int:
        """int32 words of the area of escapes: the share's, and some because tiles take whole ones."""
        return aligned(math.ceil(self.share * self.blocks * BLOCK / 8) + self.tiles + 8, 4)

    @property
    def starts_at(self) -> int:
        """Byte where the starts begin: a tile's first word times 2, plus 1 where escapes take 8 bits."""
        return HEADER + 4 * self.words

    @property
    def bases_at(self) -> int:
        """Byte where the bases begin."""
        return self.starts_at + aligned(4 * self.tiles)

    @property
    def codes_at(self) -> int:
        """Byte where the lower 16 bits of the codes of each group begin."""
        return self.bases_at + aligned(self.blocks)

    @property
    def more_at(self) -> int:
        """Byte where their upper 8 bits begin."""
        return self.codes_at + self.blocks * BLOCK // GROUP * 2

    @property
    def high_at(self) -> int:
        """Byte where signs and mantissas begin."""
        return self.more_at + self.blocks * BLOCK // GROUP

    @property
    def low_at(self) -> int:
        """Byte where the lower 16 bits of fp32 begin."""
        return self.high_at + self.blocks * BLOCK

    @property
    def coded_bytes(self) -> int:
        """Bytes of the coded form."""
        return self.low_at + (2 * self.blocks * BLOCK if self.itemsize == 4 else 0)

    @functools.cached_property
    def raw(self) -> bool:
        """Whether the row is stored as it is."""
        return self.coded_bytes >= HEADER + aligned(self.itemsize * self.numel)

    @functools.cached_property
    def payload_bytes(self) -> int:
        """Bytes of a payload."""
        return HEADER + aligned(self.itemsize * self.numel) if self.raw else self.coded_bytes

    def check_values(self, x: torch.Tensor) -> None:
        """Raise ValueError unless ``x`` is ``[rows, numel]`` of the layout's dtype."""
        if x.dim() != 2 or x.shape[1] != self.numel or x.dtype != self.dtype:
            raise ValueError(f"x is {described(x)}; this layout needs {self.dtype}[*, {self.numel}]")

    def check_payloads(self, payloads: torch.Tensor) -> None:
        """Raise ValueError unless ``payloads`` is uint8 ``[..., payload_bytes]``."""
        if payloads.dtype != torch.uint8 or payloads.shape[-1] != self.payload_bytes:
            raise ValueError(
                f"payloads is {described(payloads)}; this layout needs uint8[..., {self.payload_bytes}]"
            )


@functools.lru_cache(maxsize=1024)
def layout_of(numel: int, dtype: torch.dtype, share: float) -> LosslessLayout:
    """The layout of a row, made once."""
    return LosslessLayout(numel, dtype, share)
