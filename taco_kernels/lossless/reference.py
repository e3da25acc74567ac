"""The lossless layout in plain torch: what a row of bf16 or fp32 values is sent as when no bit may change.

The upper 16 bits of a value are a sign, an exponent of 8 bits and 7 bits of mantissa (those of bf16; fp32 has
16 more below). All but the exponent is sent as it is. Of the exponents of trained tensors 2.6 bits in 8 are
information, so each is a code of 3 bits: how far it lies below its block's base, 0 to 6, or 7, an escape.
The base of a block (128 values) is the smaller of the largest exponents of its even and its odd groups (8
values), so that one outlier does not decide it. Escapes share an area for the whole row, in words of 32 bits
of which each tile (2048 values) uses as many as it needs: 4 bits an escape, its distance from the base being
-2, -1 or 7 to 19, or its exponent 0; in a tile with any other, 8 bits an escape, the exponent. ::

    header | escapes | starts, an int32 a tile | bases, a byte a block | codes, 24 bits a group: all int16,
    then all uint8 | sign and mantissa, a byte a value, of four the first, third, second, fourth | fp32: the
    lower 16 bits

A group's codes and escapes are those of its values 0, 4, 2, 6, 1, 5, 3, 7. Six codes are the lower 6 bits of
three bytes, in pairs; the upper 2 bits of the three are the last two codes. Distances are modulo 256.
Values beyond the row's end are zeros.

The area holds a share of the values' escapes, so a row may overflow. A flag in its header says so, and so
does that of the first row that was encoded with it. A payload with the flag decodes to zeros: a caller who
has not looked computes on with finite values, and the flag tells that they are wrong.

A row for which the coded form would be longer is stored as it is, after the header, and never overflows.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from taco_kernels.common import aligned, ceil_div, check_tensor

HEADER = 16
"""Bytes: int32 words of escapes that the row needed, the overflow flag, zeros."""
FLAG_AT = 4
"""Byte of the overflow flag, 0 or 1."""
GROUP, BLOCK, TILE = 8, 128, 2048
WINDOW = 7
"""Distances that have a code of their own; the code of an escape."""
NEAR_BELOW, NEAR_ABOVE, ZERO = 2, 19, 15
"""Distances from -2 and to 19, without those of the window, are 4 bits from 0 on; so is an exponent of 0."""
GROUPS = BLOCK // GROUP
"""Of a block."""
_SHIFTS = torch.tensor([0, 3, 8, 11, 16, 19])  # of codes but the last two of a group


class Places(NamedTuple):
    """First byte of each part of a coded payload, and its end."""

    starts: int
    """A tile's first word of escapes times 2, plus 1 where escapes take 8 bits."""
    bases: int
    codes: int
    """The lower 16 bits of the codes of each group."""
    more: int
    """The upper 8 bits of those."""
    high: int
    """Signs and mantissas."""
    low: int
    """The lower 16 bits of fp32."""
    end: int


