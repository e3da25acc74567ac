"""Launching the kernels: argument checks, tile sizes. Same signatures as reference.py."""

from functools import lru_cache

import torch

from taco_kernels.common.device import Device, Tuning, device_for
from taco_kernels.common.fast_launch import start
from taco_kernels.common.sizes import ALIGNMENT, ceil_div
from taco_kernels.sdp4bit import reference
from taco_kernels.sdp4bit.kernels import (
    add_kernel,
    difference_kernel,
    quantize_kernel,
    requantize_kernel,
    sum_kernel,
)
from taco_kernels.sdp4bit.layout import HADAMARD_POINTS, GroupFormat, check_rows, check_wires
from taco_kernels.sdp4bit.reference import new_wires
from taco_kernels.sdp4bit.spec import Tile, make_rotation, make_tile

TUNING = {  # a tile is a group at least; 0 programs a multiprocessor: one program a tile
    "quantize": Tuning(8192, 4, 4, 2),
    "quantize_difference": Tuning(4096, 4, 1, 0),
    "sum_dequantize": Tuning(2048, 2, 1, 0),
    "sum_requantize": Tuning(2048, 2, 1, 0),
    "add_dequantized": Tuning(8192, 8, 3, 2),
}
STAGES = {"quantize": 3, "add_dequantized": 2}
"""At most, where shared memory is small (Device.small), so that two programs fit; compiled, not timed."""
MOST_ROWS = 65535  # of a grid's second dimension


def tuning_for(operation: str, device: Device) -> Tuning:
    """TUNING within what the device has."""
    tuning = TUNING[operation]
    if device.small:
        tuning = tuning._replace(stages=min(tuning.stages, STAGES.get(operation, tuning.stages)))
    return tuning


@lru_cache
def _tiled(
    operation: str, format: GroupFormat, result: torch.dtype | GroupFormat, device: Device
) -> tuple[Tuning, Tile]:
    """How it is run, and its tiles of ``format``; ``result``: type of the values, or the new format."""
    tuning = tuning_for(operation, device)
    values, least = tuning.tile, format.group_size  # a tile is a group at least
    if operation == "quantize" and result == torch.float32 and format.hadamard:
        values //= 2  # fp32 is three bf16 operands of the rotation: half as many fit into the registers
    elif operation == "sum_dequantize":
        least = HADAMARD_POINTS
    elif isinstance(result, GroupFormat):
        least = result.group_size
    return tuning, make_tile(format, max(values, least), device.interpret)


def check_aligned(wires: torch.Tensor, name: str) -> None:
    """Raise ValueError unless kernels can read and write wires with 16-byte accesses."""
    if wires.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} begins at address {wires.data_ptr()}; it must be a multiple of {ALIGNMENT}")


def quantize(x: torch.Tensor, format: GroupFormat, out: torch.Tensor | None = None) -> torch.Tensor:
    """reference.quantize as one kernel."""
    check_rows(x, "x")
    x = x[(None,) * (3 - x.dim())]
    outer, inner, numel = x.shape
    rows = outer * inner
    if out is None:
        out = new_wires(rows, numel, format, x.device)
    check_wires(out, format, (rows,), numel)
    check_aligned(out, "out")
    if out.numel() == 0:
        return out
    device, groups = device_for(x), format.groups(numel)
    tuning, tile = _tiled("quantize", format, x.dtype, device)
    tiles = ceil_div(groups, tile.R.value) * rows
    start(
        quantize_kernel,
        device.grid(tiles, tuning),
        (x, out),
        (numel, groups, rows, inner, x.stride(0), x.stride(1), out.stride(0)),
        TAIL=numel % format.group_size != 0,
        STAGES=tuning.stages,
        C=tile,
        H=make_rotation(tile.R.value * format.group_size, device.interpret),
        **tuning.options,
    )
    return out


