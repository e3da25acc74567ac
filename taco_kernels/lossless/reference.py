"""The lossless layout in plain torch: what a row of bf16 or fp32 values is sent as when no bit may
change.

The upper 16 bits of a value are a sign, an exponent of 8 bits and 7 bits of mantissa (those of
bf16; fp32 has 16 more below). All but the exponent is sent as it is. Of the exponents of trained
tensors 2.6 bits in 8 are information, so each is a code of 3 bits: how far it lies below its
block's base, 0 to 6, or 7, an escape.

The base of a block (128 values) is the smaller of the largest exponents of its even and its odd
groups (8 values), so that one outlier does not decide it. Escapes share an area for the whole row,
in words of 32 bits of which each tile (2048 values) uses as many as it needs: 4 bits an escape, its
distance from the base being
-2, -1 or 7 to 19, or its exponent 0; in a tile with any other, 8 bits an escape, the exponent.

A payload (``Offsets``)::

    header | escapes | starts | bases | codes_low | codes_high | mantissas | lower_halves

    header        16 bytes: int32 words of escapes that the row needed, a byte with the overflow flag, zeros
    starts        an int32 a tile: its first word of escapes, and whether escapes take 8 bits
    bases         a byte a block
    codes         24 bits a group: the lower 16 bits of all groups, then the upper 8 bits of all
    mantissas     a byte a value, the sign above the mantissa; of four the first, third, second, fourth
    lower_halves  of fp32 alone: the lower 16 bits of each value, in order

A group's codes and escapes are those of its values 0, 4, 2, 6, 1, 5, 3, 7, which is the order that
the kernels meet them in (kernels.py draws it). With c0 to c7 for them::

    bit of a group's 24    0-2  3-5  6-7          8-10  11-13  14-15        16-18  19-21  22-23
    code                   c0   c1   c6, c7 ...   c2    c3     ... c6, c7   c4     c5     ... c6, c7

where c6 + 8 c7, 6 bits, is cut into three pairs, the lowest first. Distances are modulo 256. Values
beyond the row's end are zeros.

The area holds a share of the values' escapes, so a row may overflow. A flag in its header says so,
and so does that of the first row that was encoded with it. A payload with the flag decodes to
zeros: a caller who has not looked computes on with finite values, and the flag tells that they are
wrong.

A row for which the coded form would be longer is stored as it is, after the header, and never
overflows.
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
GROUP = 8
"""Values whose codes are packed together."""
BLOCK = 128
"""Values that share a base."""
TILE = 2048
"""Values whose escapes are of one width, and lie together."""
GROUPS = BLOCK // GROUP
"""Groups in a block."""

WINDOW = 7
"""Distances that have a code of their own, 0 to 6; and the code of an escape."""
# An escape's 4 bits: distances from -NEAR_BELOW on without those of the window, counted from 0; the
# last number stands for an exponent of 0, wherever the base lies.
NEAR_BELOW = 2
ZERO = 15

_SHIFTS = torch.tensor([0, 3, 8, 11, 16, 19])
"""Bits by which the codes c0 to c5 of a group are shifted; c6 and c7 are cut into pairs."""


class Sizes(NamedTuple):
    """How many there are of what a row consists of; a kernel argument."""

    numel: int
    """Values; not called that, which Triton's own tuples have as an attribute."""
    groups: int
    blocks: int
    escape_words: int
    """int32 words of the area of escapes."""


