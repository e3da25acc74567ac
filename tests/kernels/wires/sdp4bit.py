"""Comparing two wires of the same values: what tests of kernels measure."""

import torch

from taco_kernels.common.reference import unpack
from taco_kernels.sdp4bit.reference import GroupFormat
from tests.kernels.wires.taco import Difference, relative


def apart(a: torch.Tensor, b: torch.Tensor, format: GroupFormat, numel: int) -> Difference:
    """Compare wires uint8[rows, bytes] of rows of ``numel`` values; codes only of groups with a step."""
    groups, split = format.groups(numel), format.code_bytes(numel)
    codes, steps = [], []
    for wires in (a, b):
        plane = unpack([wires[:, :split]], (format.bits,)).view(len(wires), groups, -1)
        codes.append(plane.view(torch.int8).int() if format.bits == 8 else plane.int())
        steps.append(wires[:, split : split + 4 * groups].contiguous().view(torch.float32))
    distance = (codes[0] - codes[1]).abs()[~steps[0].isnan()]
    rest = split + 4 * groups
    return Difference(
        float((distance > 0).float().mean()) if distance.numel() else 0.0,
        int(distance.max()) if distance.numel() else 0,
        float(relative(*steps).max()),
        torch.equal(a[:, rest:], b[:, rest:]),
    )
