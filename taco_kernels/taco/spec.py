"""How kernels are compiled and run: constants derived from a CodecConfig; tile, warps, stages,
programs.

``make_spec`` gives the constants of a kernel. ``tuning_for`` looks up how an operation is run in
one table, TUNING, by operation, architecture and configuration; ``tuning_in`` fits the tile to
short chunks.
"""

from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl

from taco_kernels.common.device import Constants, Device, Tuning
from taco_kernels.taco import reference
from taco_kernels.taco.layout import FORMATS, GROUP_SIZES, CodecConfig

STEP_BYTES = 4
"""Bytes that a group saves with its dual scales merged into a step."""


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
    """Name of the format, one of layout.FORMATS."""
    INTEGER: tl.constexpr
    """Codes are integers, not fp8."""
    BITS: tl.constexpr
    """Bits of a code."""
    QMAX: tl.constexpr
    """Largest code value."""
    PAYLOAD: tl.constexpr
    """Bytes of a group's codes."""
    BYTES: tl.constexpr
    """Bytes of a group, scales included."""
    DUAL: tl.constexpr
    """A group has two fp32 scales; else one bf16 step."""
    MERGED: tl.constexpr
    """The wire has the fp32 step that dual scales make instead of the two."""
    SIGNED: tl.constexpr
    """One step with a sign (layout.CodecConfig.scales)."""
    HADAMARD: tl.constexpr
    """Groups are transformed."""
    OUTLIERS: tl.constexpr
    """Outliers follow the groups (outliers.py); a tile is whole blocks."""
    BEND: tl.constexpr
    """``a`` of the quadratic grid (reference.py), 0 of a uniform one."""
    FAR: tl.constexpr
    """1 / the first of reference.quadratic_ends, 0 of a uniform grid."""
    NEAR: tl.constexpr
    """1 / the second of reference.quadratic_ends, 0 of a uniform grid."""
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
    """Return the constants of a kernel; cached, as launches hash and compare them.

    Args:
        config: of the codec.
        tile: values a program holds at a time.
        device: that the kernel runs on.
        merged: see Spec.MERGED; of other than dual scales it means nothing.
        row: groups of a chunk where a tile is to hold several whole chunks, else 0.
    """
    group_size = config.group_size
    groups = tile // group_size
    merged = merged and config.scales == "dual"
    bytes_per_group = config.bytes_per_group()
    if merged:
        bytes_per_group -= STEP_BYTES
    groups_used = groups
    if row:
        groups_used = groups // row * row
    # Reciprocals: kernels multiply.
    far = near = 0.0
    if config.bend:
        far_end, near_end = reference.quadratic_ends(config.bits, config.bend)
        far = 1 / far_end
        near = 1 / near_end
    return Spec.of(
        R=groups,
        USED=groups_used,
        G=group_size,
        POINT=min(group_size, device.point),
        BLOCKS=max(1, group_size // device.point),
        FORMAT=config.format,
        INTEGER=not config.is_float,
        BITS=config.bits,
        QMAX=config.qmax,
        PAYLOAD=config.payload_bytes_per_group(),
        BYTES=bytes_per_group,
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
        STRIDE=config.wire_bytes(row * group_size),
        # Loads in flight are held in registers.
        UNROLLED=4 if device.small else 8,
        HARDWARE_FP8=device.hardware_fp8,
        CONVERTS_BY_HALF=device.capability == (8, 9),
        MAGNITUDE_MAX=device.capability >= (8, 6),
        INTERPRET=device.interpret,
    )


@lru_cache
def make_flags(strided: bool, tail: bool, stages: int) -> Flags:
    """Return the flags of a launch, cached.

    Args:
        strided: whether the tensor is rows apart (wire.py).
        tail: whether its last group is not whole.
        stages: depth of the software pipeline over tiles.
    """
    return Flags.of(STRIDED=strided, TAIL=tail, STAGES=stages)


FLOATS = ("fp8-e4m3", "fp8-e5m2")
EIGHT_BITS = (*FLOATS, "int8")
PACKED = ("int6", "int5", "int4")
HOPPER = ("sm_90",)
"""The architecture whose tunings were measured; the interpreter has them, too."""
SMALL = ("sm_100", "other")
"""Architectures where kernels must need little (Device.small): all but sm_90."""


@dataclass(frozen=True)
class TuningCase:
    """What a row of TUNING is for."""

    operation: str
    """``encode``, ``decode``, ``decode_sum`` or ``decode_sum_encode``."""
    architectures: tuple[str, ...]
    """Names that ``architecture_of`` gives."""
    formats: tuple[str, ...] = FORMATS
    """CodecConfig.format is one of these."""
    group_sizes: tuple[int, ...] = GROUP_SIZES
    """CodecConfig.group_size is one of these."""
    hadamard: bool | None = None
    """CodecConfig.hadamard is this; None: either."""
    outliers: bool | None = None
    """CodecConfig.outliers is this; None: either."""

    def covers(self, operation: str, config: CodecConfig, architecture: str) -> bool:
        """Return True if this row is for an operation.

        Args:
            operation: its name.
            config: of the codec.
            architecture: what ``architecture_of`` gives.
        """
        return (
            self.operation == operation
            and architecture in self.architectures
            and config.format in self.formats
            and config.group_size in self.group_sizes
            and self.hadamard in (None, config.hadamard)
            and self.outliers in (None, config.outliers)
        )


def architecture_of(device: Device) -> str:
    """Return a device's name in TUNING."""
    return {0: "sm_90", 9: "sm_90", 10: "sm_100"}.get(device.capability[0], "other")


TUNING: dict[TuningCase, Tuning] = {
    # sm_90: measured, on an H200.
    # Groups of 32 without a transform: 96 registers a thread instead of 149, so 5 programs fit.
    TuningCase("encode", HOPPER, formats=("int5",), group_sizes=(32,), hadamard=False): Tuning(
        tile=4096, warps=4, stages=3, programs=5
    ),
    TuningCase("encode", HOPPER, formats=PACKED, group_sizes=(32,), hadamard=False): Tuning(
        tile=4096, warps=4, stages=4, programs=5
    ),
    TuningCase("encode", HOPPER, formats=("int5",)): Tuning(
        tile=8192, warps=4, stages=3, programs=2
    ),
    TuningCase("encode", HOPPER): Tuning(tile=8192, warps=4, stages=4, programs=2),
    TuningCase("decode", HOPPER, outliers=True): Tuning(
        tile=8192, warps=4, stages=3, programs=3, registers=168
    ),
    TuningCase("decode", HOPPER): Tuning(tile=8192, warps=4, stages=3, programs=3),
    TuningCase("decode_sum", HOPPER, formats=("int8",)): Tuning(
        tile=8192, warps=4, stages=1, programs=2
    ),
    TuningCase("decode_sum", HOPPER): Tuning(tile=8192, warps=4, stages=2, programs=2),
    TuningCase("decode_sum_encode", HOPPER, formats=EIGHT_BITS, outliers=True): Tuning(
        tile=4096, warps=4, stages=1, programs=0, registers=80
    ),
    TuningCase("decode_sum_encode", HOPPER, formats=EIGHT_BITS): Tuning(
        tile=2048, warps=2, stages=1, programs=0, registers=80
    ),
    TuningCase("decode_sum_encode", HOPPER): Tuning(
        tile=2048, warps=2, stages=1, programs=0, registers=96
    ),
    # All others: compiled for sm_80 to sm_120, never timed (docs/results/architectures.md).
    # Conservative, so that programs fit into 99 KiB and nothing spills in a loop. sm_100: half a
    # tile, which the fused kernels have, too, and they decode: see tuning_in.
    TuningCase("encode", ("sm_100",), formats=("int5",), group_sizes=(64,)): Tuning(
        tile=4096, warps=4, stages=3, programs=2
    ),
    TuningCase("encode", ("sm_100",), formats=PACKED, group_sizes=(64,)): Tuning(
        tile=4096, warps=4, stages=4, programs=2
    ),
    # With a tile its words are held, should there be outliers. One stage: what is fetched ahead
    # goes through shared memory, which Triton leaves unswizzled where it is read in several
    # layouts.
    TuningCase("encode", SMALL, formats=FLOATS, outliers=True): Tuning(
        tile=4096, warps=4, stages=1, programs=2
    ),
    TuningCase("encode", SMALL, outliers=True): Tuning(
        tile=4096, warps=4, stages=1, programs=3, registers=168
    ),
    TuningCase("encode", SMALL, formats=PACKED, group_sizes=(32,), hadamard=False): Tuning(
        tile=4096, warps=4, stages=3, programs=5
    ),
    TuningCase("encode", SMALL, hadamard=False): Tuning(tile=4096, warps=4, stages=3, programs=2),
    TuningCase("encode", SMALL): Tuning(tile=8192, warps=4, stages=2, programs=3),
    TuningCase("decode", SMALL, outliers=True): Tuning(
        tile=8192, warps=4, stages=2, programs=3, registers=168
    ),
    TuningCase("decode", SMALL): Tuning(tile=8192, warps=4, stages=2, programs=3),
    TuningCase("decode_sum", SMALL): Tuning(tile=4096, warps=4, stages=2, programs=2),
    TuningCase("decode_sum_encode", SMALL, group_sizes=(128, 256), outliers=True): Tuning(
        tile=2048, warps=2, stages=1, programs=0, registers=128
    ),
    TuningCase("decode_sum_encode", SMALL, outliers=True): Tuning(
        tile=2048, warps=4, stages=1, programs=0, registers=96
    ),
    TuningCase("decode_sum_encode", SMALL, formats=FLOATS): Tuning(
        tile=2048, warps=2, stages=1, programs=0, registers=112
    ),
    TuningCase("decode_sum_encode", SMALL): Tuning(
        tile=2048, warps=2, stages=1, programs=0, registers=96
    ),
}
"""How operations are run: the first row that covers one counts, so special cases come first."""
LEAST_TILE = 2048
"""Values: a product of the tensor cores wants 16 rows of 128, and lists of outliers whole blocks.
"""
MOST_RANKS = 16
"""Most ranks of a collective, which has a chunk for each."""


def tuning_for(operation: str, config: CodecConfig, device: Device) -> Tuning:
    """Return how an operation is run, by TUNING.

    Args:
        operation: ``encode``, ``decode``, ``decode_sum`` or ``decode_sum_encode``.
        config: of the codec; of the senders where the sum is encoded with another.
        device: that the kernel runs on.
    """
    architecture = architecture_of(device)
    return next(
        tuning for case, tuning in TUNING.items() if case.covers(operation, config, architecture)
    )


def largest_tile(operation: str, config: CodecConfig) -> int:
    """Return the values of the largest tile that an operation has on any device."""
    return max(
        tuning.tile
        for case, tuning in TUNING.items()
        if any(case.covers(operation, config, name) for name in case.architectures)
    )


def tuning_in(
    operation: str, config: CodecConfig, device: Device, groups: int, chunks: int
) -> Tuning:
    """Return how an operation on chunks is run: by TUNING, with smaller tiles for many short
    chunks.

    Many chunks that are shorter than a tile, such as tokens, get a tile of their size (not timed).
    The few chunks of a collective keep the tile that its fused kernels have: on smaller ones
    products may sum in another order, and a code may be another.

    Args:
        operation: ``encode``, ``decode`` or ``decode_sum``.
        config: of the codec.
        device: that the kernel runs on.
        groups: of each chunk.
        chunks: how many there are.
    """
    tuning = tuning_for(operation, config, device)
    # A tile of the chunk's size wastes nothing; smaller tiles leave room for more programs.
    tile = max(LEAST_TILE, triton.next_power_of_2(groups * config.group_size))
    if chunks > MOST_RANKS and tile < tuning.tile:
        programs = min(4, tuning.programs * tuning.tile // tile)
        tuning = tuning._replace(tile=tile, programs=programs, registers=None)
    # Triton 3.6 fails to compile the decoding of 4 to 6 bits in 128 rows for sm_100.
    in_128_rows = tuning.tile == 128 * config.group_size
    if architecture_of(device) == "sm_100" and operation != "encode" and in_128_rows:
        tuning = tuning._replace(tile=tuning.tile // 2)
    return tuning