class Offsets(NamedTuple):
    """First byte of each part of a coded payload; a kernel argument. Escapes begin after the
    header."""

    starts: int
    """A tile's first word of escapes times 2, plus 1 where escapes take 8 bits."""
    bases: int
    codes_low: int
    """The lower 16 bits of the codes of each group."""
    codes_high: int
    """The upper 8 bits of those."""
    mantissas: int
    """Signs and mantissas."""
    lower_halves: int
    """The lower 16 bits of fp32."""


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
                f"lossless takes bf16 and fp32, not {self.dtype}: "
                "it sends 3 bits instead of an exponent of 8, and fp16's has 5"
            )
        # Kernels count a row in 32 bits, the last tile's padding included.
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
    def sizes(self) -> Sizes:
        """Values, groups, blocks, and words of escapes.

        The area of escapes has room for the share of the values, at 4 bits each, and for some words
        more, as tiles take whole ones.
        """
        for_share = math.ceil(self.share * self.blocks * BLOCK / 8)
        escape_words = aligned(for_share + self.tiles + 8, 4)
        return Sizes(self.numel, self.blocks * GROUPS, self.blocks, escape_words)

    @functools.cached_property
    def offsets(self) -> Offsets:
        """First bytes of the parts of the coded form; each is a multiple of 16."""
        starts = HEADER + 4 * self.sizes.escape_words
        bases = starts + aligned(4 * self.tiles)
        codes_low = bases + aligned(self.blocks)
        codes_high = codes_low + 2 * self.sizes.groups
        mantissas = codes_high + self.sizes.groups
        lower_halves = mantissas + self.blocks * BLOCK
        return Offsets(starts, bases, codes_low, codes_high, mantissas, lower_halves)

    @functools.cached_property
    def coded_bytes(self) -> int:
        """Bytes of the coded form, the header included."""
        end = self.offsets.lower_halves
        if self.dtype == torch.float32:
            end += 2 * self.blocks * BLOCK
        return end

    @functools.cached_property
    def raw_bytes(self) -> int:
        """Bytes of the row as it is, after a header."""
        return HEADER + aligned(self.dtype.itemsize * self.numel)

    @functools.cached_property
    def raw(self) -> bool:
        """True if the row is stored as it is, because that is shorter."""
        return self.coded_bytes >= self.raw_bytes

    @functools.cached_property
    def payload_bytes(self) -> int:
        """Bytes of a payload."""
        return min(self.coded_bytes, self.raw_bytes)


@functools.lru_cache(maxsize=1024)
def layout_of(numel: int, dtype: torch.dtype, share: float) -> LosslessLayout:
    """The layout of a row, made once.

    Args:
        numel: values of the row.
        dtype: bf16 or fp32.
        share: escapes that there is room for, of the row's values, in (0, 1].
    """
    return LosslessLayout(numel, dtype, share)


