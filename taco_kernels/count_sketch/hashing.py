"""Where the rows of a sketch go: counter-based hashes, the same on every rank and never sent."""

import torch

from taco_kernels.count_sketch.layout import Layout
from taco_kernels.count_sketch.philox import philox

STREAM = 0x5E7C  # tells these numbers from others with the same key
ROUNDS = 6
_MASK = 0xFFFFFFFF


def row_hashes(layout: Layout, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int32[rows, 4]: three sketch rows, and a word with column masks and signs.

    Row r is number i = r // blocks of its block r % blocks. i, written as three digits to the base ``third``,
    goes through ROUNDS rounds of a Feistel network: in round k digit k % 3 moves, modulo ``third``, by word *
    third >> 32, the word being the first of the Philox block with counter (d * third + e, block, STREAM + 1 +
    k, 0) and key ``seed`` (modulo 2^64), and d and e the two digits that follow, cyclically. Digit j of the
    result is the row in subtable j. A network is one to one: no two rows of a block have all three sketch
    rows alike (while there are third^3 of them), as independent hashes would in every other block, and their
    elements could come apart no more.

    The last word is the fourth of the Philox block (r, 0, STREAM, 0). The bits below ``width`` are the column
    mask of subtable 0, bits 10-14 and 15-19 what subtables 1 and 2 xor onto that, and bit 20 + j is the sign
    in subtable j (set: minus). The three columns of an element lie in the same 32: such a slab of a block
    decodes by itself.
    """
    row = torch.arange(layout.rows, dtype=torch.int64, device=device)
    block, number, third = row % layout.blocks, row // layout.blocks, layout.third
    zero = torch.zeros_like(row)
    digits = [number % third, number // third % third, number // third**2 % third]
    for k in range(ROUNDS):
        moved, d, e = ((k + step) % 3 for step in range(3))
        word = philox([digits[d] * third + digits[e], block, zero + STREAM + 1 + k, zero], seed)[0]
        digits[moved] = (digits[moved] + (word * third >> 32)) % third
    places = [(block * 3 + j) * third + digit for j, digit in enumerate(digits)]
    last = philox([row, zero, zero + STREAM, zero], seed)[3] & (0x7FFC00 | (layout.width - 1))
    return torch.stack([*places, last], dim=1).int()


def signs(hashes: torch.Tensor, subtable: int) -> torch.Tensor:
    """int32: +1 or -1 of rows in a subtable."""
    return 1 - (hashes[..., 3] >> (20 + subtable) & 1) * 2


def column_masks(hashes: torch.Tensor, layout: Layout, subtable: int) -> torch.Tensor:
    """int32: what is xored onto a row's columns in a subtable."""
    masks = hashes[..., 3] & (layout.width - 1)
    return masks ^ (hashes[..., 3] >> (5 + 5 * subtable) & 31) if subtable else masks
