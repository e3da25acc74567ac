"""Compile-time constants of a tile, seen as groups or as rows of a rotation."""

from dataclasses import dataclass
from functools import lru_cache

import triton.language as tl

from taco_kernels.common.constants import Constants
from taco_kernels.sdp4bit.layout import FLOOR, HADAMARD_POINTS, GroupFormat

POINT = 64
"""Values in a row of a rotation: two blocks of 32, as many as ``taco_kernels.common.hadamard.shuffle`` needs
for 16 consecutive values in a thread."""


@dataclass(frozen=True, repr=False, eq=False)
class Tile(Constants):
    """One argument for all constants; what planes.py and unpacking.py read has their names."""

    R: tl.constexpr
    """Groups a tile."""
    G: tl.constexpr
    """Values a group."""
    RH: tl.constexpr
    """Rows of POINT values a tile."""
    FORMAT: tl.constexpr
    BITS: tl.constexpr
    QMAX: tl.constexpr
    FLOOR: tl.constexpr
    PAYLOAD: tl.constexpr
    """Bytes of a group's codes."""
    HADAMARD: tl.constexpr
    INTERPRET: tl.constexpr
    """Running under TRITON_INTERPRET=1."""


@dataclass(frozen=True, repr=False, eq=False)
class Rotation(Constants):
    """A tile as rows of POINT values, for taco_kernels.common.hadamard."""

    R: tl.constexpr
    G: tl.constexpr
    POINT: tl.constexpr
    BLOCKS: tl.constexpr
    BLOCK: tl.constexpr
    """Points of the transform."""
    INTERPRET: tl.constexpr


@dataclass(frozen=True, repr=False, eq=False)
class Blocks(Constants):
    """A tile as blocks of HADAMARD_POINTS values, for blocks.py."""

    R: tl.constexpr
    """Blocks a tile."""
    BLOCKS: tl.constexpr
    """Blocks a group."""
    BITS: tl.constexpr
    PAYLOAD: tl.constexpr
    """Bytes of a group's codes."""
    HADAMARD: tl.constexpr
    INTERPRET: tl.constexpr


@lru_cache
def make_tile(format: GroupFormat, values: int, interpret: bool) -> Tile:
    """Constants of a tile of ``values`` values; cached, as launches hash and compare them."""
    return Tile.of(
        R=values // format.group_size,
        G=format.group_size,
        RH=values // POINT,
        FORMAT=f"int{format.bits}",
        BITS=format.bits,
        QMAX=float(format.qmax),
        FLOOR=FLOOR,
        PAYLOAD=format.group_size * format.bits // 8,
        HADAMARD=format.hadamard,
        INTERPRET=interpret,
    )


@lru_cache
def make_rotation(values: int, interpret: bool) -> Rotation:
    """Constants of the rotation of a tile of ``values`` values."""
    return Rotation.of(
        R=values // POINT,
        G=POINT,
        POINT=POINT,
        BLOCKS=1,
        BLOCK=HADAMARD_POINTS,
        INTERPRET=interpret,
    )


@lru_cache
def make_blocks(format: GroupFormat, values: int, interpret: bool) -> Blocks:
    """Constants of a tile of ``values`` values of a wire that is read block by block."""
    return Blocks.of(
        R=values // HADAMARD_POINTS,
        BLOCKS=format.group_size // HADAMARD_POINTS,
        BITS=format.bits,
        PAYLOAD=format.group_size * format.bits // 8,
        HADAMARD=format.hadamard,
        INTERPRET=interpret,
    )
