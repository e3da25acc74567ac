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
    """Groups a tile, if these are whole."""
    G: tl.constexpr
    """Values a group."""
    N: tl.constexpr
    """Blocks of HADAMARD_POINTS values a tile."""
    FORMAT: tl.constexpr
    BITS: tl.constexpr
    QMAX: tl.constexpr
    FLOOR: tl.constexpr
    PAYLOAD: tl.constexpr
    """Bytes of a group's codes."""
    HADAMARD: tl.constexpr
    ROW: tl.constexpr
    """0: a tile lies in one chunk."""
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


@lru_cache
def make_tile(format: GroupFormat, values: int, interpret: bool) -> Tile:
    """Constants of a tile of ``values`` values; cached, as launches hash and compare them."""
    return Tile.of(
        R=values // format.group_size,
        G=format.group_size,
        N=values // HADAMARD_POINTS,
        FORMAT=f"int{format.bits}",
        BITS=format.bits,
        QMAX=float(format.qmax),
        FLOOR=FLOOR,
        PAYLOAD=format.group_size * format.bits // 8,
        HADAMARD=format.hadamard,
        ROW=0,
        INTERPRET=interpret,
    )


@lru_cache
def make_rotation(values: int, interpret: bool) -> Rotation:
    """Constants of the rotation of a tile of ``values`` values."""
    R = values // POINT
    return Rotation.of(R=R, G=POINT, POINT=POINT, BLOCKS=1, BLOCK=HADAMARD_POINTS, INTERPRET=interpret)
