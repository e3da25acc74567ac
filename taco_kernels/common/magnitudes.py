"""Magnitudes of fp32 by their bits, and power-of-two grids of rows: what sparse codecs share, in torch."""

import torch

EXPONENT_FLOOR = 32
"""Smallest row exponent (biased as in fp32) that is told from smaller ones: rows below 2^-94 share a grid."""
NON_FINITE = 255
"""Row exponent of a row with a NaN or an infinity: all of it decodes to NaN."""


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """int32: the bits of |x|, fp32. They order as the magnitudes do, infinity and NaN above the rest."""
    return x.view(torch.int32) & 0x7FFFFFFF


def threshold_bits(thresholds: torch.Tensor) -> torch.Tensor:
    """int32 magnitude bits of fp32 thresholds >= 0; at least 1, so that zeros are never sent."""
    return magnitude_bits(thresholds).clamp(min=1)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """fp32 2^(exponent - 127) for int32 exponents from 1 to 254."""
    return (exponent << 23).view(torch.float32)


def bitmap_words(kept: torch.Tensor) -> torch.Tensor:
    """int32[.., n / 32] of bool[.., n]: bit i of word w is element 32 w + i."""
    weights = torch.ones(32, dtype=torch.int64, device=kept.device) << torch.arange(32, device=kept.device)
    words = (kept.view(*kept.shape[:-1], -1, 32) * weights).sum(-1)
    return ((words + 2**31) % 2**32 - 2**31).int()
