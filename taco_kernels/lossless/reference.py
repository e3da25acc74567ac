"""The lossless layout in plain torch: what the kernels are checked against, and what runs on CPU tensors."""

import torch
import torch.nn.functional as F

from taco_kernels.lossless.layout import (
    BLOCK,
    FLAG_AT,
    GROUP,
    HEADER,
    NEAR_BELOW,
    TILE,
    WINDOW,
    ZERO,
    LosslessLayout,
)

_GROUPS = BLOCK // GROUP
_SHIFTS = torch.tensor([0, 3, 8, 11, 16, 19])  # of codes but the last two of a group


def encode(x: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """Payloads of ``x [rows, numel]`` of the layout's dtype: uint8 ``[rows, payload_bytes]``."""
    layout.check_values(x)
    payloads = torch.zeros((len(x), layout.payload_bytes), dtype=torch.uint8, device=x.device)
    if layout.raw:
        return store_raw(x, payloads)
    for row, payload in zip(x, payloads, strict=True):
        _encode_row(row, payload, layout)
    payloads[:, FLAG_AT] = payloads[:, :4].view(torch.int32)[:, 0] > layout.words
    payloads[:1, FLAG_AT] = payloads[:, FLAG_AT].max() if len(x) else 0
    return payloads


def decode(payloads: torch.Tensor, layout: LosslessLayout, out: torch.Tensor | None = None) -> torch.Tensor:
    """The values of payloads uint8 ``[rows, payload_bytes]``, bit for bit: ``[rows, numel]`` of the layout's
    dtype, in ``out`` if given. Zeros where the flag is set."""
    layout.check_payloads(payloads)
    if layout.raw:
        values = raw_values(payloads, layout)
    else:
        rows = [
            payload.new_zeros(layout.numel, dtype=layout.dtype) if flag else _decode_row(payload, layout)
            for payload, flag in zip(payloads, payloads[:, FLAG_AT].tolist(), strict=True)
        ]
        values = torch.stack(rows) if rows else payloads.new_empty((0, layout.numel), dtype=layout.dtype)
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


def store_raw(x: torch.Tensor, payloads: torch.Tensor) -> torch.Tensor:
    """``payloads``, of zeros, with rows as they are after the header."""
    values = x.contiguous().view(torch.uint8)
    payloads[:, HEADER : HEADER + values.shape[1]] = values
    return payloads


def raw_values(payloads: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """``[..., numel]`` of what ``store_raw`` made, a copy."""
    size = layout.itemsize * layout.numel
    return (
        payloads[..., HEADER : HEADER + size].clone(memory_format=torch.contiguous_format).view(layout.dtype)
    )


def _escape_places(codes: torch.Tensor, tiles: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of codes ``[groups, GROUP]``: where the escapes are; each one's tile; its number there."""
    where = (codes == WINDOW).view(-1).nonzero().view(-1)
    tile = where // TILE
    count = torch.bincount(tile, minlength=tiles)
    first = count.cumsum(0) - count
    return where, tile, torch.arange(len(where), device=codes.device) - first[tile]


def _encode_row(row: torch.Tensor, payload: torch.Tensor, layout: LosslessLayout) -> None:
    """Fill a payload of zeros; of a row that overflows the first word alone, which is past the area."""
    bits = row.contiguous().view(torch.int16 if layout.itemsize == 2 else torch.int32).int()
    pad = layout.blocks * BLOCK - layout.numel
    bits = F.pad(bits, (0, pad))
    upper = (bits if layout.itemsize == 2 else bits >> 16) & 0xFFFF
    exponent = (upper >> 7) & 0xFF
    base = exponent.view(-1, _GROUPS // 2, 2, GROUP).amax((1, 3)).amin(1)
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
    area = payload[HEADER : layout.starts_at].view(torch.int32)
    area.copy_(torch.where(words >= 2**31, words - 2**32, words))
    _part(payload, layout.starts_at, layout.tiles, torch.int32).copy_(2 * starts + far_tiles)
    payload[layout.bases_at : layout.bases_at + layout.blocks] = base.to(torch.uint8)
    last = codes[:, -2] | (codes[:, -1] << 3)
    word = (codes[:, :-2] << _SHIFTS.to(codes)).sum(1)
    word |= ((last & 3) << 6) | ((last & 12) << 12) | ((last & 48) << 18)
    _part(payload, layout.codes_at, len(word), torch.int16).copy_((word & 0xFFFF) - ((word & 0x8000) << 1))
    payload[layout.more_at : layout.high_at] = (word >> 16).to(torch.uint8)
    high = (((upper >> 8) & 0x80) | (upper & 0x7F)).to(torch.uint8)
    payload[layout.high_at : layout.low_at] = _middle_swapped(high)
    if layout.itemsize == 4:
        low = (bits & 0xFFFF) - ((bits & 0x8000) << 1)
        _part(payload, layout.low_at, len(low), torch.int16).copy_(low)


def _decode_row(payload: torch.Tensor, layout: LosslessLayout) -> torch.Tensor:
    """The row of a coded payload."""
    payload = payload.contiguous()
    groups = layout.blocks * _GROUPS
    word = _part(payload, layout.codes_at, groups, torch.int16).int() & 0xFFFF
    word |= payload[layout.more_at : layout.high_at].int() << 16
    last = ((word >> 6) & 3) | ((word >> 12) & 12) | ((word >> 18) & 48)
    codes = (word[:, None] >> _SHIFTS.to(word)) & 7
    codes = torch.cat((codes, last[:, None] & 7, last[:, None] >> 3), 1)
    base = payload[layout.bases_at : layout.bases_at + layout.blocks].int().repeat_interleave(BLOCK)
    escaped, tile, number = _escape_places(codes, layout.tiles)
    starts = _part(payload, layout.starts_at, layout.tiles, torch.int32)
    far = (starts & 1)[tile]
    width = 4 * (1 + far)
    place = number * width
    words = payload[HEADER : layout.starts_at].view(torch.int32).long() & 0xFFFFFFFF
    at = ((starts >> 1)[tile] + place // 32).clamp(0, layout.words - 1)
    value = ((words[at] >> (place % 32)) & ((1 << width) - 1)).int()
    near = torch.where(value < NEAR_BELOW, value - NEAR_BELOW, value + (WINDOW - NEAR_BELOW))
    exponent = base - codes.view(-1)
    near = torch.where(value == ZERO, 0, base[escaped] - near)
    exponent[escaped] = torch.where(far.bool(), value, near)
    exponent = _in_order_of_values(exponent)
    high = _middle_swapped(payload[layout.high_at : layout.low_at]).int()
    upper = ((high & 0x80) << 8) | ((exponent & 0xFF) << 7) | (high & 0x7F)
    signed = (upper - ((upper & 0x8000) << 1))[: layout.numel]
    if layout.itemsize == 2:
        return signed.to(torch.int16).view(torch.bfloat16)
    low = _part(payload, layout.low_at, layout.numel, torch.int16).int() & 0xFFFF
    return ((signed << 16) | low).view(torch.float32)


def _in_order_of_codes(x: torch.Tensor) -> torch.Tensor:
    """Of every eight values the 1st, 5th, 3rd, 7th, 2nd, 6th, 4th, 8th."""
    return x.view(-1, 2, 2, 2).permute(0, 3, 2, 1).reshape(-1)


_in_order_of_values = _in_order_of_codes
"""The inverse."""


def _middle_swapped(high: torch.Tensor) -> torch.Tensor:
    """The second and third of every four bytes in each other's places: two words of two values make one."""
    return high.view(-1, 2, 2).transpose(1, 2).reshape(-1)


def _part(payload: torch.Tensor, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` integers of a payload, from byte ``at`` on."""
    return payload[at : at + count * dtype.itemsize].view(dtype)
