"""How near two wires of TACO's codecs are to the same bits, and where they may be apart.

Codes and bf16 steps of kernels have the definition's bits, where a group is not transformed or its transform
is exact in fp32. The other differences are those of a sum's order: of a transform, and of the squares under
alpha's root.
"""

from typing import NamedTuple

import torch

from taco_kernels.common.reference import hadamard
from taco_kernels.taco import CodecConfig, reference
from tests.kernels.wires.taco import largest, parts

UNIT = 2.0**-24
"""fp32's rounding of a number near 1."""


class Bits(NamedTuple):
    """How far two wires are from equal."""

    codes: int
    """Codes that differ, in groups whose steps are equal."""
    steps: int
    """Groups whose bf16 steps differ; one whose steps are no neighbours counts ten thousand times."""
    scale_ulps: int
    """Units in the last place between two scales in fp32."""
    grid_steps: int
    """Most neighbours between two codes."""
    tie_distance: float
    """Largest distance from a tie of a value whose codes differ, in UNIT of its group's largest value."""


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return how many fp32 numbers lie between two tensors' positive numbers, 0 where both are NaN."""
    distance = (a.view(torch.int32) - b.view(torch.int32)).abs()
    return distance.masked_fill(a.isnan() & b.isnan(), 0)


def scaled(x: torch.Tensor, steps: torch.Tensor, config: CodecConfig) -> torch.Tensor:
    """Return fp64[groups, G]: what is rounded to codes, transformed and divided exactly.

    Args:
        x: [groups, G], the values.
        steps: fp32[groups], bf16 steps as they are sent; of dual scales not looked at.
        config: of the codec.
    """
    exact = x.double()
    if config.hadamard:
        exact = hadamard(exact / config.group_size)
    if config.scales == "dual":
        return exact * (config.qmax / exact.abs().amax(1, keepdim=True))
    return exact / steps.double()[:, None]


def compare(
    x: torch.Tensor, wire: torch.Tensor, expected: torch.Tensor, config: CodecConfig
) -> Bits:
    """Compare two wires uint8[bytes], of whole groups and without lists of outliers.

    Args:
        x: [groups, G], what both encode.
        wire: the kernel's.
        expected: the definition's.
        config: of both.
    """
    result = parts(wire, config)
    definition = parts(expected, config)
    assert torch.equal(result.padding, definition.padding)
    groups = len(result.codes)
    scale_ulps = steps = 0
    is_equal = torch.ones(groups, dtype=torch.bool)
    if config.scales == "dual":
        scale_ulps = int(largest(ulps(result.scales, definition.scales)))
    else:
        # bf16 numbers in fp32: neighbours are 2^16 apart.
        apart = ulps(result.scales.abs(), definition.scales.abs()) >> 16
        is_equal = apart == 0
        steps = int(torch.where(apart > 1, 10_000, apart).sum())
    is_equal &= ~definition.scales[:groups].isnan()

    differs = (result.codes != definition.codes) & is_equal[:, None]
    values = scaled(x, definition.scales[:groups], config)[differs]
    result_values = reference.code_values(result.codes[differs], config).double()
    definition_values = reference.code_values(definition.codes[differs], config).double()
    tie = (result_values + definition_values) / 2
    points = grid(config)
    tie_distance = largest((values - tie).abs()) / float(points.abs().max()) / UNIT
    result_position = torch.searchsorted(points, result_values)
    definition_position = torch.searchsorted(points, definition_values)
    grid_steps = int(largest((result_position - definition_position).abs()))
    return Bits(int(differs.sum()), steps, scale_ulps, grid_steps, tie_distance)


def grid(config: CodecConfig) -> torch.Tensor:
    """Return fp64: what a group's codes stand for, ascending, each value once; in steps."""
    count = 256 if config.is_float else 2**config.bits
    codes = torch.arange(count).to(torch.uint8)
    values = reference.code_values(codes, config).double()
    return values[values.isfinite()].unique()
