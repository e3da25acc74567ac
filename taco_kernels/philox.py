"""Random numbers from their address: Philox-4x32-7 (Salmon et al., SC'11) in torch integers.

Salmon et al., Parallel random numbers: as easy as 1, 2, 3. Seven rounds are the fewest of the four-word
generator that pass BigCrush there; ten are the authors' safety margin.
"""

import torch

from taco_kernels.layout import Stream

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


def uniform_nibbles(random: Stream, first: int, count: int, device: torch.device | str) -> torch.Tensor:
    """int32[count] of 0..15 for elements first, first + 1, ... of a stream; layout.Stream has the address."""
    start = random.offset + first
    lowest, end = start // 128, -(-(start + count) // 128)
    block = torch.arange(4 * lowest, 4 * end, dtype=torch.int64, device=device) & _MASK
    zero = torch.zeros_like(block)
    stream = [zero + (random.stream >> shift & _MASK) for shift in (0, 32)]
    words = torch.stack(philox([block, zero, *stream], random.key), dim=-1)
    # [128 elements, 16 of them, word, bit 3 of the element, bits 0-1] -> bits of the element, high ones first
    shifts = torch.tensor([[0, 8, 16, 24], [4, 12, 20, 28]], dtype=torch.int64, device=device)
    nibbles = (words.view(-1, 4, 2, 2, 1, 1) >> shifts & 15).permute(0, 2, 1, 4, 3, 5)
    return nibbles.reshape(-1)[start - 128 * lowest :][:count].int()
