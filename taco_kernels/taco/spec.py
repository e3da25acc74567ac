"""Compile-time constants of a kernel, derived from a CodecConfig."""

from dataclasses import dataclass
from functools import lru_cache

import triton.language as tl

from taco_kernels.common.constants import Constants
from taco_kernels.common.device import Device, Tuning
from taco_kernels.taco import quadratic, reference
from taco_kernels.taco.layout import CodecConfig

STEP_BYTES = 4  # a group saves with its dual scales merged into a step


@dataclass(frozen=True, repr=False, eq=False)
class Flags(Constants):
    """What a launch adds to a Spec."""

    STRIDED: tl.constexpr
    """The tensor is rows, see tensor.py; else contiguous."""
    TAIL: tl.constexpr
    """The last group is not whole."""
    STAGES: tl.constexpr
    """Depth of the software pipeline over tiles."""


@dataclass(frozen=True, repr=False, eq=False)
class Spec(Constants):
    """One argument for all constants: kernels read ``C.G`` and so on, each a tl.constexpr."""

    R: tl.constexpr
    """Groups a tile."""
    USED: tl.constexpr
    """Groups from one tile to the next: R, or with ROW as many as make whole chunks."""
    G: tl.constexpr
    """Values a group."""
    POINT: tl.constexpr
    """Points of the transform done as one matrix product: min(G, Device.point)."""
    BLOCKS: tl.constexpr
    """G / POINT."""
    FORMAT: tl.constexpr
    INTEGER: tl.constexpr
    BITS: tl.constexpr
    QMAX: tl.constexpr
    PAYLOAD: tl.constexpr
    """Bytes of a group's codes."""
    BYTES: tl.constexpr
    """Bytes of a group, scales included."""
    DUAL: tl.constexpr
    MERGED: tl.constexpr
    """The wire has the fp32 step that dual scales make instead of the two."""
    SIGNED: tl.constexpr
    """One step with a sign (layout.CodecConfig.scales)."""
    HADAMARD: tl.constexpr
    OUTLIERS: tl.constexpr
    """Massive values lie behind the groups (outliers.py); a tile is whole blocks."""
    BEND: tl.constexpr
    """``a`` of the quadratic grid (quadratic.py), 0 of a uniform one."""
    FAR: tl.constexpr
    NEAR: tl.constexpr
    """1 / quadratic.ends, 0 of a uniform grid."""
    ROOT: tl.constexpr
    """sqrt(G), or 1 without the transform."""
    FLOOR: tl.constexpr
    """Smallest max|h| that is told from zero."""
    ROW: tl.constexpr
    """Groups of a chunk where a tile holds several whole chunks, such as tokens; else 0."""
    STRIDE: tl.constexpr
    """Bytes from one of those chunks to the next."""
    UNROLLED: tl.constexpr
    """Most senders whose loads a sum has in flight together."""
    HARDWARE_FP8: tl.constexpr
    """The device converts fp32 to fp8 (sm_89 and later); else integer arithmetic does."""
    CONVERTS_BY_HALF: tl.constexpr
    """Triton's conversion of fp32 to fp8 rounds twice there (sm_89)."""
    MAGNITUDE_MAX: tl.constexpr
    """The device has max.xorsign.abs, of two 16-bit numbers at once (sm_86 and later)."""
    INTERPRET: tl.constexpr
    """Running under TRITON_INTERPRET=1."""


@lru_cache
def make_spec(
    config: CodecConfig, groups_per_tile: int, device: Device, merged: bool = False, row: int = 0
) -> Spec:
    """Constants for ``config``; cached, as launches hash and compare them.

    ``merged``, ``row``: see Spec.MERGED and Spec.ROW.
    """
    G, merged = config.group_size, merged and config.scales == "dual"
    far, near = (1 / end for end in quadratic.ends(config.bits, config.bend)) if config.bend else (0.0, 0.0)
    return Spec.of(
        R=groups_per_tile,
        USED=groups_per_tile // row * row if row else groups_per_tile,
        G=G,
        POINT=min(G, device.point),
        BLOCKS=max(1, G // device.point),
        FORMAT=config.format,
        INTEGER=not config.is_float,
        BITS=config.bits,
        QMAX=config.qmax,
        PAYLOAD=config.payload_bytes_per_group(),
        BYTES=config.bytes_per_group() - (STEP_BYTES if merged else 0),
        DUAL=config.scales == "dual",
        MERGED=merged,
        SIGNED=config.scales == "signed",
        HADAMARD=config.hadamard,
        OUTLIERS=config.outliers,
        BEND=config.bend,
        FAR=far,
        NEAR=near,
        ROOT=reference.root(config),
        FLOOR=reference.amax_floor(config),
        ROW=row,
        STRIDE=config.wire_bytes(row * G),
        UNROLLED=4 if device.small else 8,
        HARDWARE_FP8=device.hardware_fp8,
        CONVERTS_BY_HALF=device.capability == (8, 9),
        MAGNITUDE_MAX=device.capability >= (8, 6),
        INTERPRET=device.interpret,
    )


def spec_of(config: CodecConfig, device: Device, tuning: Tuning, row: int = 0) -> Spec:
    """Constants of a kernel that is run so."""
    return make_spec(config, tuning.tile // config.group_size, device, row=row)


@lru_cache
def make_flags(strided: bool, tail: bool, stages: int) -> Flags:
    """Flags of a launch, cached."""
    return Flags.of(STRIDED=strided, TAIL=tail, STAGES=stages)
