"""Arithmetic in plain torch that the definitions of several codecs share."""

from collections.abc import Sequence

import torch

EXPONENT_FLOOR = 32
"""Smallest row exponent (biased as in fp32) that is told from smaller ones: rows below 2^-94 share a grid."""
NON_FINITE = 255
"""Row exponent of a row with a NaN or an infinity: all of it decodes to NaN."""


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """int32: the bits of |x|, fp32. They order as the magnitudes do, infinity and NaN above the others."""
    return x.view(torch.int32) & 0x7FFFFFFF


def threshold_bits(thresholds: torch.Tensor) -> torch.Tensor:
    """int32 magnitude bits of fp32 thresholds >= 0; at least 1, so that zeros are never sent."""
    return magnitude_bits(thresholds).clamp(min=1)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """fp32 2^(exponent - 127) for int32 exponents from 1 to 254."""
    return (exponent << 23).view(torch.float32)


def bitmap_words(kept: torch.Tensor) -> torch.Tensor:
    """int32[.., n / 32] of bool[.., n]: bit i of word w is element 32 w + i."""
    weights = torch.ones(32, dtype=torch.int64, device=kept.device) << torch.arange(
        32, device=kept.device
    )
    words = (kept.view(*kept.shape[:-1], -1, 32) * weights).sum(-1)
    return ((words + 2**31) % 2**32 - 2**31).int()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Unnormalised Walsh-Hadamard transform of the last dimension (a power of two), Sylvester order."""
    for _ in range(
        x.shape[-1].bit_length() - 1
    ):  # each step turns the index's bits by one: back at the end
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        x = torch.cat((first + second, first - second), -1)
    return x


def round_to_integers(h: torch.Tensor, inverse: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes of h * inverse (fp32, broadcast), to the nearest integer, ties to even.

    From -2^(bits - 1) to 2^(bits - 1) - 1; 8 bits in two's complement, fewer plus 2^(bits - 1). The product
    is rounded once, to the integer: a fused multiply-add, exact in fp64. NaN becomes 0.
    """
    half = 2 ** (bits - 1)
    v = (h.double() * inverse.double()).nan_to_num(nan=0.0).clamp(-2 * half, 2 * half)
    q = torch.round(v).int().clamp(-half, half - 1)
    return (q + (0 if bits == 8 else half)).to(torch.uint8)


def integer_values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 values of the codes of ``round_to_integers``."""
    return codes.view(torch.int8).float() if bits == 8 else codes.float() - 2.0 ** (bits - 1)


def pack(codes: torch.Tensor, planes: Sequence[int]) -> list[torch.Tensor]:
    """Planes uint8[rows, n * bits / 8] of codes uint8[rows, n], n a multiple of 16; low bits first.

    In a plane of ``b`` bits 16 codes fill ``2b`` bytes, byte ``j`` of them carrying elements ``j, j + 2b, j +
    4b, ...``, the first in the low bits.
    """
    packed = []
    for bits in planes:
        pieces = codes.view(codes.shape[0], -1, 8 // bits, 2 * bits) & (2**bits - 1)
        packed.append(sum(pieces[:, :, m] << (bits * m) for m in range(8 // bits)).flatten(1))
        codes = codes >> bits if bits < 8 else codes
    return packed


def unpack(packed: Sequence[torch.Tensor], planes: Sequence[int]) -> torch.Tensor:
    """Inverse of pack: uint8[rows, n]."""
    codes, shift = 0, 0
    for plane, bits in zip(packed, planes, strict=True):
        bytes = plane.reshape(plane.shape[0], -1, 2 * bits)
        pieces = [(bytes >> (bits * m)) & (2**bits - 1) for m in range(8 // bits)]
        codes = codes + (torch.stack(pieces, dim=2).flatten(1) << shift)
        shift += bits
    return codes
