"""Where the rows of a sketch go: counter-based hashes, the same on every rank and never sent."""

import torch

from taco_kernels.homomorphic.layout import Layout
from taco_kernels.philox import philox

STREAM = 0x5E7C  # tells these numbers from others with the same key
_MASK = 0xFFFFFFFF


def row_hashes(layout: Layout, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int32[rows, 4]: three sketch rows, and a word with column masks and signs.

    Row r takes the four words of the Philox block with counter (r, STREAM) and key ``seed`` (modulo 2^64).
    Word j gives h_j = (block * 3 + j) * third + (word * third >> 32). Word 3 keeps the bits below ``width``
    as the column mask of subtable 0, bits 10-14 and 15-19 as what subtables 1 and 2 xor onto that, and bit 20
    + j as the sign in subtable j (set: minus). The three columns of an element lie in the same 32: such a
    slab of a block decodes by itself.
    """
    row = torch.arange(layout.rows, dtype=torch.int64, device=device)
    zero = torch.zeros_like(row)
    *words, last = philox([row, zero, zero + STREAM, zero], seed)
    first = row % layout.blocks * 3
    places = [(first + j) * layout.third + (word * layout.third >> 32) for j, word in enumerate(words[:3])]
    return torch.stack([*places, last & (0x7FFC00 | (layout.width - 1))], dim=1).int()


def signs(hashes: torch.Tensor, subtable: int) -> torch.Tensor:
    """int32: +1 or -1 of rows in a subtable."""
    return 1 - (hashes[..., 3] >> (20 + subtable) & 1) * 2


def column_masks(hashes: torch.Tensor, layout: Layout, subtable: int) -> torch.Tensor:
    """int32: what is xored onto a row's columns in a subtable."""
    masks = hashes[..., 3] & (layout.width - 1)
    return masks ^ (hashes[..., 3] >> (5 + 5 * subtable) & 31) if subtable else masks
