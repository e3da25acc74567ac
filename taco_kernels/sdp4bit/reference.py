"""SDP4Bit's operations in plain torch: the definition that the kernels are tested against.

All arithmetic is fp32. A group of values v (or h = WHT(v / 32), blocks of 32) becomes

    step = max|h| / qmax, rounded up to 16 mantissa bits;    q = round(h * (1 / step))

An all-zero group has step 0; a group that is not finite has step NaN, and so decodes to NaN. The inverse
transform is WHT(q * step). It is linear, so sums of several senders' rows are taken before it, in the order
of the senders.
"""

import math

import torch

from taco_kernels.common.reference import hadamard, integer_values, pack, round_to_integers, unpack
from taco_kernels.sdp4bit.layout import FLOOR, HADAMARD_POINTS, GroupFormat, check_rows, check_wires


def rotate(x: torch.Tensor) -> torch.Tensor:
    """WHT of every 32 values of the last dimension, without normalisation."""
    return hadamard(x.reshape(*x.shape[:-1], -1, HADAMARD_POINTS)).view(x.shape)


def to_groups(x: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """fp32[rows, groups, G] of x[rows, n]: zero padded, rotated where the format asks for it."""
    numel = x.shape[-1]
    size = format.groups(numel) * format.group_size
    h = torch.nn.functional.pad(x.float(), (0, size - numel))
    if format.hadamard:
        h = rotate(h / HADAMARD_POINTS)
    return h.view(x.shape[0], -1, format.group_size)


def encode_groups(h: torch.Tensor, format: GroupFormat, out: torch.Tensor) -> torch.Tensor:
    """Wires of h fp32[rows, groups, G] into out uint8[rows, bytes]."""
    rows, groups, size = h.shape
    amax = h.abs().amax(dim=-1)
    bad, zero = ~torch.isfinite(h).all(dim=-1), amax == 0
    amax = amax.masked_fill(bad, 0.0).clamp(min=FLOOR)
    step = amax / amax.new_tensor(float(format.qmax))  # a tensor: torch divides by numbers with a reciprocal
    step = ((step.view(torch.int32) + 0xFF) & -0x100).view(torch.float32)
    inverse = step.reciprocal().masked_fill(bad, 0.0)
    codes = round_to_integers(h, inverse[..., None], format.bits).view(rows, groups * size)
    step = step.masked_fill(zero, 0.0).masked_fill(bad, math.nan)
    used = torch.cat([*pack(codes, (format.bits,)), step.view(rows, groups).view(torch.uint8)], dim=1)
    out[:, : used.shape[1]] = used
    out[:, used.shape[1] :] = 0
    return out


def decode_groups(wires: torch.Tensor, format: GroupFormat, numel: int) -> torch.Tensor:
    """q * step, fp32[rows, groups * G] in the codes' own domain, of wires uint8[rows, bytes]."""
    rows, groups, size = wires.shape[0], format.groups(numel), format.group_size
    split = format.code_bytes(numel)
    codes = unpack([wires[:, :split]], (format.bits,)).view(rows, groups, size)
    values = integer_values(codes, format.bits)
    step = wires[:, split : split + 4 * groups].contiguous().view(torch.float32)
    return (values * step[..., None]).view(rows, groups * size)


def sum_senders(wires: torch.Tensor, format: GroupFormat, numel: int) -> torch.Tensor:
    """Sum over S of uint8[S, rows, bytes], fp32[rows, groups * G] in the codes' own domain."""
    total = decode_groups(wires[0], format, numel)
    for sender in wires[1:]:
        total = total + decode_groups(sender, format, numel)
    return total


def new_wires(rows: int, numel: int, format: GroupFormat, device: torch.device) -> torch.Tensor:
    """uint8[rows, bytes], not initialised."""
    return torch.empty(rows, format.wire_bytes(numel), dtype=torch.uint8, device=device)


def quantize(x: torch.Tensor, format: GroupFormat, out: torch.Tensor | None = None) -> torch.Tensor:
    """Wires uint8[rows, bytes] of x[..., n] (bf16, fp16, fp32; rows contiguous, at most three dimensions)."""
    check_rows(x, "x")
    numel = x.shape[-1]
    flat = x.reshape(math.prod(x.shape[:-1]), numel)
    if out is None:
        out = new_wires(flat.shape[0], numel, format, x.device)
    check_wires(out, format, (flat.shape[0],), numel)
    return encode_groups(to_groups(flat, format), format, out) if out.numel() else out


def quantize_difference(
    new: torch.Tensor, old: torch.Tensor, format: GroupFormat, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Wires uint8[1, bytes] of ``new - old``, both [n]; the subtraction is in fp32."""
    return quantize(new.float()[None] - old.float()[None], format, out)


def sum_dequantize(
    wires: torch.Tensor, format: GroupFormat, out: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """``scale`` times the sum over S of wires uint8[S, rows, bytes], into out[rows, n], which is returned.

    Summed in fp32 in the order of S before the inverse transform, scaled after it.
    """
    check_rows(out, "out")
    check_wires(wires, format, (wires.shape[0], out.shape[0]), out.shape[-1])
    if out.numel() == 0:
        return out
    total = sum_senders(wires, format, out.shape[-1])
    if format.hadamard:
        total = rotate(total)
    return out.copy_(total[:, : out.shape[-1]] * scale)


def sum_requantize(
    wires: torch.Tensor, format: GroupFormat, numel: int, target: GroupFormat, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum over S of wires uint8[S, rows, bytes] of ``numel`` values, as wires of ``target``.

    Both formats are rotated, or neither: the sum does not leave the domain of the codes.

    Returns:
        uint8[rows, bytes of target].
    """
    if format.hadamard != target.hadamard:
        raise ValueError(f"{format} and {target} must both be rotated or both not")
    rows = wires.shape[1]
    check_wires(wires, format, (wires.shape[0], rows), numel)
    if out is None:
        out = new_wires(rows, numel, target, wires.device)
    check_wires(out, target, (rows,), numel)
    if out.numel() == 0:
        return out
    total = sum_senders(wires, format, numel)
    size = target.groups(numel) * target.group_size
    if size <= total.shape[1]:  # what is beyond the row's end is zero, or not finite like its group
        total = total[:, :size]
    else:
        total = torch.nn.functional.pad(total, (0, size - total.shape[1]))
    return encode_groups(total.reshape(rows, -1, target.group_size), target, out)


def add_dequantized(wires: torch.Tensor, format: GroupFormat, weights: torch.Tensor) -> torch.Tensor:
    """Add wires uint8[rows, bytes] to weights[rows, n] in place: fp32 sum, rounded to the weights' type."""
    check_rows(weights, "weights")
    check_wires(wires, format, (weights.shape[0],), weights.shape[-1])
    if weights.numel() == 0:
        return weights
    change = decode_groups(wires, format, weights.shape[-1])
    if format.hadamard:
        change = rotate(change)
    return weights.copy_(weights.float() + change[:, : weights.shape[-1]])