def quantize_difference(
    new: torch.Tensor, old: torch.Tensor, format: GroupFormat, out: torch.Tensor | None = None
) -> torch.Tensor:
    """reference.quantize_difference as one kernel; codes of the difference itself (no Hadamard)."""
    if format.hadamard:
        return reference.quantize_difference(new, old, format, out)
    if new.shape != old.shape or new.dim() != 1 or not (new.is_contiguous() and old.is_contiguous()):
        raise ValueError(f"new {list(new.shape)} and old {list(old.shape)} must be alike, flat, contiguous")
    numel = new.numel()
    if out is None:
        out = new_wires(1, numel, format, new.device)
    check_wires(out, format, (1,), numel)
    check_aligned(out, "out")
    if numel == 0:
        return out
    groups = format.groups(numel)
    tuning, tile = _tiled("quantize_difference", format, new.dtype, device_for(new))
    start(
        difference_kernel,
        (ceil_div(groups, tile.R.value),),
        (new, old, out),
        (numel, groups),
        TAIL=numel % format.group_size != 0,
        C=tile,
        **tuning.options,
    )
    return out


def sum_dequantize(
    wires: torch.Tensor, format: GroupFormat, out: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """reference.sum_dequantize as one kernel."""
    check_rows(out, "out")
    if out.dim() != 2:
        raise ValueError(f"out is {list(out.shape)}; it must be [rows, n]")
    (rows, numel), senders = out.shape, wires.shape[0]
    check_wires(wires, format, (senders, rows), numel)
    check_aligned(wires, "wires")
    if out.numel() == 0:
        return out
    tuning, blocks = _tiled("sum_dequantize", format, out.dtype, device_for(wires))
    for begin in range(0, rows, MOST_ROWS):
        part = out[begin : begin + MOST_ROWS]
        start(
            sum_kernel,
            (ceil_div(numel, blocks.N.value * HADAMARD_POINTS), len(part)),
            (wires[:, begin:] if begin else wires, part),
            (numel, format.groups(numel), float(scale), wires.stride(0), wires.stride(1), out.stride(0)),
            S=senders,
            TAIL=numel % HADAMARD_POINTS != 0,
            B=blocks,
            **tuning.options,
        )
    return out


def sum_requantize(
    wires: torch.Tensor, format: GroupFormat, numel: int, target: GroupFormat, out: torch.Tensor | None = None
) -> torch.Tensor:
    """reference.sum_requantize as one kernel."""
    if format.hadamard != target.hadamard:
        raise ValueError(f"{format} and {target} must both be rotated or both not")
    senders, rows = wires.shape[:2]
    check_wires(wires, format, (senders, rows), numel)
    check_aligned(wires, "wires")
    if out is None:
        out = new_wires(rows, numel, target, wires.device)
    check_wires(out, target, (rows,), numel)
    check_aligned(out, "out")
    if out.numel() == 0:
        return out
    device = device_for(wires)
    tuning, source = _tiled("sum_requantize", format, target, device)
    result = make_tile(target, source.N.value * HADAMARD_POINTS, device.interpret)
    for begin in range(0, rows, MOST_ROWS):
        part = out[begin : begin + MOST_ROWS]
        start(
            requantize_kernel,
            (ceil_div(target.groups(numel), result.R.value), len(part)),
            (wires[:, begin:] if begin else wires, part),
            (format.groups(numel), target.groups(numel), wires.stride(0), wires.stride(1), out.stride(0)),
            S=senders,
            B=source,
            D=result,
            **tuning.options,
        )
    return out


def add_dequantized(wires: torch.Tensor, format: GroupFormat, weights: torch.Tensor) -> torch.Tensor:
    """reference.add_dequantized as one kernel."""
    if format.hadamard:
        return reference.add_dequantized(wires, format, weights)
    check_rows(weights, "weights")
    if weights.dim() != 2:
        raise ValueError(f"weights is {list(weights.shape)}; it must be [rows, n]")
    rows, numel = weights.shape
    check_wires(wires, format, (rows,), numel)
    check_aligned(wires, "wires")
    if weights.numel() == 0:
        return weights
    device, groups = device_for(wires), format.groups(numel)
    tuning, tile = _tiled("add_dequantized", format, weights.dtype, device)
    start(
        add_kernel,
        device.grid(ceil_div(groups, tile.R.value) * rows, tuning),
        (wires, weights),
        (numel, groups, rows, wires.stride(0), weights.stride(0)),
        TAIL=numel % format.group_size != 0,
        STAGES=tuning.stages,
        C=tile,
        **tuning.options,
    )
    return weights
