"""Comparing two wires of the same values: what tests of kernels measure."""

from typing import NamedTuple

import torch

from taco_kernels.common.reference import unpack
from taco_kernels.sdp4bit.reference import GroupFormat


class Difference(NamedTuple):
    """How far two wires are apart; groups whose steps are NaN in both count by their steps only."""

    codes: float
    """Share of codes that differ."""
    grid_steps: int
    """Largest difference of two codes."""
    steps: float
    """Largest relative difference of two steps; infinite where one is NaN and the other is not."""
    padding: bool
    """Whether the zeros at the ends are alike."""


def apart(a: torch.Tensor, b: torch.Tensor, format: GroupFormat, numel: int) -> Difference:
    """Compare wires uint8[rows, bytes] of rows of ``numel`` values."""
    groups, split = format.groups(numel), format.code_bytes(numel)
    codes, steps = [], []
    for wires in (a, b):
        plane = unpack([wires[:, :split]], (format.bits,)).view(len(wires), groups, -1)
        codes.append(plane.view(torch.int8).int() if format.bits == 8 else plane.int())
        steps.append(wires[:, split : split + 4 * groups].contiguous().view(torch.float32))
    nan = [step.isnan() for step in steps]
    distance = (codes[0] - codes[1]).abs()[~nan[0]]
    ratio = (steps[0] - steps[1]).abs() / steps[0].abs().clamp(min=1e-37)
    ratio = ratio.masked_fill(nan[0] & nan[1], 0.0).masked_fill(nan[0] != nan[1], torch.inf)
    rest = split + 4 * groups
    return Difference(
        float((distance > 0).float().mean()) if distance.numel() else 0.0,
        int(distance.max()) if distance.numel() else 0,
        float(ratio.max()),
        torch.equal(a[:, rest:], b[:, rest:]),
    )
