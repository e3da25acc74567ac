"""Comparing two wires of the same tensor, and sums by kernels with the reference's."""

import math
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
    """Whether the zeros at the ends are alike."""


def relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Differences of scales, which may both be NaN."""
    ratio = (a - b).abs() / a.abs().clamp(min=1e-37)
    return ratio.masked_fill(a.isnan() & b.isnan(), 0.0).masked_fill(
        a.isnan() != b.isnan(), torch.inf
    )


def ranks(codes: torch.Tensor, config: CodecConfig) -> torch.Tensor:
    """int32 numbers of codes along the grid: neighbours differ by one."""
    if config.is_float:
        codes = codes.int()
        return torch.where(codes >= 128, 128 - codes, codes)
    return integer_values(codes, config.bits).int()


def parts(
    wire: torch.Tensor, config: CodecConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8[groups, G], scales fp32 and padding of one wire that holds ``wire.numel()`` bytes."""
    groups, scale_bytes = (
        wire.numel() // config.bytes_per_group(),
        8 if config.scales == "dual" else 2,
    )
    widths = [groups * config.group_size * bits // 8 for bits in config.planes]
    *planes, scales, padding = wire.split(
        [*widths, groups * scale_bytes, wire.numel() % config.bytes_per_group()]
    )
    dtype = torch.float32 if config.scales == "dual" else torch.bfloat16
    return (
        unpack([plane.reshape(groups, -1) for plane in planes], config.planes),
        scales.clone().view(dtype).float(),
        padding,
    )


def difference(a: torch.Tensor, b: torch.Tensor, config: CodecConfig) -> Difference:
    """Compare wires uint8[chunks, bytes]; codes only of groups whose scales are not NaN.

    Values nearer than fp32's rounding of a transform, 1e-6 of the largest, count as one grid step apart: e5m2
    has many codes in there.
    """
    differing, total, steps, scales, padding = 0, 0, 0, 0.0, True
    if a.shape[1] < config.bytes_per_group():  # of no values
        return Difference(0.0, 0, 0.0, torch.equal(a, b))
    for x, y in zip(a, b, strict=True):
        (codes_x, scales_x, pad_x), (codes_y, scales_y, pad_y) = parts(x, config), parts(y, config)
        coded = ~scales_x.isnan()
        codes_x, codes_y = (codes[coded[: len(codes)]] for codes in (codes_x, codes_y))
        distance = (ranks(codes_x, config) - ranks(codes_y, config)).abs()
        near = (
            reference.code_values(codes_x, config) - reference.code_values(codes_y, config)
        ).abs()
        distance = torch.where(near < 1e-6 * config.qmax, distance.clamp(max=1), distance)
        ratio = relative(scales_x, scales_y)
        differing, total = differing + int((distance > 0).sum()), total + distance.numel()
        steps = max(steps, int(distance.max()) if distance.numel() else 0)
        scales = max(scales, float(ratio.max()) if ratio.numel() else 0.0)
        padding = padding and torch.equal(pad_x, pad_y)
    return Difference(differing / max(total, 1), steps, scales, padding)


def assert_alike(
    a: torch.Tensor, b: torch.Tensor, config: CodecConfig, codes: float, scales: float = 1e-6
) -> None:
    """Two wires are the same but for a share ``codes`` of neighbours, and ``scales`` or a step's rounding.

    A sum in another order moves a value that lies that near to the middle between two codes.
    """
    apart = difference(a, b, config)
    assert apart.grid_steps <= 1 and apart.codes <= codes and apart.padding, (config, apart, codes)
    assert apart.scales <= (2**-7 if config.scales != "dual" else scales), (config, apart)


def check_sums(
    kernels,
    wires: torch.Tensor,
    shape: tuple,
    config: CodecConfig,
    agree,
    into,
    decoded: bool = True,
) -> None:
    """``decode_sum_encode`` with each config of ``into``: wires that ``agree`` with the reference's, which it
    asserts of both and the config. And, if ``decoded``, ``decode_sum`` of all and of two."""
    for config_out in into:
        expected = reference.decode_sum_encode(
            wires, config, math.prod(shape), config_out=config_out
        )
        again = kernels.decode_sum_encode(wires, config, math.prod(shape), config_out=config_out)
        agree(expected[None], again[None], config_out)
    for some in (wires, wires[:2]) if decoded else ():
        out = torch.full(shape, 7.0, device=wires.device)
        total = kernels.decode_sum(some, config, shape, torch.float32, out=out)
        expected = reference.decode_sum(some, config, shape, torch.float32)
        torch.testing.assert_close(
            total, expected, rtol=0, atol=1e-6 * max(1.0, float(expected.abs().max()))
        )
