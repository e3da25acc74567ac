"""A residual add with the norm behind it: the definition against torch's autograd, and the kernels
under Triton's CPU interpreter against the definition."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from taco_kernels.residual_norm import LONGEST_ROW, reference
from taco_kernels.residual_norm.reference import Normed
from tests.kernels.interpreter import failures_of_scenarios

EPS = 1e-5
SHAPES = ((5, 3, 96), (2, 1, 200), (9, 64))
"""Rows that fill a power of two and rows that do not; more rows than programs."""


def _inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict:
    """Return random arguments of a forward, of the residual stream's type and bf16 parameters."""
    generator = torch.Generator().manual_seed(4)
    n = shape[-1]
    inputs = {
        "residual": torch.randn(shape, generator=generator) + 1,
        "total": torch.randn(shape, generator=generator),
        "bias": torch.randn(n, generator=generator),
        "gamma": torch.randn(n, generator=generator),
        "beta": torch.randn(n, generator=generator),
    }
    return {name: tensor.to(dtype) for name, tensor in inputs.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("centres", [True, False])
@pytest.mark.parametrize("one_more", [True, False])
def test_the_definition_is_torchs(shape: tuple[int, ...], centres: bool, one_more: bool) -> None:
    """Values and all gradients, of layer norm and RMS norm."""
    inputs = {name: tensor.requires_grad_() for name, tensor in _inputs(shape).items()}
    residual, total, bias, gamma, beta = inputs.values()
    x = residual + total + bias
    weight = gamma + 1 if one_more else gamma
    if centres:
        y = F.layer_norm(x, shape[-1:], weight, beta, EPS)
    else:
        y = F.rms_norm(x, shape[-1:], weight, EPS)
    generator = torch.Generator().manual_seed(6)
    grad_x, grad_y = torch.randn((2, *shape), generator=generator).unbind()
    torch.autograd.backward([x, y], [grad_x, grad_y])
    with torch.no_grad():
        normed = reference.forward(
            residual, total, bias, gamma, beta if centres else None, EPS, one_more
        )
        gradients = reference.backward(grad_y, grad_x, normed, gamma, centres, one_more)
    torch.testing.assert_close(normed.x, x)
    torch.testing.assert_close(normed.y, y)
    torch.testing.assert_close(gradients.x, residual.grad, rtol=1e-4, atol=1e-5)
    expected = [gamma.grad, beta.grad, bias.grad]
    names = ("gamma", "beta", "bias")
    for name, actual, gradient in zip(names, gradients.columns, expected, strict=True):
        if gradient is not None:
            torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-4, msg=name)


def _check(
    shape: tuple[int, ...], dtype: torch.dtype, centres: bool, bias: bool, one_more: bool
) -> None:
    """Compare the kernels with the definition."""
    from taco_kernels.residual_norm import launch

    inputs = _inputs(shape, torch.bfloat16)
    inputs["residual"] = inputs["residual"].to(dtype)
    if not centres:
        inputs["beta"] = None
    if not bias:
        inputs["bias"] = None
    expected = reference.forward(**inputs, eps=EPS, one_more=one_more)
    actual = launch.forward(**inputs, eps=EPS, one_more=one_more)
    # The interpreter cuts fp32 to bf16, the hardware rounds.
    exact = dtype is torch.float32
    tolerance = dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(actual.x, expected.x, rtol=1e-6 if exact else 1e-2, atol=1e-6)
    torch.testing.assert_close(actual.y, expected.y, **tolerance)
    for name in ("mean", "inverse"):
        statistics = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(*statistics, rtol=1e-4 if exact else 1e-2, atol=1e-5)

    generator = torch.Generator().manual_seed(6)
    grad_x, grad_y = torch.randn((2, *shape), generator=generator).to(torch.bfloat16).unbind()
    # The residual stream has no gradient where the next blocks are frozen.
    grad_x = grad_x.to(dtype) if bias else None
    normed = Normed(expected.x, None, expected.mean, expected.inverse)
    expected = reference.backward(grad_y, grad_x, normed, inputs["gamma"], centres, one_more)
    actual = launch.backward(grad_y, grad_x, normed, inputs["gamma"], centres, one_more)
    torch.testing.assert_close(actual.x, expected.x, **tolerance)
    torch.testing.assert_close(actual.columns, expected.columns, rtol=1e-3, atol=1e-3)


def _scenarios() -> dict:
    scenarios = {}
    dtypes = (torch.bfloat16, torch.float32)
    for shape, (dtype, centres, bias) in zip(
        itertools.cycle(SHAPES), itertools.product(dtypes, (True, False), (True, False))
    ):
        name = f"{shape} {dtype} {'layer' if centres else 'rms'} {'bias' if bias else ''}"
        scenarios[name] = lambda case=(shape, dtype, centres, bias, bias != centres): _check(*case)
    return scenarios


SCENARIOS = _scenarios()


def test_rows_that_no_program_holds_are_refused() -> None:
    """Before a kernel is compiled, whose threads would be more than a program has."""
    from taco_kernels.residual_norm import launch

    row = torch.ones(1, LONGEST_ROW + 1)
    with pytest.raises(ValueError, match="of at most 16384; add and normalise in turn"):
        launch.forward(row, row, None, row[0], None, EPS)
    assert launch.warps_of(launch.spec_of(LONGEST_ROW, True, True, False, EPS)) == 32


def test_no_rows() -> None:
    """Nothing is launched, and sums over no rows are zeros."""
    from taco_kernels.residual_norm import launch

    none = torch.ones(0, 3, 64)
    gamma = torch.ones(64)
    normed = launch.forward(none, none, gamma, gamma, gamma, EPS)
    gradients = launch.backward(none, None, normed, gamma, True)
    assert normed.y.shape == gradients.x.shape == none.shape
    assert torch.equal(gradients.columns, torch.zeros(3, 64))


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of_scenarios(__name__)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kernels(scenario: str, failures: dict[str, str]) -> None:
    assert not failures[scenario], failures[scenario]
