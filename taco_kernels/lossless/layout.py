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
Values behind the row's end are zeros.

The area holds a share of the values' escapes, so a row may not fit. Then every row that is encoded with it
travels as it is: behind the header, its bytes; the part of them that exceeds ``head_bytes`` is the rest, to
be sent behind it. A payload is ``head_bytes`` long, or ``whole_bytes`` with the rest. Without the rest it
decodes to zeros, so that who has not looked at the flag computes on, in bounds and with finite values.
"""

import functools
import math
from dataclasses import dataclass

import torch

from taco_kernels.common.sizes import aligned, ceil_div, described

HEADER = 16
"""Bytes: int32 words of escapes that the row needed, then a flag in a byte, zeros."""
FLAG_AT = 4
CODED, CUT, WHOLE = 0, 1, 2
"""Flags: coded; as it is, with a rest; as it is, without one."""
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

    @functools.cached_property
    def head_bytes(self) -> int:
        """Bytes of a payload without the rest."""
        coded = self.low_at + (2 * self.blocks * BLOCK if self.itemsize == 4 else 0)
        return min(coded, self.whole_bytes)

    @functools.cached_property
    def whole_bytes(self) -> int:
        """Bytes of a payload with the rest: the header and the row as it is."""
        return HEADER + aligned(self.itemsize * self.numel)

    @property
    def rest_bytes(self) -> int:
        """Bytes of the rest; 0 for short rows, which always travel as they are."""
        return self.whole_bytes - self.head_bytes

    @property
    def raw_flag(self) -> int:
        """Of rows that travel as they are."""
        return CUT if self.rest_bytes else WHOLE

    def check_values(self, x: torch.Tensor) -> None:
        """Raise ValueError unless ``x`` is ``[rows, numel]`` of the layout's dtype."""
        if x.dim() != 2 or x.shape[1] != self.numel or x.dtype != self.dtype:
            raise ValueError(f"x is {described(x)}; this layout needs {self.dtype}[*, {self.numel}]")

    def check_payloads(self, payloads: torch.Tensor) -> None:
        """Raise ValueError unless ``payloads`` is uint8 ``[..., head_bytes or whole_bytes]``."""
        if payloads.dtype != torch.uint8 or payloads.shape[-1] not in (self.head_bytes, self.whole_bytes):
            raise ValueError(
                f"payloads is {described(payloads)}; this layout needs uint8[..., {self.head_bytes} or "
                f"{self.whole_bytes}]"
            )


@functools.lru_cache(maxsize=1024)
def layout_of(numel: int, dtype: torch.dtype, share: float) -> LosslessLayout:
    """The layout of a row, made once."""
    return LosslessLayout(numel, dtype, share)
