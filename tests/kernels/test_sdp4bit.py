"""SDP4Bit's arithmetic: errors, exactness, and what is not finite; and the kernels, interpreted."""

import pytest
import torch

from taco_kernels.sdp4bit import (
    GroupFormat,
    add_dequantized,
    quantize,
    sum_dequantize,
    sum_requantize,
)
from tests.kernels.interpreter import interpreted, small_tiles
from tests.kernels.wires.sdp4bit import check_operations

INTRA, INTER, WEIGHTS = GroupFormat(8, 128, True), GroupFormat(4, 128, True), GroupFormat(4, 2048)
FORMATS = [INTRA, INTER, WEIGHTS, GroupFormat(8, 64), GroupFormat(4, 4096, True)]


def _decoded(wires: torch.Tensor, format: GroupFormat, numel: int) -> torch.Tensor:
    return sum_dequantize(wires[None], format, torch.empty(len(wires), numel))


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("numel", [0, 1, 31, 128, 1000, 5000])
def test_round_trip(format: GroupFormat, numel: int) -> None:
    """Any size; the error is at most half a step of the grid a value (the rotation keeps its length)."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(2, 3, numel, generator=generator)
    wires = quantize(x, format)
    assert wires.shape == (6, format.wire_bytes(numel))
    if numel:
        bound = 0.011 if format.bits == 8 else 0.19
        assert _relative(_decoded(wires, format, numel), x.view(6, numel)) < bound


def test_hadamard_tames_an_outlier() -> None:
    """One value of each group 50 times the rest: the rotation halves the error of the others at least."""
    x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    x[:, ::128] *= 50
    rest = torch.ones(4096, dtype=torch.bool)
    rest[::128] = False
    errors = [
        _relative(_decoded(quantize(x, f), f, 4096)[:, rest], x[:, rest])
        for f in (GroupFormat(4, 128, True), GroupFormat(4, 128))
    ]
    assert errors[0] < errors[1] / 2


def test_a_requantised_sum_is_as_good_as_its_grid() -> None:
    """That sums are those of what single senders decode to is in the codecs' contract."""
    numel, senders = 1000, 3
    x = torch.randn(senders, 2, numel, generator=torch.Generator().manual_seed(1))
    wires = quantize(x, INTRA).view(senders, 2, -1)
    total = sum_dequantize(wires, INTRA, torch.empty(2, numel))
    for target in (INTER, GroupFormat(4, 1024, True)):
        again = _decoded(sum_requantize(wires, INTRA, numel, target), target, numel)
        assert _relative(again, total) < 0.25


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_stays_visible(bad: float) -> None:
    """A damaged value makes its group NaN through every operation, and no other group."""
    x = torch.randn(2, 1, 512, generator=torch.Generator().manual_seed(5))
    x[1, 0, 200] = bad
    wires = quantize(x, INTRA).view(2, 1, -1)
    total = sum_dequantize(wires, INTRA, torch.empty(1, 512))[0]
    again = _decoded(sum_requantize(wires, INTRA, 512, INTER), INTER, 512)[0]
    for result in (total, again):
        assert (
            result[128:256].isnan().all()
            and result[:128].isfinite().all()
            and result[256:].isfinite().all()
        )
    weights = torch.zeros(1, 512)
    add_dequantized(wires[1], INTRA, weights)
    assert weights[0, 128:256].isnan().all()


def test_bad_arguments_are_refused() -> None:
    """Formats, shapes and strides that cannot be honoured."""
    with pytest.raises(ValueError, match="contiguous"):
        quantize(torch.zeros(8, 4).t(), INTRA)
    with pytest.raises(ValueError, match="must both be rotated"):
        sum_requantize(quantize(torch.zeros(1, 64), INTRA)[None], INTRA, 64, WEIGHTS)
    with pytest.raises(ValueError, match="this layout needs"):
        sum_dequantize(torch.zeros(1, 1, 7, dtype=torch.uint8), INTRA, torch.zeros(1, 64))


@pytest.mark.slow
def test_kernels_reproduce_the_reference() -> None:
    interpreted(main)


def main() -> None:
    """Every kernel in a spread of formats; exits with a traceback on a difference."""
    from taco_kernels.sdp4bit import launch

    small_tiles(launch.TUNING)
    for case in (
        (GroupFormat(8, 128, True), GroupFormat(4, 128, True), 1300, torch.bfloat16),
        (GroupFormat(4, 64, True), GroupFormat(8, 256, True), 640, torch.float32),
        (GroupFormat(8, 512, True), GroupFormat(4, 64, True), 1000, torch.float16),
        (GroupFormat(4, 2048, False), GroupFormat(4, 128, False), 2100, torch.bfloat16),
        (GroupFormat(8, 128, False), GroupFormat(8, 128, False), 1, torch.float32),
    ):
        check_operations(launch, *case)
