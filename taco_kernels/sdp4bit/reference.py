"""SDP4Bit's wire format and operations in plain torch: the definition that the kernels are tested
against.

All arithmetic is fp32. A group of values v (or h = WHT(v / 32), blocks of 32) becomes

    step = max|h| / qmax, rounded up to 16 mantissa bits;    q = round(h * (1 / step))

An all-zero group has step 0; a group that is not finite has step NaN, and so decodes to NaN. The
inverse transform is WHT(q * step). It is linear, so sums of several senders' rows are taken before
it, in the order of the senders.

A row of ``n`` values is ``g = ceil(n / G)`` groups, zero padded, and its wire::

    plane of codes (g * G * bits / 8 bytes) | g steps, fp32 | zeros up to a multiple of 16 bytes

Codes lie in planes as in ``taco_kernels.taco.layout``: int4 plus 8, two to a byte, of 16 codes byte
j holding elements j and j + 8; int8 in two's complement. A step has its 8 lowest mantissa bits
clear, so that code times step is exact in fp32: a fused multiply-add and a product with a sum give
the same bits, and so do all devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from taco_kernels.common import ALIGNMENT, aligned, ceil_div, check_choice, check_tensor
from taco_kernels.common.reference import hadamard, integer_values, pack, round_to_integers, unpack

BITS = (4, 8)
"""Bits that a code can have."""
GROUP_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
"""Values that can share a step."""
HADAMARD_POINTS = 32
"""Values that are rotated together."""
STEP_BYTES = 4
"""Bytes of a step on the wire."""
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
    """Codes are of the values' 32-point Walsh-Hadamard transform, WHT(x / 32) in Sylvester order.
    """

    def __post_init__(self) -> None:
        for name, allowed in (
            ("bits", BITS),
            ("group_size", GROUP_SIZES),
            ("hadamard", (True, False)),
        ):
            check_choice(name, getattr(self, name), allowed)

    @property
    def qmax(self) -> int:
        """Largest code."""
        return 2 ** (self.bits - 1) - 1

    def groups(self, numel: int) -> int:
        """Return the groups of a row of ``numel`` values."""
        return ceil_div(numel, self.group_size)

    def code_bytes(self, numel: int) -> int:
        """Return the bytes of a row's codes, those of zeros that fill the last group included."""
        return self.groups(numel) * self.group_size * self.bits // 8

    def wire_bytes(self, numel: int) -> int:
        """Return the exact bytes of a row's wire."""
        return aligned(self.code_bytes(numel) + STEP_BYTES * self.groups(numel))

    def check_wires(self, wires: torch.Tensor, shape: Sequence[int], numel: int) -> None:
        """Refuse wires that are not uint8[*shape, wire_bytes(numel)] with contiguous rows.

        Args:
            wires: what was passed.
            shape: all dimensions but the last.
            numel: values of a row.

        Raises:
            ValueError: they have another shape, type or stride.
        """
        check_tensor("wires", wires, torch.uint8, (*shape, self.wire_bytes(numel)), contiguous=True)


def check_rows(x: torch.Tensor, name: str) -> None:
    """Refuse a tensor whose rows are not contiguous, or that has more than two dimensions above
    them.

    Raises:
        ValueError: naming the argument ``name``.
    """
    if not 1 <= x.dim() <= 3 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {list(x.stride())}; "
            "it needs one to three dimensions, the last one contiguous"
        )


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Return the WHT of every 32 values of the last dimension, without normalisation."""
    blocks = x.reshape(*x.shape[:-1], -1, HADAMARD_POINTS)
    return hadamard(blocks).view(x.shape)


def to_groups(x: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Return fp32[rows, groups, G] of x[rows, n]: zero padded, rotated where the format asks for
    it."""
    numel = x.shape[-1]
    size = format.groups(numel) * format.group_size
    # Zeros fill the last group.
    h = F.pad(x.float(), (0, size - numel))
    if format.hadamard:
        h = rotate(h / HADAMARD_POINTS)
    return h.view(x.shape[0], -1, format.group_size)


