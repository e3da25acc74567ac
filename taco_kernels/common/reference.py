"""Arithmetic in plain torch that the definitions of several codecs share."""

from collections.abc import Sequence

import torch

EXPONENT_FLOOR = 32
"""Smallest row exponent (biased as in fp32) that is told from smaller ones: rows below 2^-94 share
a grid."""
NON_FINITE = 255
"""Row exponent of a row with a NaN or an infinity: all of it decodes to NaN."""


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of |x|, int32 of fp32.

    They order as the magnitudes do, infinity and NaN above all numbers.
    """
    return x.view(torch.int32) & 0x7FFFFFFF


def threshold_bits(thresholds: torch.Tensor) -> torch.Tensor:
    """Return int32 magnitude bits of fp32 thresholds >= 0; at least 1, so that zeros are never
    sent."""
    return magnitude_bits(thresholds).clamp(min=1)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return fp32 2^(exponent - 127) for int32 exponents from 1 to 254."""
    return (exponent << 23).view(torch.float32)


def bitmap_words(bits: torch.Tensor) -> torch.Tensor:
    """Return int32[.., n / 32] of bool[.., n]: bit i of word w is element 32 w + i."""
    shifts = torch.arange(32, device=bits.device)
    weights = torch.ones(32, dtype=torch.int64, device=bits.device) << shifts
    words = (bits.view(*bits.shape[:-1], -1, 32) * weights).sum(-1)
    # From 0 .. 2^32 - 1 to int32 with the same bits.
    return ((words + 2**31) % 2**32 - 2**31).int()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return the Walsh-Hadamard transform of the last dimension, in Sylvester order.

    It is not normalised: output j is the sum of (-1)^popcount(i & j) x_i. The last dimension is a
    power of two. Butterflies of distance 1, 2, 4, ... decide the order of the fp32 additions, and
    so the bits.
    """
    stages = x.shape[-1].bit_length() - 1
    for _ in range(stages):
        # Pairs of neighbours become sums in the first half and differences in the second: each
        # stage turns the index's bits by one place, and after all stages they are where they were.
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        x = torch.cat((first + second, first - second), -1)
    return x


def round_to_integers(h: torch.Tensor, inverse: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 codes of h * inverse, to the nearest integer, ties to even.

    The product is rounded once, to the integer: a fused multiply-add, exact in fp64. NaN becomes 0.

    Args:
        h: fp32 values.
        inverse: fp32 reciprocals of their steps, broadcast to h.
        bits: of a code, which goes from -2^(bits - 1) to 2^(bits - 1) - 1. 8 bits are stored in
            two's complement, fewer plus 2^(bits - 1).
    """
    half = 2 ** (bits - 1)
    # The clamp at twice the range changes no code: it keeps infinities away from the conversion.
    v = (h.double() * inverse.double()).nan_to_num(nan=0.0).clamp(-2 * half, 2 * half)
    q = torch.round(v).int().clamp(-half, half - 1)
    if bits < 8:
        q = q + half
    return q.to(torch.uint8)


def integer_values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return fp32 values of the codes of ``round_to_integers``."""
    if bits == 8:
        return codes.view(torch.int8).float()
    return codes.float() - 2.0 ** (bits - 1)


def pack(codes: torch.Tensor, planes: Sequence[int]) -> list[torch.Tensor]:
    """Return planes uint8[rows, n * b / 8] of codes uint8[rows, n], n a multiple of 16.

    ``planes`` are the bits ``b`` of each plane, that of a code's low bits first. In a plane of b
    bits 16 codes fill 2b bytes, byte j of them carrying elements j, j + 2b, j + 4b, ..., the first
    in its low bits::

        b = 4:  byte j = element j + 8 | element j              8 bytes
        b = 2:  byte j = j + 12 | j + 8 | j + 4 | j             4 bytes
        b = 1:  byte j = j + 14 | ... | j + 4 | j + 2 | j       2 bytes
    """
    packed = []
    for bits in planes:
        pieces = codes.view(codes.shape[0], -1, 8 // bits, 2 * bits) & (2**bits - 1)
        plane = sum(pieces[:, :, m] << (bits * m) for m in range(8 // bits))
        packed.append(plane.flatten(1))
        if bits < 8:  # a shift of uint8 by 8 is undefined
            codes = codes >> bits
    return packed


def unpack(packed: Sequence[torch.Tensor], planes: Sequence[int]) -> torch.Tensor:
    """Invert ``pack``: return uint8[rows, n]."""
    codes = 0
    shift = 0
    # Each plane adds bits above those of the planes before it.
    for plane, bits in zip(packed, planes, strict=True):
        bytes = plane.reshape(plane.shape[0], -1, 2 * bits)
        pieces = [(bytes >> (bits * m)) & (2**bits - 1) for m in range(8 // bits)]
        codes = codes + (torch.stack(pieces, dim=2).flatten(1) << shift)
        shift += bits
    return codes
