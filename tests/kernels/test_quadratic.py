"""The quadratic grid: what codes stand for, that the nearest is taken and none overflows, and the gain."""

import math
from dataclasses import replace

import pytest
import torch

import taco_kernels.taco as tk
from taco_kernels.taco import CodecConfig, reference
from taco_kernels.taco.layout import BEND
from tests.kernels.codec_formulas import inputs, read_wire

FORMATS = tuple(BEND)
BITS = {"int4": 4, "int5": 5, "int6": 6}


def config_of(format: str, group_size: int = 128, hadamard: bool = True) -> CodecConfig:
    """Signed scales."""
    return CodecConfig(format, group_size, "signed", hadamard)


def grid_of(format: str) -> torch.Tensor:
    """Values of all codes, ascending, by the formula."""
    half, a = 2 ** (BITS[format] - 1), BEND[format]
    return torch.tensor([u * (abs(u) + 2 * a + 1) for u in range(-half, half)], dtype=torch.float64)


def round_trip(x: torch.Tensor, config: CodecConfig) -> torch.Tensor:
    return tk.decode(tk.encode(x, config), config, x.shape, torch.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_values_and_their_sums_are_exact_in_fp16_and_fp32(format: str) -> None:
    points, codes = grid_of(format), torch.arange(2 ** BITS[format]) - 2 ** (BITS[format] - 1)
    assert torch.equal(reference.quadratic_values(codes.float(), BEND[format]).double(), points)
    assert torch.equal(points.half().double(), points) and (points % 2 == 0).all()
    assert 512 * float(points.abs().max()) < 2**24
    gaps = points.diff()
    assert gaps.max() / gaps.min() == pytest.approx(2.5, abs=0.15)


@pytest.mark.parametrize("format", FORMATS)
def test_the_nearest_value_is_taken(format: str) -> None:
    """Of values all along the grid, to within the sixteenth that they are rounded to."""
    points = grid_of(format)
    v = torch.linspace(float(points[0]), float(points[-1]), 200_001, dtype=torch.float64).float()
    middles = ((points[1:] + points[:-1]) / 2).float()
    v = torch.cat([v, middles, middles - 0.04, middles + 0.04])
    found = reference.quadratic_values(reference.quadratic_nearest(v, BEND[format]), BEND[format])
    best = (v.double()[:, None] - points).abs().amin(1)
    assert ((found.double() - v.double()).abs() <= best + 2 / 32).all()
    assert torch.isin(found.double(), points).all()


@pytest.mark.parametrize("relative", [-3e-7, 0.0, 3e-7])
def test_an_approximate_root_gives_the_same_code(relative: float) -> None:
    """The kernels' steps in fp32, the root off by more than the hardware's: every argument there can be."""
    x = torch.arange(20 * 16, 2700 * 16).float() / 16  # |v| + a (a + 1), in sixteenths
    root = (x + 1 / 32).sqrt() * (1 + relative)
    assert torch.equal((root + 8388607.5) - 8388608.0, x.double().sqrt().floor().float())


@pytest.mark.parametrize("format", FORMATS)
def test_steps_reach_both_extremes_and_no_code_overflows(format: str) -> None:
    config, half = config_of(format, 32, hadamard=False), 2 ** (BITS[format] - 1)
    points = grid_of(format)
    x = inputs("gaussian", 4000, 32).view(4000, 32)
    x[::4] = x[::4].abs()
    x[1::4, 5] = 9.0  # extremes of every ratio, in every order
    x[1::4, 6] = -9.0 * torch.linspace(0.8, 1.25, 1000)
    x[2] = -3.0
    q, step, _ = read_wire(tk.encode(x, config)[0], config)
    high, low = x.amax(1).clamp(min=0).double(), -x.amin(1).clamp(max=0).double()
    assert torch.equal(step < 0, high > low)
    assert q.min() == -half and q.max() == half - 1
    v = x.double() / step[:, None]
    assert (q * v >= -1e-9).all(), "no code has wrapped around to the other sign"
    best = (v[:, :, None] - points).abs().amin(2)
    assert ((points[(q + half).long()] - v).abs() <= best + 2 / 32 + 1e-3).all()
    far, near = torch.maximum(high, low), torch.minimum(high, low)
    exact = torch.maximum(far / -points[0], near / points[-1])
    assert ((step.abs() - exact).abs() <= 2**-8 * exact).all()
    lone = torch.where(far / -points[0] < near / points[-1], near, far)  # what decides the step
    y = round_trip(x, config).double().abs()
    assert ((y - lone[:, None]).abs().amin(1) <= 1.0001 * 2**-8 * lone).all(), "it comes back to half a bf16"


@pytest.mark.parametrize("format", FORMATS)
def test_sums_and_what_is_not_finite(format: str) -> None:
    """decode_sum is the sum of decodes; the sum is encoded on this grid or on another; NaN stays alone."""
    config = replace(config_of(format, 64), outliers=format == "int5")
    xs = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(4))
    xs[0, 1, 7] = math.nan
    xs[1, 2] = 0.0
    xs[2, 0] *= 3e38 / xs[2, 0].abs().max()
    wires = torch.cat([tk.encode(x, config) for x in xs])
    parts = [tk.decode(wire[None], config, (3, 64), torch.float32) for wire in wires]
    assert parts[0][1].isnan().all() and parts[0][[0, 2]].isfinite().all()
    assert (parts[1][2] == 0).all() and parts[2][0].isfinite().all()
    total = tk.decode_sum(wires, config, (3, 64), torch.float32)
    torch.testing.assert_close(total[2], sum(parts)[2], rtol=1e-5, atol=1e-5)
    assert total[1].isnan().all() and total[[0, 2]].isfinite().all()
    for other in (config, replace(config, scales="single"), replace(config, format="int8")):
        again = tk.decode_sum_encode(wires, config, 192, config_out=other)
        y = tk.decode(again[None], other, (3, 64), torch.float32)
        assert y[1].isnan().all() and (y[2] - total[2]).norm() < 0.12 * total[2].norm()
