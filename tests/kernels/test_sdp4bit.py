"""SDP4Bit's arithmetic: errors, exactness, and what is not finite; and the kernels, interpreted."""

from functools import partial

import pytest
import torch

from taco_kernels.sdp4bit import (
    GroupFormat,
    add_dequantized,
    quantize,
    sum_dequantize,
    sum_requantize,
)
from tests.kernels.interpreter import failures_of_scenarios, small_tiles
from tests.kernels.wires.sdp4bit import check_operations

INTRA = GroupFormat(8, 128, hadamard=True)
"""Gradients inside a node."""
INTER = GroupFormat(4, 128, hadamard=True)
"""Gradients between nodes."""
WEIGHTS = GroupFormat(4, 2048)
"""Differences of weights."""
FORMATS = [INTRA, INTER, WEIGHTS, GroupFormat(8, 64), GroupFormat(4, 4096, True)]


def _decoded(wires: torch.Tensor, format: GroupFormat, numel: int) -> torch.Tensor:
    """Return fp32[rows, numel] of wires uint8[rows, bytes]."""
    return sum_dequantize(wires[None], format, torch.empty(len(wires), numel))


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative L2 error."""
    return float((result - exact).norm() / exact.norm())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("numel", [0, 1, 31, 128, 1000, 5000])
def test_round_trip(format: GroupFormat, numel: int) -> None:
    """The error is at most half a step of the grid a value: the rotation keeps its length."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(2, 3, numel, generator=generator)
    wires = quantize(x, format)
    assert wires.shape == (6, format.wire_bytes(numel))
    if numel:
        bound = 0.011 if format.bits == 8 else 0.19
        assert _error(_decoded(wires, format, numel), x.view(6, numel)) < bound


def test_hadamard_tames_an_outlier() -> None:
    """One value of each group 50 times the rest: the rotation halves the error of the others at least."""
    x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    x[:, ::128] *= 50
    rest = torch.ones(4096, dtype=torch.bool)
    rest[::128] = False

    def error(format: GroupFormat) -> float:
        return _error(_decoded(quantize(x, format), format, 4096)[:, rest], x[:, rest])

    assert error(GroupFormat(4, 128, hadamard=True)) < error(GroupFormat(4, 128)) / 2


@pytest.mark.parametrize("target", [INTER, GroupFormat(4, 1024, hadamard=True)], ids=str)
def test_a_requantised_sum_is_as_good_as_its_grid(target: GroupFormat) -> None:
    """The codecs' contract has that sums are those of what single senders decode to."""
    numel = 1000
    x = torch.randn(3, 2, numel, generator=torch.Generator().manual_seed(1))
    wires = quantize(x, INTRA).view(3, 2, -1)
    total = sum_dequantize(wires, INTRA, torch.empty(2, numel))
    again = _decoded(sum_requantize(wires, INTRA, numel, target), target, numel)
    assert _error(again, total) < 0.25


NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


def assert_second_group_is_nan(values: torch.Tensor) -> None:
    """Assert that of four groups of 128 the second is NaN, and no other number is."""
    groups = values.view(4, 128)
    assert groups[1].isnan().all()
    assert groups[[0, 2, 3]].isfinite().all()


def damaged_wires(value: float) -> torch.Tensor:
    """Return two senders' wires of 512 values; of the second sender one value is not finite."""
    x = torch.randn(2, 1, 512, generator=torch.Generator().manual_seed(5))
    x[1, 0, 200] = value
    return quantize(x, INTRA).view(2, 1, -1)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_sum_shows_what_is_not_finite(value: float) -> None:
    total = sum_dequantize(damaged_wires(value), INTRA, torch.empty(1, 512))
    assert_second_group_is_nan(total[0])


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_requantised_sum_shows_what_is_not_finite(value: float) -> None:
    again = sum_requantize(damaged_wires(value), INTRA, 512, INTER)
    assert_second_group_is_nan(_decoded(again, INTER, 512)[0])


@pytest.mark.parametrize("value", NOT_FINITE)
def test_weights_show_what_is_not_finite(value: float) -> None:
    weights = torch.zeros(1, 512)
    add_dequantized(damaged_wires(value)[1], INTRA, weights)
    assert_second_group_is_nan(weights[0])


def test_rows_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        quantize(torch.zeros(8, 4).t(), INTRA)


def test_a_sum_of_rotated_codes_is_refused_in_a_format_without_rotation() -> None:
    with pytest.raises(ValueError, match="must both be rotated"):
        sum_requantize(quantize(torch.zeros(1, 64), INTRA)[None], INTRA, 64, WEIGHTS)


def test_wires_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="this layout needs"):
        sum_dequantize(torch.zeros(1, 1, 7, dtype=torch.uint8), INTRA, torch.zeros(1, 64))


# The kernels, interpreted


def check_kernels(format: GroupFormat, target: GroupFormat, numel: int, dtype: torch.dtype) -> None:
    """Run every operation; ``target`` is the format of sums that are quantised again."""
    from taco_kernels.sdp4bit import launch

    small_tiles(launch.TUNING)
    check_operations(launch, format, target, numel, dtype)


CASES = (
    (GroupFormat(8, 128, True), GroupFormat(4, 128, True), 1300, torch.bfloat16),
    (GroupFormat(4, 64, True), GroupFormat(8, 256, True), 640, torch.float32),
    (GroupFormat(8, 512, True), GroupFormat(4, 64, True), 1000, torch.float16),
    (GroupFormat(4, 2048, False), GroupFormat(4, 128, False), 2100, torch.bfloat16),
    (GroupFormat(8, 128, False), GroupFormat(8, 128, False), 1, torch.float32),
)
"""A spread of formats: larger and smaller groups of the sum, sizes that divide nothing, every type."""
SCENARIOS = {
    f"{case[0].bits} bits in {case[0].group_size}, {case[2]} values": partial(check_kernels, *case)
    for case in CASES
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of_scenarios(__name__)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kernels_reproduce_the_reference(scenario: str, failures: dict[str, str]) -> None:
    assert not failures[scenario], failures[scenario]
