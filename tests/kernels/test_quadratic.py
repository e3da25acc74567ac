"""The quadratic grid: what codes stand for, that the nearest is taken and none overflows."""

import pytest
import torch

import taco_kernels.taco as tk
from taco_kernels.taco import CodecConfig, reference
from taco_kernels.taco.layout import BEND
from tests.kernels.codec_formulas import inputs, read_wire

FORMATS = tuple(BEND)
BITS = {"int4": 4, "int5": 5, "int6": 6}


def grid_of(format: str) -> torch.Tensor:
    """Values of all codes, ascending, by the formula."""
    half, a = 2 ** (BITS[format] - 1), BEND[format]
    return torch.tensor([u * (abs(u) + 2 * a + 1) for u in range(-half, half)], dtype=torch.float64)


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


@pytest.mark.parametrize("format", FORMATS)
def test_steps_reach_both_extremes_and_no_code_overflows(format: str) -> None:
    config, half = CodecConfig(format, 32, "signed", hadamard=False), 2 ** (BITS[format] - 1)
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
    y = tk.decode(tk.encode(x, config), config, x.shape, torch.float32).double().abs()
    assert ((y - lone[:, None]).abs().amin(1) <= 1.0001 * 2**-8 * lone).all(), (
        "it comes back to half a bf16"
    )
