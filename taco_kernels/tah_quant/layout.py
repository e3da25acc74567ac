"""What TAH-Quant puts on the wire, and where. Its size follows from the settings and the shape alone.

A tensor [.., samples, channels] is tokens x samples rows of ``channels`` values; a row is cut into tiles of
``tile_size`` consecutive channels, the last one zero padded. The wire is these sections, each padded to a
multiple of 16 bytes::

    base planes | extra plane | scales | pivots uint8 | widths

Base planes hold ``low_bits`` of every code, the extra plane the other ``high_bits - low_bits`` of those of
high tiles, in the order of their slots. A plane holds ``b`` bits of every code: 16 codes fill ``2b`` bytes,
byte ``j`` of them carrying elements ``j, j + 2b, ...``, the first in the low bits. A tile's scales are its
step and its zero point, fp16. Its byte of pivots is the element that became element 0, plus 128 if the tile
was transformed. Widths are one bit a unit, set for high ones, 32-bit words a population.

Widths are allocated to *units*, each inside a *population*: tokens inside a sample, or tiles inside a
segment of SEGMENT consecutive ones. Of every population of N, exactly floor(ratio * N) units are high, so
slots of a population start at a place that is known beforehand.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from taco_kernels.common.sizes import aligned, ceil_div, check_choice

ALLOCATIONS = ("token", "tile")
SEGMENT = 256
"""Tiles among which ``allocation='tile'`` chooses."""
TILE_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class TahConfig:
    """Everything that decides the bytes of an encoded tensor. Validated on construction (ValueError)."""

    tile_size: int = 64
    """Consecutive channels that share a scale and a zero point."""
    high_bits: int = 4
    """Bits of the codes of high units, 2 to 4."""
    low_bits: int = 3
    """Bits of the codes of the others, 2 to ``high_bits``."""
    high_ratio: float = 0.8
    """Share of units, those of the largest entropy, that get ``high_bits``."""
    allocation: str = "token"
    """Widths by token (the paper's first version) or by tile (its second)."""

    def __post_init__(self) -> None:
        check_choice("tile_size", self.tile_size, TILE_SIZES)
        check_choice("allocation", self.allocation, ALLOCATIONS)
        if not 2 <= self.low_bits <= self.high_bits <= 4:
            raise ValueError(
                f"low_bits={self.low_bits} and high_bits={self.high_bits} must lie between 2 and 4, the low "
                "ones not above the high ones"
            )
        if not 0 <= self.high_ratio <= 1:
            raise ValueError(f"high_ratio={self.high_ratio} must lie between 0 and 1")

    @property
    def extra_bits(self) -> int:
        """Bits that a high code has more than a low one."""
        return self.high_bits - self.low_bits

    @property
    def levels(self) -> int:
        """Largest code of a high tile."""
        return 2**self.high_bits - 1

    def high_of(self, units: int) -> int:
        """High units among ``units``."""
        return math.floor(self.high_ratio * units + 1e-9)


@dataclass(frozen=True)
class TahLayout:
    """Counts and places for one shape; see the module's text."""

    config: TahConfig
    shape: tuple[int, ...]

    @cached_property
    def channels(self) -> int:
        """Values of a row."""
        return self.shape[-1] if self.shape else 1

    @cached_property
    def numel(self) -> int:
        """Values."""
        return math.prod(self.shape)

    @cached_property
    def rows(self) -> int:
        """Tokens of all samples."""
        return self.numel // self.channels if self.numel else 0

    @cached_property
    def tiles_per_row(self) -> int:
        """Tiles of one token."""
        return ceil_div(self.channels, self.config.tile_size)

    @cached_property
    def tiles(self) -> int:
        """All tiles."""
        return self.rows * self.tiles_per_row

    @cached_property
    def by_token(self) -> bool:
        """Whether units are tokens."""
        return self.config.allocation == "token"

    @cached_property
    def tiles_per_unit(self) -> int:
        """Tiles of a unit."""
        return self.tiles_per_row if self.by_token else 1

    @cached_property
    def units(self) -> int:
        """All units."""
        return self.rows if self.by_token else self.tiles

    @cached_property
    def population(self) -> int:
        """Units of a population: a sample's tokens, or a segment's tiles; the last segment may have fewer."""
        samples = self.shape[-2] if len(self.shape) >= 3 else 1
        return self.rows // samples if self.by_token and self.rows else SEGMENT

    @cached_property
    def populations(self) -> int:
        """How many there are."""
        return ceil_div(self.units, self.population)

    @cached_property
    def high_units(self) -> int:
        """High units of a whole population."""
        return self.config.high_of(self.population)

    @cached_property
    def last_high_units(self) -> int:
        """High units of the last population."""
        return self.config.high_of(self.units - max(self.populations - 1, 0) * self.population)

    @cached_property
    def high_tiles(self) -> int:
        """High tiles of the whole tensor."""
        whole = max(self.populations - 1, 0)
        return (whole * self.high_units + self.last_high_units) * self.tiles_per_unit

    @cached_property
    def words(self) -> int:
        """32-bit words of a population's widths."""
        return ceil_div(self.population, 32)

    @cached_property
    def base_planes(self) -> tuple[int, ...]:
        """Bits of each base plane, for the low bits of the code first: 3 -> (2, 1)."""
        return tuple(width for width in (4, 2, 1) if self.config.low_bits & width)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each section, without padding, in the order of the wire."""
        size, tiles, config = self.config.tile_size, self.tiles, self.config
        sizes = {f"base{i}": tiles * size * bits // 8 for i, bits in enumerate(self.base_planes)}
        sizes["extra"] = self.high_tiles * size * config.extra_bits // 8
        sizes["scales"] = 4 * tiles
        sizes["pivots"] = tiles
        sizes["widths"] = 4 * self.words * self.populations if config.extra_bits else 0
        return sizes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First byte of each section."""
        offsets, at = {}, 0
        for name, size in self.sizes.items():
            offsets[name] = at
            at += aligned(size)
        return offsets

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes of the whole wire."""
        return self.offsets["widths"] + aligned(self.sizes["widths"])


@lru_cache(maxsize=256)
def layout_of(config: TahConfig, shape: tuple[int, ...]) -> TahLayout:
    """The layout of a tensor of ``shape``, cached."""
    return TahLayout(config, tuple(shape))
