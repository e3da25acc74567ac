"""How kernels are compiled and run: constants derived from a CodecConfig; tile, warps, stages, programs."""

from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl

from taco_kernels.common.device import Constants, Device, Tuning
from taco_kernels.taco import reference
from taco_kernels.taco.layout import CodecConfig

STEP_BYTES = 4  # a group saves with its dual scales merged into a step


@dataclass(frozen=True, repr=False, eq=False)
class Flags(Constants):
    """What a launch adds to a Spec."""

    STRIDED: tl.constexpr
    """The tensor is rows, see wire.py; else contiguous."""
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
    """Outliers follow the groups (outliers.py); a tile is whole blocks."""
    BEND: tl.constexpr
    """``a`` of the quadratic grid (reference.py), 0 of a uniform one."""
    FAR: tl.constexpr
    NEAR: tl.constexpr
    """1 / reference.quadratic_ends, 0 of a uniform grid."""
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
    config: CodecConfig, tile: int, device: Device, merged: bool = False, row: int = 0
) -> Spec:
    """Constants for tiles of ``tile`` values; cached, as launches hash and compare them.

    ``merged``, ``row``: see Spec.MERGED and Spec.ROW.
    """
    G, R, merged = config.group_size, tile // config.group_size, merged and config.scales == "dual"
    ends = reference.quadratic_ends(config.bits, config.bend)
    return Spec.of(
        R=R,
        USED=R // row * row if row else R,
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
        FAR=1 / ends[0] if config.bend else 0.0,
        NEAR=1 / ends[1] if config.bend else 0.0,
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


@lru_cache
def make_flags(strided: bool, tail: bool, stages: int) -> Flags:
    """Flags of a launch, cached."""
    return Flags.of(STRIDED=strided, TAIL=tail, STAGES=stages)


TUNING = {
    "encode": Tuning(8192, 4, 4, 2),
    "decode": Tuning(8192, 4, 3, 3),
    "decode_sum": Tuning(8192, 4, 2, 2),
    "decode_sum_encode": Tuning(2048, 2, 1, 0, registers=96),
}
LEAST_TILE = 2048
"""Values: a product of the tensor cores wants 16 rows of 128, and lists of outliers whole blocks."""
MOST_RANKS = 16
"""Of a collective, which has a chunk for each."""


def tuning_of(operation: str, config: CodecConfig) -> Tuning:
    """TUNING with what single configurations need, measured on sm_90."""
    tuning = TUNING[operation]
    if operation == "encode" and config.format == "int5":
        tuning = tuning._replace(stages=3)
    elif operation == "decode_sum" and config.format == "int8":
        tuning = tuning._replace(stages=1)
    elif operation == "decode_sum_encode" and config.bits == 8:
        tuning = tuning._replace(registers=80)
    if (
        operation == "encode"
        and config.group_size == 32
        and not config.hadamard
        and config.bits < 8
    ):
        tuning = tuning._replace(tile=4096, programs=5)  # 96 registers instead of 149
    if config.outliers and operation == "decode" and tuning.programs == 3:
        tuning = tuning._replace(registers=168)
    elif config.outliers and operation == "decode_sum_encode" and config.bits == 8:
        tuning = tuning._replace(tile=4096, warps=4)
    return tuning


def tuning_for(operation: str, config: CodecConfig, device: Device) -> Tuning:
    """``tuning_of`` on sm_90; elsewhere one conservative table, compiled, not timed."""
    measured = tuning_of(operation, config)
    if (
        device.capability[0] == 10
        and operation == "encode"
        and config.bits < 8
        and config.group_size == 64
    ):
        return measured._replace(tile=4096)  # the fused kernels' too, which decode: see tuning_in
    if not device.small:
        return measured
    if operation == "decode_sum":
        return Tuning(4096, 4, 2, 2)
    if operation == "decode_sum_encode":
        if config.outliers:
            warps, registers = (2, 128) if config.group_size >= 128 else (4, 96)
            return measured._replace(tile=2048, warps=warps, registers=registers)
        return measured._replace(registers=112 if config.is_float else 96)
    if operation == "encode" and config.outliers:
        # With a tile its words are held, should there be outliers. One stage: what is fetched ahead goes
        # through shared memory, which Triton leaves unswizzled where it is read in several layouts.
        return Tuning(4096, 4, 1, 2) if config.is_float else Tuning(4096, 4, 1, 3, 168)
    if operation == "encode" and not config.hadamard:
        return Tuning(4096, 4, 3, measured.programs)
    return Tuning(8192, 4, 2, 3, 168 if config.outliers else None)


def tuning_in(
    operation: str, config: CodecConfig, device: Device, groups: int, chunks: int
) -> Tuning:
    """How an operation on ``chunks`` chunks of ``groups`` groups each is run. Many chunks that are shorter
    than a tile have one of their size (not timed). Those of a collective keep the tile that its fused kernels
    have: on smaller ones products may sum in another order."""
    tuning = tuning_for(operation, config, device)
    tile = max(LEAST_TILE, triton.next_power_of_2(groups * config.group_size))
    if chunks > MOST_RANKS and tile < tuning.tile:
        programs = min(4, tuning.programs * tuning.tile // tile)
        tuning = tuning._replace(tile=tile, programs=programs, registers=None)
    if (
        device.capability[0] == 10
        and operation != "encode"
        and tuning.tile == 128 * config.group_size
    ):
        tuning = tuning._replace(
            tile=tuning.tile // 2
        )  # Triton 3.6 fails on 4 to 6 bits in 128 rows
    return tuning
