"""Sketch and peeling in plain torch: the definition that the kernels are tested against.

Source: lossless homomorphic compression (LHC, arXiv 2402.07529), as TAGC (arXiv 2504.05638) uses it. Ours
differs where the original is not exact: values lie on a power-of-two grid a row and cells are integers modulo
2^32, so that peeling, which subtracts, leaves no rounding behind, and results do not depend on the order of
anything.
"""

from typing import NamedTuple

import torch

from taco_kernels.common.magnitudes import (
    EXPONENT_FLOOR,
    NON_FINITE,
    bitmap_words,
    magnitude_bits,
    power_of_two,
    threshold_bits,
)
from taco_kernels.count_sketch.hashing import column_masks, row_hashes, signs
from taco_kernels.count_sketch.layout import COUNT_SHIFT, Layout


class Decoded(NamedTuple):
    """What a decode gives."""

    values: torch.Tensor
    """fp32[numel]: the sum."""
    counters: torch.Tensor
    """int32[2]: values in the union of the senders' bitmaps; leftovers, whose value is an estimate."""
    estimates: torch.Tensor
    """fp32[2]: how far apart the three estimates of each leftover lie, summed; magnitudes of the leftovers'
    values, summed. In an order of their own."""


def as_rows(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[S, numel] -> [S, rows, width], zero padded."""
    padded = torch.nn.functional.pad(x, (0, layout.rows * layout.width - layout.numel))
    return padded.view(x.shape[0], layout.rows, layout.width)


def row_exponents(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Biased fp32 exponent of the largest magnitude of every row.

    Args:
        x: fp32 ``[S, numel]``, one row a shard.
        layout: of one shard.

    Returns:
        uint8 ``[S, rows]``: 0 for zeros, 255 where a NaN or an infinity is. The senders' maximum is the
        exponent that they encode with.
    """
    layout.check("x", x, torch.float32, layout.numel)
    return (as_rows(magnitude_bits(x), layout).amax(2) >> 23).to(torch.uint8)


def grid_steps(exponents: torch.Tensor, mantissa: int) -> torch.Tensor:
    """fp32 grid step of rows with these uint8 exponents: 2^(exponent - 126 - mantissa); NaN for 255."""
    e = exponents.int()
    steps = power_of_two(e.clamp(min=EXPONENT_FLOOR) + 1 - mantissa)
    return steps.masked_fill(e == NON_FINITE, torch.nan)


def check_encoded(
    x: torch.Tensor, exponents: torch.Tensor, remainder: torch.Tensor | None, layout: Layout
) -> None:
    """Raise ValueError unless these are what ``encode`` takes."""
    layout.check("x", x, torch.float32, layout.numel)
    layout.check("exponents", exponents, torch.uint8, layout.rows)
    if remainder is not None:
        layout.check("remainder", remainder, torch.float32, layout.numel)


def encode(
    x: torch.Tensor,
    thresholds: torch.Tensor,
    exponents: torch.Tensor,
    layout: Layout,
    senders: int,
    seed: int,
    remainder: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sketches of the values of x at or above their shard's threshold, rounded to their row's grid.

    q = rint(x / step), step of the row's exponent, |q| < 2^mantissa. A value with q = 0 is not sent, nor is
    any of a row with exponent 255.

    Args:
        x: fp32 ``[S, numel]``.
        thresholds: fp32 ``[S]``.
        exponents: uint8 ``[S, rows]``, the maximum over the senders of their ``row_exponents``.
        layout: of one shard.
        senders: how many wires will be added up at most; decides the grid.
        seed: of the hashes, the same for all senders.
        remainder: fp32 ``[S, numel]``, may be x itself: gets x less what was sent, exactly.

    Returns:
        uint8 ``[S, wire_bytes]``.
    """
    check_encoded(x, exponents, remainder, layout)
    mantissa = layout.config.mantissa(senders)
    e = exponents.int().clamp(EXPONENT_FLOOR, NON_FINITE - 1)
    values = as_rows(x, layout)
    keep = as_rows(magnitude_bits(x), layout) >= threshold_bits(thresholds)[:, None, None]
    keep &= (exponents != NON_FINITE)[..., None]
    scaled = values * power_of_two(253 + mantissa - e)[..., None]
    largest = 2**mantissa - 1
    q = torch.where(keep, scaled, 0.0).round().clamp(-largest, largest).int()
    if remainder is not None:
        sent = q * power_of_two(e + 1 - mantissa)[..., None]
        remainder.copy_((values - sent).view(len(x), -1)[:, : layout.numel])
    hashes = row_hashes(layout, seed, x.device)
    columns = torch.arange(layout.width, device=x.device)
    cells = torch.zeros((len(x), layout.sketch_rows, layout.width), dtype=torch.int32, device=x.device)
    for j in range(3):
        spread = q.gather(2, (columns ^ column_masks(hashes, layout, j)[:, None]).expand_as(q))
        cells.index_add_(1, hashes[:, j], spread * signs(hashes, j)[:, None])
    words = bitmap_words((q != 0).view(len(x), -1))
    wires = torch.zeros((len(x), layout.wire_bytes), dtype=torch.uint8, device=x.device)
    if layout.config.cell_bits == 16:
        cells = wrap16(cells).to(torch.int16)
    end = layout.cell_bytes + 4 * layout.words
    wires[:, : layout.cell_bytes] = cells.view(len(x), -1).view(torch.uint8)
    wires[:, layout.cell_bytes : end] = words.view(torch.uint8)
    return wires


def wrap16(x: torch.Tensor) -> torch.Tensor:
    """int32 modulo 2^16 in [-2^15, 2^15)."""
    return x << 16 >> 16


def combine(wires: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the cells of ``wires`` uint8 ``[W, wire_bytes]`` and OR their bitmaps.

    Returns:
        Cells int32 ``[cells]`` (modulo 2^32; of 16-bit wires the low 16 bits mean something) and words int32
        ``[words]``.
    """
    layout.check("wires", wires, torch.uint8, layout.wire_bytes)
    end = layout.cell_bytes + 4 * layout.words
    dtype = torch.int32 if layout.config.cell_bits == 32 else torch.int16
    parts = wires[:, : layout.cell_bytes].contiguous().view(dtype)
    words = wires[:, layout.cell_bytes : end].contiguous().view(torch.int32)
    cells, union = parts[0].int(), words[0].clone()
    for w in range(1, len(wires)):
        cells = cells + parts[w].int()
        union |= words[w]
    return cells, union


def pack(cells: torch.Tensor, words: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The wire uint8 ``[wire_bytes]`` of combined cells and words: what a sum travels as."""
    if layout.config.cell_bits == 16:
        cells = wrap16(cells).to(torch.int16)
    wire = torch.cat([cells.view(torch.uint8), words.view(torch.uint8)])
    return torch.nn.functional.pad(wire, (0, layout.wire_bytes - wire.numel()))


def decode(
    cells: torch.Tensor, words: torch.Tensor, exponents: torch.Tensor, layout: Layout, senders: int, seed: int
) -> Decoded:
    """Peel the sum of sketches.

    A cell with one remaining member gives that member's value; the member is subtracted from its other cells.
    When no such cell is left, what remains (none, while the union's density is below about 0.77 / ratio) gets
    the median of its three signed cells. Integer arithmetic modulo 2^32: the result does not depend on the
    order.

    Args:
        cells: int32 ``[cells]``.
        words: int32 ``[words]``, the union's bitmap.
        exponents: uint8 ``[rows]``, as encoded with.
        layout: of the shard.
        senders: as encoded with.
        seed: as encoded with.
    """
    device, width = cells.device, layout.width
    hashes = row_hashes(layout, seed, device)
    places = hashes[:, :3].long()
    masks = torch.stack([column_masks(hashes, layout, j) for j in range(3)], dim=1).long()
    sign = torch.stack([signs(hashes, j) for j in range(3)], dim=1)
    bit = words[:, None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
    member = bit.view(layout.rows, width).bool()
    cells = cells.clone().view(layout.sketch_rows, width)

    row, column = member.nonzero(as_tuple=True)
    number = (1 << COUNT_SHIFT) + row // layout.blocks
    keys = torch.zeros((layout.sketch_rows, width), dtype=torch.int64, device=device)
    for j in range(3):
        keys.index_put_((places[row, j], column ^ masks[row, j]), number, accumulate=True)
    q = torch.zeros((layout.rows, width), dtype=torch.int32, device=device)
    table = torch.arange(layout.sketch_rows, device=device) // layout.third  # block * 3 + subtable
    alive = member.clone()
    found = True
    while found:
        found = False
        for j in range(3):
            single = (keys >> COUNT_SHIFT == 1) & (table % 3 == j)[:, None]
            place, at = single.nonzero(as_tuple=True)
            found = found or len(place) > 0
            number = keys[place, at]
            row = (number & (1 << COUNT_SHIFT) - 1) * layout.blocks + table[place] // 3
            column = at ^ masks[row, j]
            value = cells[place, at] * sign[row, j]
            q[row, column] = value
            alive[row, column] = False
            for k in range(3):
                where = (places[row, k], column ^ masks[row, k])
                keys.index_put_(where, -number, accumulate=True)
                cells.index_put_(where, -value * sign[row, k], accumulate=True)

    row, column = alive.nonzero(as_tuple=True)
    estimates = [cells[places[row, j], column ^ masks[row, j]] * sign[row, j] for j in range(3)]
    if layout.config.cell_bits == 16:
        estimates, q = [wrap16(x) for x in estimates], wrap16(q)
    low, middle, high = torch.stack(estimates).sort(dim=0).values
    q[row, column] = middle
    steps = grid_steps(exponents, layout.config.mantissa(senders))
    values = (q * steps[:, None]).view(-1)[: layout.numel]
    apart = (high.float() - low.float()) * steps[row]
    sums = torch.stack([apart.sum(), (middle * steps[row]).abs().sum()])
    return Decoded(values, torch.stack([member.sum(), alive.sum()]).int(), sums)
