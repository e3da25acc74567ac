"""What goes on the wire: integer codes in groups, and one fp32 step a group.

A row of ``n`` values is ``g = ceil(n / G)`` groups, zero padded, and its wire::

    plane of codes (g * G * bits / 8 bytes) | g steps, fp32 | zeros up to a multiple of 16 bytes

Codes lie in planes as in ``taco_kernels.taco.layout``: int4 plus 8, two to a byte, of 16 codes byte j holding
elements j and j + 8; int8 in two's complement. A step has its 8 lowest mantissa bits clear, so that code
times step is exact in fp32: a fused multiply-add and a product with a sum give the same bits, and so do all
devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from taco_kernels.common.sizes import aligned, check_choice

BITS = (4, 8)
GROUP_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
HADAMARD_POINTS = 32
STEP_BYTES = 4
FLOOR = 1e-30
"""Smallest largest magnitude of a group that is told from zero."""


@dataclass(frozen=True)
class GroupFormat:
    """Everything that decides the bytes of a row. Validated on construction (ValueError)."""

    bits: int = 4
    """4: codes from -7 to 7; 8: from -127 to 127."""
    group_size: int = 128
    """Values that share a step."""
    hadamard: bool = False
    """Codes are of the values' 32-point Walsh-Hadamard transform, WHT(x / 32) in Sylvester order."""

    def __post_init__(self) -> None:
        for name, allowed in (("bits", BITS), ("group_size", GROUP_SIZES), ("hadamard", (True, False))):
            check_choice(name, getattr(self, name), allowed)

    @property
    def qmax(self) -> int:
        """Largest code."""
        return 2 ** (self.bits - 1) - 1

    def groups(self, numel: int) -> int:
        """Groups of a row."""
        return -(-numel // self.group_size)

    def code_bytes(self, numel: int) -> int:
        """Bytes of a row's codes, padding included."""
        return self.groups(numel) * self.group_size * self.bits // 8

    def wire_bytes(self, numel: int) -> int:
        """Exact bytes of a row's wire."""
        used = self.code_bytes(numel) + STEP_BYTES * self.groups(numel)
        return aligned(used)

    def bits_per_value(self, numel: int) -> float:
        """What a value costs on the wire, steps and padding included."""
        return 8 * self.wire_bytes(numel) / numel


def check_wires(wires: torch.Tensor, format: GroupFormat, shape: Sequence[int], numel: int) -> None:
    """Raise ValueError unless ``wires`` is contiguous uint8[*shape, format.wire_bytes(numel)]."""
    expected = (*shape, format.wire_bytes(numel))
    if tuple(wires.shape) != expected or wires.dtype != torch.uint8 or not wires.is_contiguous():
        raise ValueError(
            f"wires is {wires.dtype}{list(wires.shape)}; rows of {numel} values in {format} need a "
            f"contiguous torch.uint8{list(expected)}"
        )


def check_rows(x: torch.Tensor, name: str) -> None:
    """Raise ValueError unless ``x`` has rows of contiguous values, with at most two dimensions above them."""
    if not 1 <= x.dim() <= 3 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {list(x.stride())}; it needs one to three "
            "dimensions, the last one contiguous"
        )
