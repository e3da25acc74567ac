"""Philox-4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC'11) in torch integers."""

import torch

from taco_kernels.layout import Stream

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
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


def uniform_bytes(random: Stream, first: int, count: int, device: torch.device | str) -> torch.Tensor:
    """uint8[count] for elements first, first + 1, ... of a stream; first and count multiples of 16."""
    start = (random.offset + first) // 16
    block = torch.arange(start, start + count // 16, dtype=torch.int64, device=device)
    stream = [torch.full_like(block, random.stream >> shift & _MASK) for shift in (0, 32)]
    words = torch.stack(philox([block & _MASK, block >> 32, *stream], random.key), dim=-1)
    shifts = torch.arange(0, 32, 8, dtype=torch.int64, device=device)
    return (words[..., None] >> shifts & 0xFF).to(torch.uint8).reshape(-1)
