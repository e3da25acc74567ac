"""Sketches that add up without being decoded and decode without loss (LHC, arXiv 2402.07529).

A shard of ``numel`` values is rows of ``width`` consecutive values. Row r belongs to block ``r %
blocks`` (interleaved, so that regions of different density mix). A block has three subtables of
``third`` sketch rows; element (r, c) is added, with a random sign each, to one cell of every
subtable: sketch row h_j(r), column ``c ^ mask_j(r)``::

    shard               sketch of a block
    row r   ..e.. --->  subtable 0, sketch row h_0(r)   ....+e..    column c ^ mask_0(r)
                        subtable 1, sketch row h_1(r)   .-e.....    column c ^ mask_1(r)
                        subtable 2, sketch row h_2(r)   ...+e...    column c ^ mask_2(r)

The masks spread what lies in one column of a weight matrix (an outlier channel) over all columns.
Decoding peels: a cell to which one member was added gives its value; the member is taken out of its
two other cells, which may leave those with one member, and so on.

The wire of a shard, padded with zeros to a multiple of 64 bytes::

    cells, blocks * 3 * third * width integers | bitmap, one bit a value, 32 values an int32 word

The original rounds in fp32; here values lie on a power-of-two grid a row and cells are sums modulo
2^32 (or 2^16). Peeling, which subtracts, therefore leaves no rounding, and no result depends on an
order.
"""

import functools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from taco_kernels.common import aligned, ceil_div, check_choice, check_tensor
from taco_kernels.common.reference import (
    EXPONENT_FLOOR,
    NON_FINITE,
    bitmap_words,
    magnitude_bits,
    power_of_two,
    threshold_bits,
)

ALIGNMENT = 64
"""Bytes: a wire is a multiple of it."""
LEAST_WIDTH = 32
"""Fewest values a row, those of a word of the bitmap."""
MOST_WIDTH = 1024
"""Most values a row."""
BLOCK_ROWS = 2048
"""Most rows a block."""
MAX_SENDERS = 1024
"""Most wires that are added up."""
MAX_MANTISSA = 22
"""Most bits of a value on the grid."""
EXACT_LOAD = 0.77
"""Members a cell up to which peeling recovers everything: 0.818 for endless sketches, less what
chance needs
where a block's 32 columns, which decode by themselves, have 1024 to 2048 rows."""
COUNT_SHIFT = 20
"""A cell's key is ``members << 20`` plus the sum of its members' numbers in the block."""
STREAM = 0x5E7C
"""Third counter word of the hashes: tells these numbers from others with the same key."""
HASH_ROUNDS = 6
"""Rounds of the Feistel network that places rows: each of the three digits moves twice."""
PHILOX_ROUNDS = 7
"""The fewest that pass BigCrush (Salmon et al., SC'11); ten are the authors' safety margin."""
_WORD = 0xFFFFFFFF
"""The bits of a word of 32; Philox's arithmetic is done in int64."""


@dataclass(frozen=True)
class SketchConfig:
    """Settings of a sketch. Validated on construction (ValueError)."""

    ratio: float = 4.0
    """Values a cell: the sketch has ``numel / ratio`` cells (rounded up to whole rows)."""
    cell_bits: int = 32
    """Bits of a cell, 32 or 16: 16 halves the sketch and leaves a value 15 bits less log2 of the
    senders."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.ratio <= 64:
            raise ValueError(f"ratio={self.ratio} must be from 0.5 to 64 values a cell")
        check_choice("cell_bits", self.cell_bits, (16, 32))

    def mantissa(self, senders: int) -> int:
        """Bits of a value on the grid below the largest of its row.

        Sums of ``senders`` values stay below 2^24 grid steps, where fp32 is exact, and in a cell's
        range.

        Raises:
            ValueError: there are fewer than 1 or more than 1024 senders.
        """
        if not 1 <= senders <= MAX_SENDERS:
            raise ValueError(f"senders={senders} must be from 1 to {MAX_SENDERS}")
        headroom = math.ceil(math.log2(senders))
        return min(MAX_MANTISSA, 24 - headroom, self.cell_bits - 1 - headroom)


@dataclass(frozen=True)
class SketchLayout:
    """A SketchConfig applied to shards of ``numel`` values, at least one."""

    config: SketchConfig
    numel: int

    @cached_property
    def width(self) -> int:
        """Values a row: 1024, halved (to 32) until there are 1024 rows, as hashing needs many."""
        width_of_1024_rows = self.numel // 1024
        power_of_two_below = 1 << max(width_of_1024_rows.bit_length() - 1, 0)
        return min(max(power_of_two_below, LEAST_WIDTH), MOST_WIDTH)

    @cached_property
    def rows(self) -> int:
        """Rows, the last one padded."""
        return ceil_div(self.numel, self.width)

    @cached_property
    def blocks(self) -> int:
        """Sketches of a shard, each of every blocks-th row."""
        return ceil_div(self.rows, BLOCK_ROWS)

    @cached_property
    def third(self) -> int:
        """Sketch rows of a subtable; row h of subtable j of a block is ``(block * 3 + j) * third +
        h``."""
        return math.ceil(ceil_div(self.rows, self.blocks) / (3 * self.config.ratio))

    @cached_property
    def cells(self) -> int:
        """Cells of the sketch."""
        return self.blocks * 3 * self.third * self.width

    @property
    def words(self) -> int:
        """int32 words of the bitmap."""
        return self.rows * self.width // 32

    @property
    def exact_density(self) -> float:
        """Density of the union up to which decoding is exact."""
        return EXACT_LOAD * self.cells / (self.rows * self.width)

    @property
    def wire_bytes(self) -> int:
        """Exact bytes of one wire."""
        return aligned(self.cells * self.config.cell_bits // 8 + 4 * self.words, ALIGNMENT)


class Decoded(NamedTuple):
    """Result of a decode."""

    values: torch.Tensor
    """fp32[numel]: the sum."""
    counters: torch.Tensor
    """int32[2]: values in the union of the senders' bitmaps; leftovers, whose value is an estimate.
    """


def _multiply(constant: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of constant * x for x int64 in [0, 2^32); 16 bits at a time to avoid
    wrapping."""
    low = (constant & 0xFFFF) * x
    high = (constant >> 16) * x + (low >> 16)
    return high >> 16, (high << 16 & _WORD) | (low & 0xFFFF)


