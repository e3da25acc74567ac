"""What goes on the wire: formats, group and chunk sizes, where payload and scales lie.

A tensor is split into equal chunks (one a rank, say), zero padded to whole groups, and each chunk
has a wire of its own. One chunk of ``C`` values (``C`` a multiple of the group size ``G``, ``n = C
/ G`` groups) is::

    plane 0 | plane 1 | ... | n step values s | n adaptive scales alpha (dual scales only) | zeros

padded to a multiple of 16 bytes, so that every chunk of a wire can be read with 16-byte accesses.
With signed scales s has either sign. With ``outliers`` the lists of outliers of every block follow
(outliers.py).

A plane holds ``b`` bits of every code of the chunk in order: 16 codes fill ``2b`` bytes, byte ``j``
of them carrying elements ``j, j + 2b, j + 4b, ...``, the first in the low bits::

    format            planes, bits    bytes a group of 128, with dual / single scales
    fp8, int8         8               136 / 130
    int6              4, 2            104 /  98
    int5              4, 1             88 /  82
    int4              4                72 /  66

Codes narrower than a byte are stored plus ``2^(bits - 1)``, int8 in two's complement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from taco_kernels.common import aligned, ceil_div, check_choice
from taco_kernels.taco.outliers import BLOCK, LIST_BYTES

FORMATS = ("fp8-e4m3", "fp8-e5m2", "int8", "int6", "int5", "int4")
"""What codes are; see CodecConfig.format."""
SCALES = ("dual", "single", "signed")
"""Scales that a group can have; see CodecConfig.scales."""
GROUP_SIZES = (32, 64, 128, 256)
"""Values that can share a scale."""
BEND = {"int4": 4, "int5": 9, "int6": 18}
"""``a`` of the quadratic grid, by format."""

_QMAX = {
    "fp8-e4m3": 448.0,
    "fp8-e5m2": 57344.0,
    "int8": 127.0,
    "int6": 31.0,
    "int5": 15.0,
    "int4": 7.0,
}
_PLANES = {
    "fp8-e4m3": (8,),
    "fp8-e5m2": (8,),
    "int8": (8,),
    "int6": (4, 2),
    "int5": (4, 1),
    "int4": (4,),
}
_SCALE_BYTES = {"dual": 8, "single": 2, "signed": 2}


@dataclass(frozen=True)
class CodecConfig:
    """Everything that decides the bytes of an encoded tensor. Validated on construction
    (ValueError)."""

    format: str = "fp8-e4m3"
    """One of FORMATS; int6, int5 and int4 are bit-packed."""
    group_size: int = 128
    """Values that share a scale and a Hadamard transform; a power of two from 32 to 256."""
    scales: str = "dual"
    """``dual``: fp32 s and fp32 alpha a group (TACO). ``single``: one bf16 step a group, rounded
    up. ``signed``: the same with a sign, integers only. A symmetric grid leaves the code -2^(bits -
    1) unused; with a negative step it serves a positive extreme, too. int4, int5 and int6 then have
    the quadratic grid (reference.py). For the same bytes the squared error of Gaussian groups of 64
    is 33 % lower in int4, 27 in
    int5, 23 in int6."""
    hadamard: bool = True
    """False leaves the Walsh-Hadamard transform out: plain group scaling, an ablation."""
    outliers: bool = False
    """Outliers are stored separately, not to drown their groups (outliers.py): 0.125 bits a value.
    """

    def __post_init__(self) -> None:
        for name, allowed in (
            ("format", FORMATS),
            ("group_size", GROUP_SIZES),
            ("scales", SCALES),
            ("hadamard", (True, False)),
            ("outliers", (True, False)),
        ):
            check_choice(name, getattr(self, name), allowed)
        if self.scales == "signed" and self.is_float:
            raise ValueError(
                f"scales='signed' needs integers, not {self.format}; use scales='single'"
            )

    @property
    def is_float(self) -> bool:
        """True if codes are fp8 numbers."""
        return self.format.startswith("fp8")

    @property
    def bend(self) -> int:
        """``a`` of the quadratic grid of int4 to int6 with signed scales (reference.py); 0:
        uniform."""
        if self.scales != "signed":
            return 0
        return BEND.get(self.format, 0)

    @property
    def qmax(self) -> float:
        """Largest code value: 448 (e4m3), 57344 (e5m2), 2^(bits-1) - 1 (integers)."""
        return _QMAX[self.format]

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of each plane, low bits of the code first."""
        return _PLANES[self.format]

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return sum(self.planes)

    def payload_bytes_per_group(self) -> int:
        """Return the bytes of one group without its scales."""
        return self.group_size * self.bits // 8

    def bytes_per_group(self) -> int:
        """Return the bytes of one group on the wire, scales included."""
        return self.payload_bytes_per_group() + _SCALE_BYTES[self.scales]

    def chunk_numel(self, numel: int, chunks: int = 1) -> int:
        """Return the values in each of ``chunks`` equal pieces of ``numel`` values, padded to whole
        groups."""
        if numel < 0 or chunks < 1:
            raise ValueError(f"numel={numel} must be >= 0 and chunks={chunks} >= 1")
        return ceil_div(numel, chunks * self.group_size) * self.group_size

    def lists_at(self, numel: int) -> int:
        """Return the byte of a chunk of ``numel`` values where the blocks' lists begin.

        Fewer than 16 zeros lie before it.
        """
        groups = self.chunk_numel(numel) // self.group_size
        return aligned(groups * self.bytes_per_group())

    def wire_bytes(self, numel: int) -> int:
        """Return the exact bytes of one chunk that holds ``numel`` values.

        They are whole groups, fewer than 16 zeros, and the lists of outliers.
        """
        blocks = 0
        if self.outliers:
            blocks = ceil_div(self.chunk_numel(numel), BLOCK)
        return self.lists_at(numel) + blocks * LIST_BYTES


def check_same_groups(config: CodecConfig, config_out: CodecConfig) -> None:
    """Check that a sum in one codec's groups can be encoded by another codec group by group.

    The sum then stays in the Hadamard domain: it is not rotated back and forth in between.

    Args:
        config: the codec of the addends.
        config_out: the codec of the sum.

    Raises:
        ValueError: they differ in group_size, hadamard or outliers.
    """
    for name in ("group_size", "hadamard", "outliers"):
        if getattr(config, name) != getattr(config_out, name):
            raise ValueError(
                f"config_out.{name}={getattr(config_out, name)} must be that of config, "
                f"{getattr(config, name)}: the sum is encoded group by group"
            )


def check_wires(shape: Sequence[int], dtype: torch.dtype, config: CodecConfig, chunk: int) -> None:
    """Refuse wires that are not uint8[rows, wire_bytes(chunk)].

    Args:
        shape: of the wires.
        dtype: of the wires.
        config: of the codec that is to decode them.
        chunk: values of each row.

    Raises:
        ValueError: they have another shape or type.
    """
    expected = config.wire_bytes(chunk)
    if len(shape) != 2 or shape[1] != expected or dtype != torch.uint8:
        raise ValueError(
            f"wires is {dtype}{list(shape)}; chunks of {chunk} values in this config need "
            f"torch.uint8[rows, {expected}]"
        )