def encode(x: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """Payloads of ``x [rows, numel]`` of the layout's dtype: uint8 ``[rows, payload_bytes]``."""
    check_tensor("x", x, layout.dtype, (None, layout.numel))
    payloads = torch.zeros((len(x), layout.payload_bytes), dtype=torch.uint8, device=x.device)
    if layout.raw:
        # A copy: a row of one value may have any stride, and then has no view as bytes.
        values = x.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        payloads[:, HEADER : HEADER + values.shape[1]] = values
        return payloads
    for row, payload in zip(x, payloads, strict=True):
        _encode_row(row, payload, layout)
    needed = payloads[:, :4].view(torch.int32)[:, 0]
    payloads[:, FLAG_AT] = needed > layout.sizes.escape_words
    if len(x):
        payloads[0, FLAG_AT] = payloads[:, FLAG_AT].max()  # one look at the first row is enough
    return payloads


def decode(
    payloads: torch.Tensor, layout: LosslessLayout, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values of payloads, bit for bit; zeros where the flag is set.

    Args:
        payloads: uint8 ``[rows, payload_bytes]``.
        layout: of each row.
        out: ``[rows, numel]`` with contiguous rows; allocated if None.

    Returns:
        ``[rows, numel]`` of the layout's dtype; ``out`` if it was passed.
    """
    check_tensor("payloads", payloads, torch.uint8, (None, layout.payload_bytes))
    if layout.raw:
        values = payloads[:, HEADER : HEADER + layout.dtype.itemsize * layout.numel]
        values = values.clone(memory_format=torch.contiguous_format).view(layout.dtype)
    else:
        shape = (len(payloads), layout.numel)
        values = torch.zeros(shape, dtype=layout.dtype, device=payloads.device)
        for row, payload in zip(values, payloads, strict=True):
            if payload[FLAG_AT] == 0:
                row.copy_(_decode_row(payload, layout))
    return values if out is None else out.copy_(values)


def decode_sum(
    payloads: torch.Tensor,
    layout: LosslessLayout,
    dtype: torch.dtype,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale`` times the sum over the senders, added in fp32 in their order, then scaled, then
    rounded.

    Args:
        payloads: uint8 ``[S, rows, payload_bytes]`` of S senders.
        layout: of each row.
        dtype: of the result.
        scale: multiplied with the fp32 sum.
        out: ``[rows, numel]`` with contiguous rows; allocated if None.

    Returns:
        ``[rows, numel]`` of ``dtype``; ``out`` if it was passed.
    """
    total = decode(payloads[0], layout).float()
    for sender in payloads[1:]:
        total = total + decode(sender, layout).float()
    if scale != 1.0:
        total = total * scale
    return total.to(dtype) if out is None else out.copy_(total)


def _locate_escapes(
    codes: torch.Tensor, tiles: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the escapes among codes ``[groups, GROUP]``.

    Returns:
        Each escape's index among the codes; its tile; its number among the escapes of that tile.
    """
    index = (codes == WINDOW).view(-1).nonzero().view(-1)
    tile = index // TILE
    count = torch.bincount(tile, minlength=tiles)
    first = count.cumsum(0) - count
    number = torch.arange(len(index), device=codes.device) - first[tile]
    return index, tile, number


def _encode_row(row: torch.Tensor, payload: torch.Tensor, layout: LosslessLayout) -> None:
    """Fill a payload of zeros; of a row that overflows the first word alone, which is past the
    area."""
    offsets = layout.offsets
    is_bf16 = layout.dtype == torch.bfloat16
    bits = row.contiguous().view(torch.int16 if is_bf16 else torch.int32).int()
    bits = F.pad(bits, (0, layout.blocks * BLOCK - layout.numel))
    upper = (bits if is_bf16 else bits >> 16) & 0xFFFF
    exponent = (upper >> 7) & 0xFF
    # [blocks, pairs of groups, even or odd, values]: the largest of each kind, the smaller of the
    # two
    base = exponent.view(-1, GROUPS // 2, 2, GROUP).amax((1, 3)).amin(1)
    distance = (base.repeat_interleave(BLOCK) - exponent) & 255
    distance = _in_order_of_codes(distance)
    exponent = _in_order_of_codes(exponent)
    codes = distance.clamp(max=WINDOW).view(-1, GROUP)

    # Escapes: a tile in which an exponent, wherever it is needed, has no 4 bits takes 8 bits for
    # each.
    escape, tile, number = _locate_escapes(codes, layout.tiles)
    from_below = (distance + NEAR_BELOW) & 255
    near = torch.where(from_below < NEAR_BELOW, from_below, from_below - WINDOW)
    is_far = (near >= ZERO) & (exponent != 0)
    far_tiles = F.pad(is_far, (0, -len(is_far) % TILE)).view(-1, TILE).any(1).int()
    width = 4 * (1 + far_tiles)
    needed = (torch.bincount(tile, minlength=layout.tiles) * width + 31) // 32
    starts = needed.cumsum(0) - needed  # tiles in order; kernels allot words as programs come
    header = payload[:4].view(torch.int32)
    header[0] = needed.sum()
    if int(header) > layout.sizes.escape_words:
        return
    near = torch.where(exponent == 0, ZERO, near)
    value = torch.where(far_tiles[tile].bool(), exponent[escape], near[escape])
    bit = number * width[tile]
    words = torch.zeros(layout.sizes.escape_words, dtype=torch.int64, device=row.device)
    # Escapes share words but no bits, so adding is setting.
    words.index_add_(0, starts[tile] + bit // 32, value.long() << (bit % 32))
    area = payload[HEADER : offsets.starts].view(torch.int32)
    area.copy_(torch.where(words >= 2**31, words - 2**32, words))  # unsigned words, as int32
    _part(payload, offsets.starts, layout.tiles, torch.int32).copy_(2 * starts + far_tiles)
    payload[offsets.bases : offsets.bases + layout.blocks] = base.to(torch.uint8)

    # Codes: c6 + 8 c7 is cut into three pairs of bits, for bits 6, 14 and 22.
    last = codes[:, -2] | (codes[:, -1] << 3)
    word = (codes[:, :-2] << _SHIFTS.to(codes)).sum(1)
    word |= ((last & 3) << 6) | ((last & 12) << 12) | ((last & 48) << 18)
    _part(payload, offsets.codes_low, len(word), torch.int16).copy_(_signed16(word))
    payload[offsets.codes_high : offsets.mantissas] = (word >> 16).to(torch.uint8)

    mantissa = (((upper >> 8) & 0x80) | (upper & 0x7F)).to(torch.uint8)
    payload[offsets.mantissas : offsets.lower_halves] = _middle_swapped(mantissa)
    if not is_bf16:
        _part(payload, offsets.lower_halves, len(bits), torch.int16).copy_(_signed16(bits))


def codes_of(payload: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """Return int32[groups, GROUP]: the codes of a contiguous coded payload, 0 to 7, in their order."""
    offsets = layout.offsets
    word = _part(payload, offsets.codes_low, layout.sizes.groups, torch.int16).int() & 0xFFFF
    word |= payload[offsets.codes_high : offsets.mantissas].int() << 16
    last = ((word >> 6) & 3) | ((word >> 12) & 12) | ((word >> 18) & 48)
    codes = (word[:, None] >> _SHIFTS.to(word)) & 7
    return torch.cat((codes, last[:, None] & 7, last[:, None] >> 3), 1)


def _decode_row(payload: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """The row of a coded payload whose flag is not set."""
    payload = payload.contiguous()
    offsets = layout.offsets

    # Codes, then exponents; an escape's is put right below.
    codes = codes_of(payload, layout)
    base = payload[offsets.bases : offsets.bases + layout.blocks].int().repeat_interleave(BLOCK)
    exponent = base - codes.view(-1)

    escape, tile, number = _locate_escapes(codes, layout.tiles)
    starts = _part(payload, offsets.starts, layout.tiles, torch.int32)
    is_far = (starts & 1)[tile]
    width = 4 * (1 + is_far)
    bit = number * width
    words = payload[HEADER : offsets.starts].view(torch.int32).long() & 0xFFFFFFFF
    # A damaged payload may point anywhere.
    index = ((starts >> 1)[tile] + bit // 32).clamp(0, layout.sizes.escape_words - 1)
    value = ((words[index] >> (bit % 32)) & ((1 << width) - 1)).int()
    distance = torch.where(value < NEAR_BELOW, value - NEAR_BELOW, value + (WINDOW - NEAR_BELOW))
    near = torch.where(value == ZERO, 0, base[escape] - distance)
    exponent[escape] = torch.where(is_far.bool(), value, near)
    exponent = _in_order_of_codes(exponent)

    mantissa = _middle_swapped(payload[offsets.mantissas : offsets.lower_halves]).int()
    upper = ((mantissa & 0x80) << 8) | ((exponent & 0xFF) << 7) | (mantissa & 0x7F)
    upper = _signed16(upper)[: layout.numel]
    if layout.dtype == torch.bfloat16:
        return upper.to(torch.int16).view(torch.bfloat16)
    lower = _part(payload, offsets.lower_halves, layout.numel, torch.int16).int() & 0xFFFF
    return ((upper << 16) | lower).view(torch.float32)


def _signed16(x: torch.Tensor) -> torch.Tensor:
    """The lower 16 bits as the int16 that they are, in x's dtype."""
    return (x & 0xFFFF) - ((x & 0x8000) << 1)


def _in_order_of_codes(x: torch.Tensor) -> torch.Tensor:
    """Every eight values in the order 0, 4, 2, 6, 1, 5, 3, 7; its own inverse."""
    return x.view(-1, 2, 2, 2).permute(0, 3, 2, 1).reshape(-1)


def _middle_swapped(x: torch.Tensor) -> torch.Tensor:
    """Every four values in the order 0, 2, 1, 3: two words of two values make one word of four
    bytes."""
    return x.view(-1, 2, 2).transpose(1, 2).reshape(-1)


def _part(payload: torch.Tensor, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` integers of a payload, from byte ``offset`` on."""
    return payload[offset : offset + count * dtype.itemsize].view(dtype)
