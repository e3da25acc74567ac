"""Compile-time constants of a kernel, derived from a CodecConfig."""

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import triton.language as tl

from taco_kernels import reference
from taco_kernels.layout import CodecConfig

STEP_BYTES = 4  # a group saves with its dual scales merged into a step


class Constants:
    """Base of frozen dataclasses of tl.constexpr, passed to kernels as one constant argument."""

    @cached_property
    def _text(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name).value}" for f in fields(self))

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, self._text))

    def __repr__(self) -> str:
        """Part of the compiler's cache key."""
        return self._text

    def __hash__(self) -> int:
        """Kept: a launch hashes its constants, and hashing twenty fields takes longer than the rest of it."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self._text == other._text)


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
    G: tl.constexpr
    """Values a group."""
    POINT: tl.constexpr
    """Points of the transform done as one matrix product: min(G, 128)."""
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
    NEAREST: tl.constexpr
    DITHER: tl.constexpr
    HADAMARD: tl.constexpr
    ROOT: tl.constexpr
    """sqrt(G), or 1 without the transform."""
    FLOOR: tl.constexpr
    """Smallest max|h| that is told from zero."""
    HARDWARE_FP8: tl.constexpr
    """The device converts fp32 to fp8 (sm_89 and later); else integer arithmetic does."""
    INTERPRET: tl.constexpr
    """Running under TRITON_INTERPRET=1."""


@lru_cache
def make_spec(
    config: CodecConfig, groups_per_tile: int, hardware_fp8: bool, interpret: bool, merged: bool = False
) -> Spec:
    """Constants for ``config``; cached, as launches hash and compare them. ``merged``: see Spec.MERGED."""
    G, merged = config.group_size, merged and config.scales == "dual"
    values = dict(
        R=groups_per_tile,
        G=G,
        POINT=min(G, 128),
        BLOCKS=max(1, G // 128),
        FORMAT=config.format,
        INTEGER=not config.is_float,
        BITS=config.bits,
        QMAX=config.qmax,
        PAYLOAD=config.payload_bytes_per_group(),
        BYTES=config.bytes_per_group() - (STEP_BYTES if merged else 0),
        DUAL=config.scales == "dual",
        MERGED=merged,
        SIGNED=config.scales == "signed",
        NEAREST=config.rounding == "nearest",
        DITHER=config.rounding == "dither",
        HADAMARD=config.hadamard,
        ROOT=reference.root(config),
        FLOOR=reference.amax_floor(config),
        HARDWARE_FP8=hardware_fp8,
        INTERPRET=interpret,
    )
    return Spec(**{name: tl.constexpr(value) for name, value in values.items()})


@lru_cache
def make_flags(strided: bool, tail: bool, stages: int) -> Flags:
    """Flags of a launch, cached."""
    return Flags(tl.constexpr(strided), tl.constexpr(tail), tl.constexpr(stages))
