"""The quadratic grid: what codes stand for, that the nearest is taken and none overflows."""

import pytest
import torch

import taco_kernels.taco as tk
from taco_kernels.taco import CodecConfig, reference
from taco_kernels.taco.layout import BEND
from tests.kernels.codec_formulas import BITS, inputs, read_wire

FORMATS = tuple(BEND)


def grid_of(format: str) -> torch.Tensor:
    """Return the values of all codes, ascending, float64, by the formula u (|u| + 2 a + 1)."""
    half = 2 ** (BITS[format] - 1)
    a = BEND[format]
    return torch.tensor([u * (abs(u) + 2 * a + 1) for u in range(-half, half)], dtype=torch.float64)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_stand_for_the_formulas_values(format: str) -> None:
    codes = torch.arange(2 ** BITS[format]) - 2 ** (BITS[format] - 1)
    values = reference.quadratic_values(codes.float(), BEND[format])
    assert torch.equal(values.double(), grid_of(format))


@pytest.mark.parametrize("format", FORMATS)
def test_values_are_exact_in_fp16_and_sums_in_fp32(format: str) -> None:
    """Even integers below 2^12: 512 of them stay below 2^24."""
    points = grid_of(format)
    assert torch.equal(points.half().double(), points)
    assert (points % 2 == 0).all()
    assert 512 * float(points.abs().max()) < 2**24


@pytest.mark.parametrize("format", FORMATS)
def test_the_grid_is_denser_near_zero(format: str) -> None:
    gaps = grid_of(format).diff()
    assert gaps.max() / gaps.min() == pytest.approx(2.5, abs=0.15)


@pytest.mark.parametrize("format", FORMATS)
def test_the_nearest_value_is_taken(format: str) -> None:
    """All along the grid, to within the sixteenth that values are rounded to; also near the middles."""
    points = grid_of(format)
    v = torch.linspace(float(points[0]), float(points[-1]), 200_001, dtype=torch.float64).float()
    middles = ((points[1:] + points[:-1]) / 2).float()
    v = torch.cat([v, middles, middles - 0.04, middles + 0.04])
    codes = reference.quadratic_nearest(v, BEND[format])
    rounded = reference.quadratic_values(codes, BEND[format]).double()
    nearest = (v.double()[:, None] - points).abs().amin(1)
    assert ((rounded - v.double()).abs() <= nearest + 2 / 32).all()
    assert torch.isin(rounded, points).all()


class Groups:
    """Groups of 32 with extremes of every ratio, in every order, and what a wire holds of them."""

    def __init__(self, format: str) -> None:
        self.config = CodecConfig(format, 32, "signed", hadamard=False)
        self.points = grid_of(format)
        self.half = 2 ** (BITS[format] - 1)
        x = inputs("gaussian", 4000, 32).view(4000, 32)
        x[::4] = x[::4].abs()
        x[1::4, 5] = 9.0
        x[1::4, 6] = -9.0 * torch.linspace(0.8, 1.25, 1000)
        x[2] = -3.0
        self.x = x
        self.wire = tk.encode(x, self.config)
        self.q, self.step, _ = read_wire(self.wire[0], self.config)
        self.high = x.amax(1).clamp(min=0).double()
        self.low = -x.amin(1).clamp(max=0).double()
        self.far = torch.maximum(self.high, self.low)
        self.near = torch.minimum(self.high, self.low)


@pytest.mark.parametrize("format", FORMATS)
def test_steps_are_those_of_the_deciding_extreme(format: str) -> None:
    """They are right to half a bf16, and negative where far is positive."""
    groups = Groups(format)
    assert torch.equal(groups.step < 0, groups.high > groups.low)
    far_step = groups.far / -groups.points[0]
    near_step = groups.near / groups.points[-1]
    exact = torch.maximum(far_step, near_step)
    assert ((groups.step.abs() - exact).abs() <= 2**-8 * exact).all()


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_is_used_and_none_overflows(format: str) -> None:
    """A code that wraps around would have the other sign; all others are the nearest."""
    groups = Groups(format)
    assert groups.q.min() == -groups.half and groups.q.max() == groups.half - 1
    v = groups.x.double() / groups.step[:, None]
    assert (groups.q * v >= -1e-9).all()
    nearest = (v[:, :, None] - groups.points).abs().amin(2)
    values = groups.points[(groups.q + groups.half).long()]
    assert ((values - v).abs() <= nearest + 2 / 32 + 1e-3).all()


@pytest.mark.parametrize("format", FORMATS)
def test_the_deciding_extreme_comes_back(format: str) -> None:
    """It is right to half a bf16: its code has the value that its step was made of."""
    groups = Groups(format)
    near_decides = groups.far / -groups.points[0] < groups.near / groups.points[-1]
    deciding = torch.where(near_decides, groups.near, groups.far)
    decoded = tk.decode(groups.wire, groups.config, groups.x.shape, torch.float32)
    distance = (decoded.double().abs() - deciding[:, None]).abs().amin(1)
    assert (distance <= 1.0001 * 2**-8 * deciding).all()
