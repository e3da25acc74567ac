"""Packing and adding up sparse tensors in plain torch: the definition that the kernels are tested against."""

import torch

from taco_kernels.bitmap_sparse.layout import TILE_ROWS, WIDTH, BitmapLayout
from taco_kernels.common.magnitudes import (
    EXPONENT_FLOOR,
    NON_FINITE,
    bitmap_words,
    magnitude_bits,
    power_of_two,
    threshold_bits,
)

_CODES = {8: torch.int8, 16: torch.int16}


def encode(
    x: torch.Tensor, thresholds: torch.Tensor, layout: BitmapLayout, remainder: torch.Tensor | None = None
) -> torch.Tensor:
    """Pack the values of x at or above their shard's threshold, at most ``layout.capacity``, in order.

    q = rint(x / step), step = 2^(e - 125 - bits) for the exponent e of the row's largest
    magnitude, |q| < 2^(bits - 1); a value with q = 0 is not sent. Nothing of a row with a NaN or infinity is
    sent but its exponent, 255.

    Args:
        x: fp32 ``[S, numel]``.
        thresholds: fp32 ``[S]``, >= 0.
        layout: of one shard.
        remainder: fp32 ``[S, numel]``, may be x itself: gets x less what was sent, exactly.

    Returns:
        uint8 ``[S, wire_bytes]``.

    Raises:
        ValueError: x is not of the layout, holds no shard, or the remainder is not like it.
    """
    layout.check_values(x, remainder)
    shards, width = len(x), layout.rows * WIDTH
    bits = torch.nn.functional.pad(magnitude_bits(x), (0, width - layout.numel)).view(
        shards, layout.rows, WIDTH
    )
    values = torch.nn.functional.pad(x, (0, width - layout.numel)).view(shards, layout.rows, WIDTH)
    exponents = bits.amax(2) >> 23
    keep = (bits >= threshold_bits(thresholds)[:, None, None]) & (exponents != NON_FINITE)[..., None]
    e = exponents.clamp(EXPONENT_FLOOR, NON_FINITE - 1)[..., None]
    scaled = torch.where(keep, values * power_of_two(252 + layout.bits - e), 0.0)
    largest = 2 ** (layout.bits - 1) - 1
    codes = scaled.round().clamp(-largest, largest).to(_CODES[layout.bits])
    keep &= codes != 0
    sent = codes * power_of_two(e + 2 - layout.bits)
    keep = keep.view(shards, width)
    position = keep.cumsum(1) - 1
    keep = keep & (position < layout.capacity)
    if remainder is not None:
        rest = torch.where(
            keep, values.view(shards, width) - sent.view(shards, width), values.view(shards, width)
        )
        remainder.copy_(rest[:, : layout.numel])
    packed = codes.new_zeros(shards, layout.capacity)
    shard, at = keep.nonzero(as_tuple=True)
    packed[shard, position[shard, at]] = codes.view(shards, width)[shard, at]
    words = bitmap_words(keep)
    counts = keep.view(shards, layout.rows, WIDTH).sum(2)
    starts = (counts.cumsum(1) - counts)[:, ::TILE_ROWS].int()
    wires = torch.zeros((shards, layout.wire_bytes), dtype=torch.uint8, device=x.device)
    for begin, part in (
        (0, packed.view(torch.uint8)),
        (layout.words_at, words.view(torch.uint8)),
        (layout.starts_at, starts.clone(memory_format=torch.contiguous_format).view(torch.uint8)),
        (layout.exponents_at, exponents.to(torch.uint8)),
    ):
        wires[:, begin : begin + part.shape[1]] = part
    return wires


def decode_sum(wires: torch.Tensor, layout: BitmapLayout) -> torch.Tensor:
    """fp32 ``[numel]``: the values of ``wires`` uint8 ``[W, wire_bytes]``, added in fp32 in their order.

    NaN in rows in which a sender had a NaN or infinity.

    Raises:
        ValueError: wires are not of the layout, or there are none.
    """
    layout.check_wires(wires)
    dtype, device = _CODES[layout.bits], wires.device
    total = torch.zeros(layout.rows * WIDTH, dtype=torch.float32, device=device)
    lanes = torch.arange(32, dtype=torch.int32, device=device)
    for wire in wires:
        codes = wire[: layout.capacity * layout.bits // 8].clone().view(dtype)
        words = wire[layout.words_at : layout.words_at + 4 * layout.words].clone().view(torch.int32)
        exponents = wire[layout.exponents_at : layout.exponents_at + layout.rows].int()
        member = (words[:, None] >> lanes & 1).bool().view(-1)
        values = torch.zeros(layout.rows * WIDTH, dtype=torch.float32, device=device)
        values[member] = codes[: int(member.sum())].float()
        values = values.view(layout.rows, WIDTH)
        e = exponents.clamp(EXPONENT_FLOOR, NON_FINITE - 1)
        values = values * power_of_two(e + 2 - layout.bits)[:, None]
        values = values.masked_fill((exponents == NON_FINITE)[:, None], torch.nan)
        total += values.view(-1)
    return total[: layout.numel]