def encode_groups(h: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Return wires uint8[rows, bytes] of h fp32[rows, groups, G], which is in the codes' domain."""
    rows, groups, size = h.shape
    amax = h.abs().amax(dim=-1)
    zero = amax == 0
    bad = ~torch.isfinite(h).all(dim=-1)
    amax = amax.masked_fill(bad, 0.0).clamp(min=FLOOR)
    # A tensor: torch divides by numbers with a reciprocal.
    step = amax / amax.new_tensor(float(format.qmax))
    # Up to 16 mantissa bits, so that code times step is exact.
    step = ((step.view(torch.int32) + 0xFF) & -0x100).view(torch.float32)
    inverse = step.reciprocal().masked_fill(bad, 0.0)
    codes = round_to_integers(h, inverse[..., None], format.bits).view(rows, groups * size)
    step = step.masked_fill(zero, 0.0).masked_fill(bad, math.nan)
    # The order of a row's wire: codes, steps, zeros up to 16 bytes.
    wires = torch.cat(
        [*pack(codes, (format.bits,)), step.view(rows, groups).view(torch.uint8)], dim=1
    )
    return F.pad(wires, (0, -wires.shape[1] % ALIGNMENT))


def decode_groups(wires: torch.Tensor, format: GroupFormat, numel: int) -> torch.Tensor:
    """Return q * step, fp32[rows, groups * G] in the codes' own domain.

    Args:
        wires: uint8[rows, bytes].
        format: of the wires.
        numel: values of a row.
    """
    rows = wires.shape[0]
    groups = format.groups(numel)
    size = format.group_size
    split = format.code_bytes(numel)
    codes = unpack([wires[:, :split]], (format.bits,))
    values = integer_values(codes.view(rows, groups, size), format.bits)
    step = wires[:, split : split + STEP_BYTES * groups]
    step = step.contiguous().view(torch.float32)
    return (values * step[..., None]).view(rows, groups * size)


def sum_senders(wires: torch.Tensor, format: GroupFormat, numel: int) -> torch.Tensor:
    """Return the sum over S senders, in their order, fp32[rows, groups * G] in the codes' own
    domain.

    Args:
        wires: uint8[S, rows, bytes].
        format: of the wires.
        numel: values of a row.
    """
    total = decode_groups(wires[0], format, numel)
    for sender in wires[1:]:
        total = total + decode_groups(sender, format, numel)
    return total


def quantize(x: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Return wires uint8[rows, bytes] of x[..., n].

    x is bf16, fp16 or fp32, has contiguous rows and at most three dimensions (else ValueError).
    """
    check_rows(x, "x")
    numel = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    if not x.numel():
        return torch.empty(rows, format.wire_bytes(numel), dtype=torch.uint8, device=x.device)
    return encode_groups(to_groups(x.reshape(rows, numel), format), format)


def quantize_difference(new: torch.Tensor, old: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Return the wire uint8[1, bytes] of ``new - old``.

    Args:
        new: [n], bf16, fp16 or fp32.
        old: [n]; the subtraction is in fp32.
        format: of the wire.
    """
    return quantize(new.float()[None] - old.float()[None], format)


def sum_dequantize(
    wires: torch.Tensor, format: GroupFormat, out: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Sum the senders' wires into ``out``, which is returned.

    Summed in fp32 in the order of the senders before the inverse transform, scaled after it.

    Args:
        wires: uint8[S, rows, bytes].
        format: of the wires.
        out: [rows, n], bf16, fp16 or fp32; gets ``scale`` times the sum.
        scale: factor of the sum.

    Raises:
        ValueError: wires or ``out`` are not of these shapes.
    """
    check_rows(out, "out")
    format.check_wires(wires, (wires.shape[0], out.shape[0]), out.shape[-1])
    if out.numel() == 0:
        return out
    total = sum_senders(wires, format, out.shape[-1])
    if format.hadamard:
        total = rotate(total)
    return out.copy_(total[:, : out.shape[-1]] * scale)


def sum_requantize(
    wires: torch.Tensor, format: GroupFormat, numel: int, target: GroupFormat
) -> torch.Tensor:
    """Sum the senders' wires and encode the sum, which does not leave the domain of the codes.

    Args:
        wires: uint8[S, rows, bytes].
        format: of the wires.
        numel: values of a row.
        target: format of the sum's wires; rotated if ``format`` is, and only then.

    Returns:
        uint8[rows, bytes of target].

    Raises:
        ValueError: one format is rotated and the other is not, or the wires do not fit.
    """
    if format.hadamard != target.hadamard:
        raise ValueError(f"{format} and {target} must both be rotated or both not")
    rows = wires.shape[1]
    format.check_wires(wires, (wires.shape[0], rows), numel)
    if not numel or not rows:
        return torch.empty(rows, target.wire_bytes(numel), dtype=torch.uint8, device=wires.device)
    total = sum_senders(wires, format, numel)
    size = target.groups(numel) * target.group_size
    # The groups of ``target`` may end earlier: what is cropped is zero, or not finite like its
    # group.
    total = F.pad(total, (0, size - total.shape[1]))
    return encode_groups(total.reshape(rows, -1, target.group_size), target)


def add_dequantized(
    wires: torch.Tensor, format: GroupFormat, weights: torch.Tensor
) -> torch.Tensor:
    """Add wires to weights in place, in fp32, rounded to the weights' type; return the weights.

    Args:
        wires: uint8[rows, bytes].
        format: of the wires.
        weights: [rows, n], bf16, fp16 or fp32.

    Raises:
        ValueError: wires or weights are not of these shapes.
    """
    check_rows(weights, "weights")
    format.check_wires(wires, (weights.shape[0],), weights.shape[-1])
    if weights.numel() == 0:
        return weights
    change = decode_groups(wires, format, weights.shape[-1])
    if format.hadamard:
        change = rotate(change)
    return weights.copy_(weights.float() + change[:, : weights.shape[-1]])