@dataclass(frozen=True)
class LosslessLayout:
    """Bytes of a row of ``numel`` values. Validated on construction (ValueError)."""

    numel: int
    dtype: torch.dtype
    share: float = 0.07
    """Escapes that the area holds, of the row's values, in (0, 1]."""

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"lossless takes bf16 and fp32, not {self.dtype}: of fp16's 5 bits of exponent 3 would stay"
            )
        if not 1 <= self.numel < 2**31 - TILE:
            raise ValueError(f"numel={self.numel} must lie in [1, 2^31 - {TILE})")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} must lie in (0, 1]")

    @property
    def blocks(self) -> int:
        """Blocks, the last one padded."""
        return ceil_div(self.numel, BLOCK)

    @property
    def tiles(self) -> int:
        """Tiles, the last one perhaps of fewer blocks."""
        return ceil_div(self.blocks, TILE // BLOCK)

    @functools.cached_property
    def words(self) -> int:
        """int32 words of the area of escapes: the share's, and some because tiles take whole ones."""
        return aligned(math.ceil(self.share * self.blocks * BLOCK / 8) + self.tiles + 8, 4)

    @functools.cached_property
    def places(self) -> Places:
        """Where the parts of the coded form lie."""
        sizes = [4 * self.words, aligned(4 * self.tiles), aligned(self.blocks)]
        sizes += [2 * self.blocks * GROUPS, self.blocks * GROUPS, self.blocks * BLOCK]
        sizes += [2 * self.blocks * BLOCK if self.dtype == torch.float32 else 0]
        return Places(*(HEADER + sum(sizes[: i + 1]) for i in range(len(sizes))))

    @functools.cached_property
    def raw(self) -> bool:
        """Whether the row is stored as it is."""
        return self.places.end >= HEADER + aligned(self.dtype.itemsize * self.numel)

    @functools.cached_property
    def payload_bytes(self) -> int:
        """Bytes of a payload."""
        return HEADER + aligned(self.dtype.itemsize * self.numel) if self.raw else self.places.end


@functools.lru_cache(maxsize=1024)
def layout_of(numel: int, dtype: torch.dtype, share: float) -> LosslessLayout:
    """The layout of a row, made once."""
    return LosslessLayout(numel, dtype, share)


def encode(x: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """Payloads of ``x [rows, numel]`` of the layout's dtype: uint8 ``[rows, payload_bytes]``."""
    check_tensor("x", x, layout.dtype, (None, layout.numel))
    payloads = torch.zeros((len(x), layout.payload_bytes), dtype=torch.uint8, device=x.device)
    if layout.raw:
        values = x.contiguous().view(torch.uint8)
        payloads[:, HEADER : HEADER + values.shape[1]] = values
        return payloads
    for row, payload in zip(x, payloads, strict=True):
        _encode_row(row, payload, layout)
    payloads[:, FLAG_AT] = payloads[:, :4].view(torch.int32)[:, 0] > layout.words
    payloads[:1, FLAG_AT] = payloads[:, FLAG_AT].max() if len(x) else 0
    return payloads


def decode(
    payloads: torch.Tensor, layout: LosslessLayout, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values of payloads uint8 ``[rows, payload_bytes]``, bit for bit: ``[rows, numel]`` of the layout's
    dtype, in ``out`` (with contiguous rows) if given. Zeros where the flag is set."""
    check_tensor("payloads", payloads, torch.uint8, (None, layout.payload_bytes))
    if layout.raw:
        values = payloads[:, HEADER : HEADER + layout.dtype.itemsize * layout.numel]
        values = values.clone(memory_format=torch.contiguous_format).view(layout.dtype)
    else:
        rows = [
            payload.new_zeros(layout.numel, dtype=layout.dtype)
            if flag
            else _decode_row(payload, layout)
            for payload, flag in zip(payloads, payloads[:, FLAG_AT].tolist(), strict=True)
        ]
        values = (
            torch.stack(rows) if rows else payloads.new_empty((0, layout.numel), dtype=layout.dtype)
        )
    return values if out is None else out.copy_(values)


def decode_sum(
    payloads: torch.Tensor,
    layout: LosslessLayout,
    dtype: torch.dtype,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale`` times the sum over S of payloads uint8 ``[S, rows, bytes]``: ``[rows, numel]`` of ``dtype``.

    Summed in fp32 in the order of S, then scaled, then rounded.
    """
    total = decode(payloads[0], layout).float()
    for sender in payloads[1:]:
        total = total + decode(sender, layout).float()
    if scale != 1.0:
        total = total * scale
    return total.to(dtype) if out is None else out.copy_(total)


def _escape_places(
    codes: torch.Tensor, tiles: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of codes ``[groups, GROUP]``: where the escapes are; each one's tile; its number there."""
    where = (codes == WINDOW).view(-1).nonzero().view(-1)
    tile = where // TILE
    count = torch.bincount(tile, minlength=tiles)
    first = count.cumsum(0) - count
    return where, tile, torch.arange(len(where), device=codes.device) - first[tile]


def _encode_row(row: torch.Tensor, payload: torch.Tensor, layout: LosslessLayout) -> None:
    """Fill a payload of zeros; of a row that overflows the first word alone, which is past the area."""
    places = layout.places
    bits = (
        row.contiguous().view(torch.int16 if layout.dtype == torch.bfloat16 else torch.int32).int()
    )
    pad = layout.blocks * BLOCK - layout.numel
    bits = F.pad(bits, (0, pad))
    upper = (bits if layout.dtype == torch.bfloat16 else bits >> 16) & 0xFFFF
    exponent = (upper >> 7) & 0xFF
    base = exponent.view(-1, GROUPS // 2, 2, GROUP).amax((1, 3)).amin(1)
    distance = (base.repeat_interleave(BLOCK) - exponent) & 255
    distance, exponent = _in_order_of_codes(distance), _in_order_of_codes(exponent)
    codes = distance.clamp(max=WINDOW).view(-1, GROUP)

    escaped, tile, number = _escape_places(codes, layout.tiles)
    from_below = (distance + NEAR_BELOW) & 255
    near = torch.where(from_below < NEAR_BELOW, from_below, from_below - WINDOW)
    far = (near >= ZERO) & (exponent != 0)
    far_tiles = F.pad(far, (0, -len(far) % TILE)).view(-1, TILE).any(1).int()
    width = 4 * (1 + far_tiles)
    needed = (torch.bincount(tile, minlength=layout.tiles) * width + 31) // 32
    starts = needed.cumsum(0) - needed
    header = payload[:4].view(torch.int32)
    header[0] = needed.sum()
    if int(header) > layout.words:
        return
    near = torch.where(exponent == 0, ZERO, near)
    value = torch.where(far_tiles[tile].bool(), exponent[escaped], near[escaped])
    place = number * width[tile]
    words = torch.zeros(layout.words, dtype=torch.int64, device=row.device)
    words.index_add_(0, starts[tile] + place // 32, value.long() << (place % 32))
    area = payload[HEADER : places.starts].view(torch.int32)
    area.copy_(torch.where(words >= 2**31, words - 2**32, words))
    _part(payload, places.starts, layout.tiles, torch.int32).copy_(2 * starts + far_tiles)
    payload[places.bases : places.bases + layout.blocks] = base.to(torch.uint8)
    last = codes[:, -2] | (codes[:, -1] << 3)
    word = (codes[:, :-2] << _SHIFTS.to(codes)).sum(1)
    word |= ((last & 3) << 6) | ((last & 12) << 12) | ((last & 48) << 18)
    _part(payload, places.codes, len(word), torch.int16).copy_(
        (word & 0xFFFF) - ((word & 0x8000) << 1)
    )
    payload[places.more : places.high] = (word >> 16).to(torch.uint8)
    high = (((upper >> 8) & 0x80) | (upper & 0x7F)).to(torch.uint8)
    payload[places.high : places.low] = _middle_swapped(high)
    if layout.dtype == torch.float32:
        low = (bits & 0xFFFF) - ((bits & 0x8000) << 1)
        _part(payload, places.low, len(low), torch.int16).copy_(low)


def _decode_row(payload: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """The row of a coded payload."""
    payload, places = payload.contiguous(), layout.places
    groups = layout.blocks * GROUPS
    word = _part(payload, places.codes, groups, torch.int16).int() & 0xFFFF
    word |= payload[places.more : places.high].int() << 16
    last = ((word >> 6) & 3) | ((word >> 12) & 12) | ((word >> 18) & 48)
    codes = (word[:, None] >> _SHIFTS.to(word)) & 7
    codes = torch.cat((codes, last[:, None] & 7, last[:, None] >> 3), 1)
    base = payload[places.bases : places.bases + layout.blocks].int().repeat_interleave(BLOCK)
    escaped, tile, number = _escape_places(codes, layout.tiles)
    starts = _part(payload, places.starts, layout.tiles, torch.int32)
    far = (starts & 1)[tile]
    width = 4 * (1 + far)
    place = number * width
    words = payload[HEADER : places.starts].view(torch.int32).long() & 0xFFFFFFFF
    at = ((starts >> 1)[tile] + place // 32).clamp(0, layout.words - 1)
    value = ((words[at] >> (place % 32)) & ((1 << width) - 1)).int()
    near = torch.where(value < NEAR_BELOW, value - NEAR_BELOW, value + (WINDOW - NEAR_BELOW))
    exponent = base - codes.view(-1)
    near = torch.where(value == ZERO, 0, base[escaped] - near)
    exponent[escaped] = torch.where(far.bool(), value, near)
    exponent = _in_order_of_codes(exponent)
    high = _middle_swapped(payload[places.high : places.low]).int()
    upper = ((high & 0x80) << 8) | ((exponent & 0xFF) << 7) | (high & 0x7F)
    signed = (upper - ((upper & 0x8000) << 1))[: layout.numel]
    if layout.dtype == torch.bfloat16:
        return signed.to(torch.int16).view(torch.bfloat16)
    low = _part(payload, places.low, layout.numel, torch.int16).int() & 0xFFFF
    return ((signed << 16) | low).view(torch.float32)


def _in_order_of_codes(x: torch.Tensor) -> torch.Tensor:
    """Of every eight values the 1st, 5th, 3rd, 7th, 2nd, 6th, 4th, 8th; its own inverse."""
    return x.view(-1, 2, 2, 2).permute(0, 3, 2, 1).reshape(-1)


def _middle_swapped(high: torch.Tensor) -> torch.Tensor:
    """The second and third of every four bytes in each other's places: two words of two values make one."""
    return high.view(-1, 2, 2).transpose(1, 2).reshape(-1)


def _part(payload: torch.Tensor, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` integers of a payload, from byte ``at`` on."""
    return payload[at : at + count * dtype.itemsize].view(dtype)
