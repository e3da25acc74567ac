"""A sparse tensor that is not added up on the way: its wire, encoding and adding up in plain torch.

TAGC (arXiv 2504.05638) sends the largest gradients of a shard. A shard of ``numel`` values is rows
of 1024. Its wire is::

    values | bitmap | starts | exponents

    values      the values that are sent, end to end: integers of 8 or 16 bits, zeros up to the capacity
    bitmap      one bit a value: whether it is sent
    starts      an int32 every 4 rows: how many values are sent before these
    exponents   a uint8 a row

each part padded with zeros to a multiple of 64 bytes. Values are integers on their row's
power-of-two grid. The kernels in launch.py are tested against these functions.
"""

import math
from dataclasses import dataclass

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
"""Bytes: each part of a wire begins at a multiple of it."""
WIDTH = 1024
"""Values in a row."""
TILE_ROWS = 4
"""Rows a start: what comes before a row of them is counted in the bitmap of at most three."""


@dataclass(frozen=True)
class BitmapLayout:
    """Sizes of a shard's wire. Validated on construction (ValueError)."""

    numel: int
    share: float
    """Largest share of the values that is sent, in (0, 1]."""
    bits: int = 16
    """Bits of a value: 8 or 16."""

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ValueError(f"numel={self.numel} must be at least 1")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} must lie in (0, 1]")
        if self.capacity >= 2**31 - 2**20:
            raise ValueError(
                f"{self.capacity} values to send of a shard: 2^31 - 2^20 cannot be counted"
            )
        check_choice("bits", self.bits, (8, 16))

    @property
    def capacity(self) -> int:
        """Most values sent."""
        return math.ceil(self.share * self.numel)

    @property
    def rows(self) -> int:
        """Rows, the last one padded."""
        return ceil_div(self.numel, WIDTH)

    @property
    def words(self) -> int:
        """int32 words of the bitmap."""
        return self.rows * (WIDTH // 32)

    @property
    def words_at(self) -> int:
        """Byte where the bitmap begins."""
        return aligned(self.capacity * self.bits // 8, ALIGNMENT)

    @property
    def tiles(self) -> int:
        """Starts, the last one perhaps of fewer rows."""
        return ceil_div(self.rows, TILE_ROWS)

    @property
    def starts_at(self) -> int:
        """Byte where the starts begin."""
        return self.words_at + aligned(4 * self.words, ALIGNMENT)

    @property
    def exponents_at(self) -> int:
        """Byte where the exponents begin."""
        return self.starts_at + aligned(4 * self.tiles, ALIGNMENT)

    @property
    def wire_bytes(self) -> int:
        """Exact bytes of one wire."""
        return self.exponents_at + aligned(self.rows, ALIGNMENT)

    def check_values(self, x: torch.Tensor, remainder: torch.Tensor | None) -> None:
        """Check that both are fp32 [S, numel] with contiguous rows, and that there is a shard.

        Raises:
            ValueError: they are not.
        """
        check_tensor("x", x, torch.float32, (None, self.numel), contiguous=True)
        if not len(x):
            raise ValueError("x has no shard to pack")
        if remainder is not None:
            check_tensor("remainder", remainder, torch.float32, x.shape, contiguous=True)

    def check_wires(self, wires: torch.Tensor) -> None:
        """Check that ``wires`` is uint8 [W, wire_bytes] of at least one sender.

        Raises:
            ValueError: it is not.
        """
        check_tensor("wires", wires, torch.uint8, (len(wires) or 1, self.wire_bytes))


_CODES = {8: torch.int8, 16: torch.int16}
"""By bits: the integers that values are sent as."""


def encode(
    x: torch.Tensor,
    thresholds: torch.Tensor,
    layout: BitmapLayout,
    remainder: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pack the values of x at or above their shard's threshold, at most ``layout.capacity``, in
    order.

    q = rint(x / step), step = 2^(e - 125 - bits) for the biased exponent e of the row's largest
    magnitude,
    |q| < 2^(bits - 1); a value with q = 0 is not sent. Nothing of a row with a NaN or infinity is sent but
    its exponent, 255.

    Args:
        x: fp32 ``[S, numel]``.
        thresholds: fp32 ``[S]``, >= 0.
        layout: of a shard.
        remainder: fp32 ``[S, numel]``, may be x itself: gets x less what was sent, exactly.

    Returns:
        uint8 ``[S, wire_bytes]``.

    Raises:
        ValueError: x is not of the layout, holds no shard, or the remainder is not like it.
    """
    layout.check_values(x, remainder)
    shards = len(x)
    width = layout.rows * WIDTH
    values = torch.nn.functional.pad(x, (0, width - layout.numel)).view(shards, layout.rows, WIDTH)
    magnitudes = magnitude_bits(values)
    exponents = magnitudes.amax(2) >> 23

    # Which values are to be sent, and as which integers.
    reaches = magnitudes >= threshold_bits(thresholds)[:, None, None]
    keep = reaches & (exponents != NON_FINITE)[..., None]
    e = exponents.clamp(EXPONENT_FLOOR, NON_FINITE - 1)[..., None]
    scaled = torch.where(keep, values * power_of_two(252 + layout.bits - e), 0.0)
    largest = 2 ** (layout.bits - 1) - 1
    codes = scaled.round().clamp(-largest, largest).to(_CODES[layout.bits])
    keep &= codes != 0

    # The first of them, as many as there is room for.
    keep = keep.view(shards, width)
    position = keep.cumsum(1) - 1
    keep = keep & (position < layout.capacity)
    if remainder is not None:
        sent = torch.where(keep.view_as(values), codes * power_of_two(e + 2 - layout.bits), 0.0)
        remainder.copy_((values - sent).view(shards, width)[:, : layout.numel])
    packed = codes.new_zeros(shards, layout.capacity)
    shard, index = keep.nonzero(as_tuple=True)
    packed[shard, position[shard, index]] = codes.view(shards, width)[shard, index]

    counts = keep.view(shards, layout.rows, WIDTH).sum(2)
    starts = (counts.cumsum(1) - counts)[:, ::TILE_ROWS].int()
    wires = torch.zeros((shards, layout.wire_bytes), dtype=torch.uint8, device=x.device)
    for begin, part in (
        (0, packed),
        (layout.words_at, bitmap_words(keep)),
        (layout.starts_at, starts.clone(memory_format=torch.contiguous_format)),
        (layout.exponents_at, exponents.to(torch.uint8)),
    ):
        part_bytes = part.view(torch.uint8)
        wires[:, begin : begin + part_bytes.shape[1]] = part_bytes
    return wires


def decode_sum(wires: torch.Tensor, layout: BitmapLayout) -> torch.Tensor:
    """fp32 ``[numel]``: the values of ``wires`` uint8 ``[W, wire_bytes]``, added in fp32 in their
    order.

    NaN in rows in which a sender had a NaN or infinity.

    Raises:
        ValueError: the wires are not of the layout, or there are none.
    """
    layout.check_wires(wires)
    total = torch.zeros(layout.rows * WIDTH, dtype=torch.float32, device=wires.device)
    for wire in wires:
        total += _decode(wire, layout).view(-1)
    return total[: layout.numel]


def _decode(wire: torch.Tensor, layout: BitmapLayout) -> torch.Tensor:
    """fp32 ``[rows, WIDTH]``: one sender's values, zeros where none was sent."""
    codes = wire[: layout.capacity * layout.bits // 8].clone().view(_CODES[layout.bits])
    words = wire[layout.words_at : layout.words_at + 4 * layout.words].clone().view(torch.int32)
    exponents = wire[layout.exponents_at : layout.exponents_at + layout.rows].int()
    bits = torch.arange(32, dtype=torch.int32, device=wire.device)
    is_sent = (words[:, None] >> bits & 1).bool().view(-1)
    values = torch.zeros(layout.rows * WIDTH, dtype=torch.float32, device=wire.device)
    values[is_sent] = codes[: int(is_sent.sum())].float()
    e = exponents.clamp(EXPONENT_FLOOR, NON_FINITE - 1)
    values = values.view(layout.rows, WIDTH) * power_of_two(e + 2 - layout.bits)[:, None]
    return values.masked_fill((exponents == NON_FINITE)[:, None], torch.nan)
