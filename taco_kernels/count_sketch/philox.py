"""Hashes: Philox-4x32-7 (Salmon et al., SC'11) in torch integers; kernels use ``tl.philox``.

Seven rounds are the fewest of the four-word
generator that pass BigCrush there; ten are the authors' safety margin.
"""

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
_MASK = 0xFFFFFFFF


def _multiply(constant: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of constant * x for x int64 in [0, 2^32); 16 bits at a time to avoid wrapping."""
    low = (constant & 0xFFFF) * x
    high = (constant >> 16) * x + (low >> 16)
    return high >> 16, (high << 16 & _MASK) | (low & 0xFFFF)


def philox(counter: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    """Four words (int64 tensors in [0, 2^32)) of the blocks whose four counter words are given alike."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 32 & _MASK
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return [c0, c1, c2, c3]