def philox(counter: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    """Philox-4x32-7 (Salmon et al., SC'11): four random words of each counter.

    Args:
        counter: four tensors of counter words, int64 in [0, 2^32).
        key: 64 bits.

    Returns:
        Four tensors of words, int64 in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0 = key & _WORD
    k1 = key >> 32 & _WORD
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + 0x9E3779B9) & _WORD
        k1 = (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


class RowHashes(NamedTuple):
    """Where the rows of a shard go; each ``[rows, 3]``, a column a subtable."""

    sketch_rows: torch.Tensor
    """int64: rows of the sketch, counted over all blocks and subtables."""
    masks: torch.Tensor
    """int64: what columns are xored with."""
    signs: torch.Tensor
    """int32: +1 or -1."""

    def cells_of(self, row: torch.Tensor, column: torch.Tensor, width: int) -> torch.Tensor:
        """int64 ``[n, 3]``: the cells of n elements.

        Args:
            row: int64 ``[n]``.
            column: int64 ``[n]``.
            width: values a row.
        """
        return self.sketch_rows[row] * width + (column[:, None] ^ self.masks[row])


@functools.lru_cache(maxsize=64)
def row_hashes(layout: SketchLayout, seed: int, device: torch.device | str = "cpu") -> RowHashes:
    """Where rows go, the same on every rank and never sent.

    Row r is number i = r // blocks of its block. i, written as three digits to the base ``third``,
    goes through a Feistel network: in round k digit k % 3 moves, modulo ``third``, by word * third
    >> 32, the word being the first of the Philox block with counter (d * third + e, block, STREAM +
    1 + k, 0) and key ``seed``, and d and e the two digits that follow, cyclically. Digit j of the
    result is the row in subtable j. The network is one to one: no two rows of a block have all
    three sketch rows alike (while there are third^3 of them), and their elements can be
    distinguished.

    Masks and signs are bits of the fourth word of the Philox block (r, 0, STREAM, 0): those below
    ``width`` are the mask of subtable 0, bits 10-14 and 15-19 what subtables 1 and 2 xor onto that,
    and bit 20 + j is the sign in subtable j (set: minus). An element's three columns lie in the
    same 32.

    Args:
        layout: of the shard.
        seed: key of the hashes, 64 bits.
        device: of the result.
    """
    row = torch.arange(layout.rows)
    block = row % layout.blocks
    number = row // layout.blocks
    third = layout.third
    zero = torch.zeros_like(row)

    digits = [number % third, number // third % third, number // third**2 % third]
    for k in range(HASH_ROUNDS):
        moved = k % 3
        d = (k + 1) % 3
        e = (k + 2) % 3
        # What is added to one digit depends on the two others alone, so each round can be undone.
        counter = [digits[d] * third + digits[e], block, zero + STREAM + 1 + k, zero]
        word = philox(counter, seed)[0]
        digits[moved] = (digits[moved] + (word * third >> 32)) % third
    sketch_rows = [(block * 3 + j) * third + digit for j, digit in enumerate(digits)]

    # Another counter word than the rounds above have: none of those numbers is used twice.
    word = philox([row, zero, zero + STREAM, zero], seed)[3][:, None]
    onto_first = torch.cat([0 * word, word >> 10 & 31, word >> 15 & 31], dim=1)
    masks = word & (layout.width - 1) ^ onto_first
    signs = 1 - (word >> torch.arange(20, 23) & 1) * 2
    sketch_rows = torch.stack(sketch_rows, dim=1)
    return RowHashes(sketch_rows.to(device), masks.to(device), signs.int().to(device))


def _as_rows(x: torch.Tensor, layout: SketchLayout) -> torch.Tensor:
    """[S, numel] -> [S, rows, width], zero padded."""
    padded = torch.nn.functional.pad(x, (0, layout.rows * layout.width - layout.numel))
    return padded.view(x.shape[0], layout.rows, layout.width)


def row_exponents(x: torch.Tensor, layout: SketchLayout) -> torch.Tensor:
    """Biased fp32 exponents of the largest magnitudes of rows of x fp32 ``[S, numel]``: uint8 ``[S,
    rows]``.

    0 for zeros, 255 where a NaN or an infinity is. All senders encode with the maximum of theirs.
    """
    check_tensor("x", x, torch.float32, (None, layout.numel))
    return (_as_rows(magnitude_bits(x), layout).amax(2) >> 23).to(torch.uint8)


def grid_steps(exponents: torch.Tensor, mantissa: int) -> torch.Tensor:
    """fp32 grid step of rows with these uint8 exponents: 2^(exponent - 126 - mantissa); NaN for
    255."""
    e = exponents.int()
    steps = power_of_two(e.clamp(min=EXPONENT_FLOOR) + 1 - mantissa)
    return steps.masked_fill(e == NON_FINITE, torch.nan)


def encode(
    x: torch.Tensor,
    thresholds: torch.Tensor,
    exponents: torch.Tensor,
    layout: SketchLayout,
    senders: int,
    seed: int,
    remainder: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sketches uint8 ``[S, wire_bytes]`` of the values of x fp32 ``[S, numel]`` that reach
    ``thresholds``.

    q = rint(x / step), step of the row's exponent, |q| < 2^mantissa. A value with q = 0 is not sent, nor is
    any of a row with exponent 255.

    Args:
        x: fp32 ``[S, numel]``.
        thresholds: fp32 ``[S]``, a threshold a shard.
        exponents: uint8 ``[S, rows]``, the maximum over the senders of their ``row_exponents``.
        layout: of a shard.
        senders: how many wires will be added up at most; decides the grid.
        seed: of the hashes, the same for all senders.
        remainder: fp32 ``[S, numel]``, may be x itself: gets x less what was sent, exactly.

    Raises:
        ValueError: x or exponents are not of the layout, or there are too many senders.
    """
    check_tensor("x", x, torch.float32, (None, layout.numel))
    check_tensor("exponents", exponents, torch.uint8, (None, layout.rows))
    mantissa = layout.config.mantissa(senders)
    e = exponents.int().clamp(EXPONENT_FLOOR, NON_FINITE - 1)
    values = _as_rows(x, layout)
    keep = _as_rows(magnitude_bits(x), layout) >= threshold_bits(thresholds)[:, None, None]
    keep &= (exponents != NON_FINITE)[..., None]
    scaled = values * power_of_two(253 + mantissa - e)[..., None]  # by 1 / step, exactly
    largest = 2**mantissa - 1
    q = torch.where(keep, scaled, 0.0).round().clamp(-largest, largest).int()
    if remainder is not None:
        sent = q * power_of_two(e + 1 - mantissa)[..., None]
        remainder.copy_((values - sent).view(len(x), -1)[:, : layout.numel])

    hashes = row_hashes(layout, seed, x.device)
    columns = torch.arange(layout.width, device=x.device)
    cells = torch.zeros((len(x), layout.cells), dtype=torch.int32, device=x.device)
    cells = cells.view(len(x), -1, layout.width)
    for j in range(3):
        # An xor of columns is its own inverse: sketch column c has the element of column c ^ mask.
        element = columns ^ hashes.masks[:, j, None]
        signed = q.gather(2, element.expand_as(q)) * hashes.signs[:, j, None]
        cells.index_add_(1, hashes.sketch_rows[:, j], signed)
    return pack(cells.flatten(1), bitmap_words((q != 0).flatten(1)), layout)


def combine(wires: torch.Tensor, layout: SketchLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the cells of ``wires`` uint8 ``[W, wire_bytes]`` and OR their bitmaps.

    Returns:
        Cells int32 ``[cells]`` (modulo 2^32; of 16-bit wires the low 16 bits mean something) and
        words int32 ``[words]``.
    """
    check_tensor("wires", wires, torch.uint8, (None, layout.wire_bytes))
    dtype = torch.int32 if layout.config.cell_bits == 32 else torch.int16
    split = layout.cells * dtype.itemsize
    cells = wires[:, :split].contiguous().view(dtype)
    words = wires[:, split : split + 4 * layout.words].contiguous().view(torch.int32)
    return cells.sum(0, dtype=torch.int32), functools.reduce(torch.bitwise_or, words)


def pack(cells: torch.Tensor, words: torch.Tensor, layout: SketchLayout) -> torch.Tensor:
    """Wires of cells and bitmaps.

    Args:
        cells: int32 ``[..., cells]``.
        words: int32 ``[..., words]``.
        layout: of a shard.

    Returns:
        uint8 ``[..., wire_bytes]``.
    """
    if layout.config.cell_bits == 16:
        cells = _wrap16(cells).to(torch.int16)
    wires = torch.cat([cells.view(torch.uint8), words.view(torch.uint8)], dim=-1)
    return torch.nn.functional.pad(wires, (0, layout.wire_bytes - wires.shape[-1]))


def _wrap16(x: torch.Tensor) -> torch.Tensor:
    """int32 modulo 2^16 in [-2^15, 2^15)."""
    return x << 16 >> 16


def _add(table: torch.Tensor, cells: torch.Tensor, amounts: torch.Tensor) -> None:
    """Add integers [n, 3], or [n, 1], to the cells [n, 3] of a table."""
    table.scatter_add_(0, cells.flatten(), amounts.expand_as(cells).flatten())


def decode(
    cells: torch.Tensor,
    words: torch.Tensor,
    exponents: torch.Tensor,
    layout: SketchLayout,
    senders: int,
    seed: int,
) -> Decoded:
    """Peel the sum of sketches.

    A cell with one remaining member gives that member's value; the member is subtracted from its
    other cells. When no such cell is left, what remains (none, while the union's density is below
    about 0.77 / ratio) gets the median of its three signed cells. Waits for the host once a round.

    To tell members apart a cell has a key: their count, and the sum of their numbers in the block.
    It is computed here from the bitmaps, which are sent, and peeled with the cell.

    Args:
        cells: int32 ``[cells]``, of ``combine``.
        words: int32 ``[words]``, of ``combine``.
        exponents: uint8 ``[rows]``, as encoded with.
        layout: of the shard.
        senders: as encoded with.
        seed: as encoded with.

    Raises:
        ValueError: there are too many senders.
    """
    device = cells.device
    width = layout.width
    hashes = row_hashes(layout, seed, device)
    bits = words[:, None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
    unknown = bits.view(layout.rows, width).bool()
    union = unknown.sum()

    # The members of every cell, from the bitmaps: how many there are, and the sum of their numbers.
    row, column = unknown.nonzero(as_tuple=True)
    cells = cells.clone()
    keys = torch.zeros_like(cells, dtype=torch.int64)
    member = (1 << COUNT_SHIFT) + (row // layout.blocks)[:, None]
    _add(keys, hashes.cells_of(row, column, width), member)

    q = torch.zeros((layout.rows, width), dtype=torch.int32, device=device)
    subtables = keys.view(layout.blocks, 3, -1)
    peeled = True
    while peeled:
        peeled = False
        for j in range(3):  # one subtable at a time, where no member is met twice
            block, index = (subtables[:, j] >> COUNT_SHIFT == 1).nonzero(as_tuple=True)
            peeled = peeled or len(index) > 0
            # With one member left, the sum of the numbers is its number; the mask gives its column.
            number = subtables[block, j, index] & (1 << COUNT_SHIFT) - 1
            row = number * layout.blocks + block
            column = index % width ^ hashes.masks[row, j]
            value = cells.view_as(subtables)[block, j, index] * hashes.signs[row, j]
            q[row, column] = value
            unknown[row, column] = False
            # Take it out of all three of its cells, this one included, which then has no member.
            member_cells = hashes.cells_of(row, column, width)
            _add(keys, member_cells, -(number + (1 << COUNT_SHIFT))[:, None])
            _add(cells, member_cells, -value[:, None] * hashes.signs[row])

    # What could not be peeled: an estimate from each of its cells, in which other members are
    # noise.
    row, column = unknown.nonzero(as_tuple=True)
    estimates = cells[hashes.cells_of(row, column, width)] * hashes.signs[row]
    if layout.config.cell_bits == 16:
        estimates = _wrap16(estimates)
        q = _wrap16(q)
    q[row, column] = estimates.median(dim=1).values
    steps = grid_steps(exponents, layout.config.mantissa(senders))
    values = (q * steps[:, None]).view(-1)[: layout.numel]
    return Decoded(values, torch.stack([union, unknown.sum()]).int())
