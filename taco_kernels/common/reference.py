"""Arithmetic in plain torch that the definitions of several codecs share."""

from collections.abc import Sequence

import torch


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Unnormalised Walsh-Hadamard transform of the last dimension (a power of two), Sylvester order."""
    shape, distance = x.shape, 1
    while distance < shape[-1]:
        pairs = x.reshape(*shape[:-1], shape[-1] // (2 * distance), 2, distance)
        both = torch.empty(pairs.shape, dtype=x.dtype, device=x.device)
        torch.add(pairs[..., 0, :], pairs[..., 1, :], out=both[..., 0, :])
        torch.sub(pairs[..., 0, :], pairs[..., 1, :], out=both[..., 1, :])
        x = both.view(shape)
        distance *= 2
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
