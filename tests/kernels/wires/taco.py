"""Comparing two wires of the same tensor, and sums by kernels with the reference's."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from taco_kernels.common.reference import integer_values, unpack
from taco_kernels.taco import reference
from taco_kernels.taco.layout import CodecConfig


class Difference(NamedTuple):
    """How far two wires are apart."""

    codes: float
    """Share of codes that differ."""
    grid_steps: int
    """Largest distance of two codes, counted in neighbours on the format's grid."""
    scales: float
    """Largest relative difference of two scales; infinite where one is NaN and the other is not."""
    padding: bool
    """Whether the zeros at the ends are equal."""


class Parts(NamedTuple):
    """What a wire consists of."""

    codes: torch.Tensor
    """uint8[groups, G]."""
    scales: torch.Tensor
    """fp32: one a group; of dual scales all first ones, then all second ones."""
    padding: torch.Tensor
    """uint8, the bytes after the scales."""


def relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Relative differences of scales, which may both be NaN."""
    ratio = (a - b).abs() / a.abs().clamp(min=1e-37)
    ratio = ratio.masked_fill(a.isnan() & b.isnan(), 0.0)
    return ratio.masked_fill(a.isnan() != b.isnan(), torch.inf)


def largest(x: torch.Tensor) -> float:
    """The largest element, 0 of none."""
    return float(x.max()) if x.numel() else 0.0


def ranks(codes: torch.Tensor, config: CodecConfig) -> torch.Tensor:
    """int32 numbers of codes along the grid: neighbours differ by one."""
    if config.is_float:
        codes = codes.int()
        return torch.where(codes >= 128, 128 - codes, codes)
    return integer_values(codes, config.bits).int()


def parts(wire: torch.Tensor, config: CodecConfig) -> Parts:
    """The parts of one wire that holds ``wire.numel()`` bytes."""
    groups = wire.numel() // config.bytes_per_group()
    scale_bytes = 8 if config.scales == "dual" else 2
    scale_dtype = torch.float32 if config.scales == "dual" else torch.bfloat16
    widths = [groups * config.group_size * bits // 8 for bits in config.planes]
    padding_bytes = wire.numel() % config.bytes_per_group()
    *planes, scales, padding = wire.split([*widths, groups * scale_bytes, padding_bytes])
    codes = unpack([plane.reshape(groups, -1) for plane in planes], config.planes)
    return Parts(codes, scales.clone().view(scale_dtype).float(), padding)


def code_distances(a: torch.Tensor, b: torch.Tensor, config: CodecConfig) -> torch.Tensor:
    """Return how many neighbours on the grid codes are apart, int32.

    Values nearer than fp32's rounding of a transform, 1e-6 of the largest, count as one grid step
    apart: e5m2 has many codes in there.

    Args:
        a: codes.
        b: codes of the same shape.
        config: of both.
    """
    distance = (ranks(a, config) - ranks(b, config)).abs()
    values_apart = (reference.code_values(a, config) - reference.code_values(b, config)).abs()
    return torch.where(values_apart < 1e-6 * config.qmax, distance.clamp(max=1), distance)


def difference(a: torch.Tensor, b: torch.Tensor, config: CodecConfig) -> Difference:
    """Compare wires uint8[chunks, bytes]; codes only of groups whose scales are not NaN."""
    if a.shape[1] < config.bytes_per_group():  # of no values
        return Difference(0.0, 0, 0.0, torch.equal(a, b))
    distances = []
    scales = []
    padding = True
    for wire_a, wire_b in zip(a, b, strict=True):
        parts_a = parts(wire_a, config)
        parts_b = parts(wire_b, config)
        coded = ~parts_a.scales.isnan()[: len(parts_a.codes)]
        codes_a = parts_a.codes[coded]
        codes_b = parts_b.codes[coded]
        distances.append(code_distances(codes_a, codes_b, config).flatten())
        scales.append(relative(parts_a.scales, parts_b.scales))
        padding = padding and torch.equal(parts_a.padding, parts_b.padding)
    distance = torch.cat(distances)
    share = int((distance > 0).sum()) / max(distance.numel(), 1)
    return Difference(share, int(largest(distance)), largest(torch.cat(scales)), padding)


def assert_alike(
    a: torch.Tensor, b: torch.Tensor, config: CodecConfig, codes: float, scales: float = 1e-6
) -> None:
    """Two wires are the same but for some codes, which are neighbours, and the rounding of scales.

    A sum in another order moves a value that lies that near to the middle between two codes.

    Args:
        a: uint8[chunks, bytes].
        b: uint8[chunks, bytes].
        config: of both.
        codes: share of codes that may differ.
        scales: relative difference of dual scales; others may differ by bf16's rounding.
    """
    apart = difference(a, b, config)
    assert apart.grid_steps <= 1 and apart.padding, (config, apart)
    assert apart.codes <= codes, (config, apart, codes)
    if config.scales != "dual":
        scales = 2**-7
    assert apart.scales <= scales, (config, apart)


def check_sums(
    kernels,
    wires: torch.Tensor,
    shape: tuple,
    config: CodecConfig,
    agree: Callable[[torch.Tensor, torch.Tensor, CodecConfig], None],
    into: Sequence[CodecConfig],
    decoded: bool = True,
) -> None:
    """Compare ``decode_sum_encode`` and ``decode_sum``, of all senders and of two.

    Args:
        kernels: module with both functions.
        wires: uint8[senders, bytes].
        shape: of each sender's tensor.
        config: of the wires.
        agree: asserts that two wires of a config agree.
        into: configs to encode sums with.
        decoded: compare ``decode_sum`` too.
    """
    numel = math.prod(shape)
    for config_out in into:
        expected = reference.decode_sum_encode(wires, config, numel, config_out=config_out)
        result = kernels.decode_sum_encode(wires, config, numel, config_out=config_out)
        agree(expected[None], result[None], config_out)
    if not decoded:
        return
    for senders in (wires, wires[:2]):  # two are summed by another path
        out = torch.full(shape, 7.0, device=wires.device)
        total = kernels.decode_sum(senders, config, shape, torch.float32, out=out)
        expected = reference.decode_sum(senders, config, shape, torch.float32)
        tolerance = 1e-6 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(total, expected, rtol=0, atol=tolerance)
