"""Compile-time constants of the kernels."""

from dataclasses import dataclass
from functools import lru_cache

import triton.language as tl

from taco_kernels.common.constants import Constants
from taco_kernels.tah_quant.layout import Layout


@dataclass(frozen=True, repr=False, eq=False)
class Spec(Constants):
    """One argument for all constants: kernels read ``C.G`` and so on, each a tl.constexpr."""

    R: tl.constexpr
    """Tiles a program holds at a time."""
    G: tl.constexpr
    """Values a tile."""
    POINT: tl.constexpr
    """Points of the transform: G."""
    BLOCKS: tl.constexpr
    """1; hadamard.py asks."""
    LOW: tl.constexpr
    """Bits of a low code."""
    EXTRA: tl.constexpr
    """Bits that a high code has more."""
    LEVELS: tl.constexpr
    """Largest code."""
    TRANSFORM: tl.constexpr
    """Pivot and Hadamard transform."""
    BY_TOKEN: tl.constexpr
    """Units are tokens; else tiles."""
    LONG: tl.constexpr
    """Units have R tiles or more."""
    PADDED: tl.constexpr
    """Rows are not whole tiles."""
    STAGES: tl.constexpr
    """Depth of the software pipeline."""
    INTERPRET: tl.constexpr
    """Running under TRITON_INTERPRET=1."""


@lru_cache
def spec_of(layout: Layout, tiles: int, stages: int, interpret: bool) -> Spec:
    """Constants for ``layout``, programs holding ``tiles`` tiles at a time; cached."""
    config = layout.config
    return Spec.of(
        R=tiles,
        G=config.tile_size,
        POINT=config.tile_size,
        BLOCKS=1,
        LOW=config.low_bits,
        EXTRA=config.extra_bits,
        LEVELS=config.levels,
        TRANSFORM=config.transform != "none",
        BY_TOKEN=layout.by_token,
        LONG=layout.tiles_per_unit >= tiles,
        PADDED=layout.channels % config.tile_size != 0,
        STAGES=stages,
        INTERPRET=interpret,
    )
