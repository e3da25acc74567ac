"""Normalised channels: the reference against plain arithmetic, and the kernels in Triton's interpreter."""

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch

from taco_kernels import channel_norm
from taco_kernels.channel_norm import ChannelNormLayout, reference
from taco_kernels.taco import CodecConfig
from tests.kernels.interpreter import failures_of_scenarios, small_tiles
from tests.kernels.wires.outliers import assert_wires_alike, check_values_apart
from tests.kernels.wires.taco import parts


class Case(NamedTuple):
    """A message and its codec."""

    tokens: int
    channels: int
    format: str
    group_size: int
    scales: str
    dtype: torch.dtype

    @property
    def layout(self) -> ChannelNormLayout:
        """The layout of the message."""
        config = CodecConfig(self.format, self.group_size, self.scales, hadamard=False)
        return ChannelNormLayout(self.tokens, self.channels, config)

    @property
    def message(self) -> torch.Tensor:
        """Values of the message."""
        return message(self.tokens, self.channels, self.dtype)


CASES = (
    Case(130, 96, "int4", 32, "signed", torch.bfloat16),
    Case(1, 64, "int8", 64, "single", torch.float32),
    Case(77, 256, "int6", 128, "single", torch.float16),
    Case(65, 32, "int5", 32, "signed", torch.float32),
)
SIGNED = CodecConfig("int4", 32, "signed", hadamard=False)


def message(tokens: int, channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[tokens, channels] of widths and means far apart; the first token an outlier, channel 3 constant."""
    generator = torch.Generator().manual_seed(tokens)
    width = torch.exp(2 * torch.randn(channels, generator=generator))
    spread = torch.randn(tokens, channels, generator=generator) * width
    mean = 30 * width * torch.randn(channels, generator=generator)
    x = spread + mean
    x[0] *= 5
    x[:, 3] = 2.5
    return x.to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_wire_is_as_long_as_the_layout_has_it(case: Case) -> None:
    layout = case.layout
    assert channel_norm.encode(case.message, layout).shape == (layout.wire_bytes,)
    assert layout.statistics_at % 16 == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_channels_come_back_within_their_steps(case: Case) -> None:
    """The error is that of the codec on what is left of each channel without its mean."""
    layout = case.layout
    x = case.message
    y = channel_norm.decode(channel_norm.encode(x, layout), layout, torch.float32)
    exact = x.double()
    mean = exact.mean(0)
    rms = (exact - mean).square().mean(0).sqrt()
    widest = ((exact - mean) / rms.clamp(min=1e-9)).abs().max()
    steps = {8: 127, 6: 31, 5: 15, 4: 7}[layout.config.bits]
    # the quadratic grid's outermost cells are wider
    half_cell = (0.8 if layout.config.bend else 0.51) / steps
    codec_error = 1.02 * widest * rms * half_cell
    rounding = 1e-5 * exact.abs().max() + 2**-8 * mean.abs()  # mean and spread are sent in bf16
    assert ((y.double() - exact).abs() <= codec_error + rounding).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_constant_channel_is_its_mean(case: Case) -> None:
    layout = case.layout
    y = channel_norm.decode(channel_norm.encode(case.message, layout), layout, torch.float32)
    assert (y[:, 3] == 2.5).all()


@pytest.mark.parametrize("ratio", [0.0, 1e-4, 1e-3, 1e-2])
def test_channels_of_nearly_equal_values_do_not_spoil_their_group(ratio: float) -> None:
    """fp32 channels whose mean is thousands of times their spread, or all there is.

    What the mean's rounding leaves is in the spread that they are divided by.
    """
    layout = ChannelNormLayout(515, 32, SIGNED)
    x = torch.randn(515, 32, generator=torch.Generator().manual_seed(3))
    x[:, :4] = torch.tensor([0.1, 37.7, -5.3, 1e4]) * (1 + ratio * x[:, :4])
    error = channel_norm.decode(channel_norm.encode(x, layout), layout, torch.float32) - x
    assert error[:, 4:].norm() / x[:, 4:].norm() < 0.1
    assert (error[:, :4].abs() <= (2**-8 + 0.5 * ratio) * x[:, :4].abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_apart_in_a_channel_of_equal_ones_arrive(dtype: torch.dtype) -> None:
    check_values_apart(reference.encode, reference.decode, dtype)


def test_a_few_tokens_do_not_decide_the_spread_of_a_channel() -> None:
    """If the codec stores outliers separately; else they do."""
    x = with_massive_tokens()
    assert reference.statistics(x, robust=True)[1].max() < 2.0
    assert reference.statistics(x, robust=False)[1].max() > 100.0


def test_a_codec_with_a_transform_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.hadamard is on"):
        ChannelNormLayout(4, 64, CodecConfig("int4", 32, "signed"))


def test_channels_that_are_no_whole_groups_are_refused() -> None:
    message = r"channels=48 must be a multiple of config\.group_size=32"
    with pytest.raises(ValueError, match=message):
        ChannelNormLayout(4, 48, SIGNED)


def test_a_message_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens=0"):
        ChannelNormLayout(0, 64, SIGNED)


# The kernels, interpreted


def with_massive_tokens() -> torch.Tensor:
    """fp32[150, 64], three values of it thousands, hundreds and tens of times as large as the others."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(150, 64, generator=generator) + torch.randn(64, generator=generator)
    x[3, 5] = 4000.0
    x[140, 50] = -300.0
    x[7, 40] = 50.0
    return x


def reference_statistics(x: torch.Tensor, statistics: torch.Tensor, robust: bool) -> torch.Tensor:
    """``launch._statistics`` by the reference."""
    rows = reference.statistics(x.cpu(), robust)
    statistics.copy_(rows.view(-1))
    return reference.inverse(rows[-1]).to(x.device)


class Comparison(NamedTuple):
    """A message, and what the reference makes of it."""

    x: torch.Tensor
    """On the host."""
    layout: ChannelNormLayout
    device: str
    """That the kernels run on."""
    exact: torch.Tensor
    """The reference's wire."""

    def statistics(self, wire: torch.Tensor) -> torch.Tensor:
        """fp32[2, channels]: means and spreads of a wire."""
        return wire[self.layout.statistics_at :].view(torch.bfloat16).float().view(2, -1)

    @property
    def near_zero(self) -> float:
        """Absolute tolerance: fp32's rounding of the largest statistics."""
        return 1e-6 * float(self.statistics(self.exact).abs().max())

    def check_statistics(self, wire: torch.Tensor) -> None:
        """Means and spreads to a rounding of bf16; spreads are about the means that were sent."""
        mean, rms = self.statistics(wire)
        expected_mean = self.statistics(self.exact)[0]
        torch.testing.assert_close(mean, expected_mean, rtol=2**-7, atol=self.near_zero)
        left_out = torch.zeros_like(self.x).bool()
        if self.layout.config.outliers:
            left_out = reference.outlier_tokens(self.x.float())
        squares = (self.x.double() - mean).square().masked_fill(left_out, 0.0)
        expected_rms = (squares.sum(0) / (~left_out).sum(0)).sqrt().float()
        torch.testing.assert_close(rms, expected_rms, rtol=2**-7, atol=self.near_zero)

    def check_codes(self, wire: torch.Tensor) -> None:
        """Codes are equal bit for bit in groups whose statistics are."""
        config = self.layout.config
        is_equal = self.statistics(wire) == self.statistics(self.exact)
        groups = is_equal.all(0).view(-1, config.group_size).all(1)
        assert 2 * groups.sum() > groups.numel()
        end = config.lists_at(self.layout.numel)
        shape = (self.layout.tokens, len(groups), config.group_size)
        codes = parts(wire[:end], config).codes.view(shape)[:, groups]
        expected = parts(self.exact[:end], config).codes.view(shape)[:, groups]
        assert torch.equal(codes, expected)

    def check_codec(self, launch) -> None:
        """The codec's pass, from the reference's statistics: the whole wire."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "_statistics", reference_statistics)
            wire = launch.encode(self.x.to(self.device), self.layout).cpu()
        end = self.layout.statistics_at
        assert torch.equal(wire[end:], self.exact[end:])
        payload = wire[None, :end]
        expected = self.exact[None, :end]
        config = self.layout.config
        assert_wires_alike(payload, expected, config, self.layout.numel, codes=0.0)

    def check_decode(self, launch) -> None:
        """Equal to a rounding of the result."""
        dtype = self.x.dtype
        result = launch.decode(self.exact.to(self.device), self.layout, dtype).cpu()
        expected = reference.decode(self.exact, self.layout, dtype)
        ulp = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
        torch.testing.assert_close(result, expected, rtol=ulp, atol=self.near_zero)

    def check_nan(self, launch) -> None:
        """A NaN shows in its group's channels, of every token, and nowhere else."""
        damaged = self.x.to(self.device, copy=True)
        channel = 40 % self.layout.channels
        damaged[len(damaged) // 2, channel] = math.nan
        wire = launch.encode(damaged, self.layout)
        result = launch.decode(wire, self.layout, self.x.dtype).cpu()
        group = torch.arange(self.layout.channels) // self.layout.config.group_size
        spoiled = group == channel // self.layout.config.group_size
        assert result[:, spoiled].isnan().all() and result[:, ~spoiled].isfinite().all()


def check_kernels(x: torch.Tensor, layout: ChannelNormLayout, device: str = "cpu") -> None:
    """Compare the kernels with the reference.

    Args:
        x: [tokens, channels] on the host.
        layout: of the message.
        device: that the kernels run on.
    """
    from taco_kernels.channel_norm import launch

    exact = reference.encode(x, layout)
    wire = launch.encode(x.to(device, copy=True), layout).cpu()
    assert exact.shape == wire.shape
    comparison = Comparison(x, layout, device, exact)
    comparison.check_statistics(wire)
    comparison.check_codes(wire)
    comparison.check_codec(launch)
    comparison.check_decode(launch)
    comparison.check_nan(launch)


def interpreted_launch(tile: int, tile_tokens: int, tiles: int):
    """Return channel_norm's launch with tiles of so many values and tokens, so many at a time."""
    from taco_kernels.channel_norm import launch

    small_tiles(launch.TUNING, tile)
    launch.TILE_TOKENS = tile_tokens
    launch.TILES = tiles
    return launch


def check_case(case: Case) -> None:
    """Several tiles, even here."""
    interpreted_launch(1024, 16, 2)
    check_kernels(case.message, case.layout)


def check_equal_channels() -> None:
    """Tiles of a whole block of lists."""
    launch = interpreted_launch(2048, 16, 2)
    check_values_apart(launch.encode, launch.decode, torch.bfloat16)


def check_massive_tokens(dtype: torch.dtype) -> None:
    """Tiles of as many tokens as the definition has: outliers are those of these."""
    interpreted_launch(2048, reference.TILE_TOKENS, 1)
    config = CodecConfig("int4", 32, "signed", hadamard=False, outliers=True)
    check_kernels(with_massive_tokens().to(dtype), ChannelNormLayout(150, 64, config))


SCENARIOS = {f"{case.format} of {case.dtype}": partial(check_case, case) for case in CASES} | {
    "channels of equal values": check_equal_channels,
    "massive tokens in bf16": partial(check_massive_tokens, torch.bfloat16),
    "massive tokens in fp32": partial(check_massive_tokens, torch.float32),
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of_scenarios(__name__)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kernels_reproduce_the_reference(scenario: str, failures: dict[str, str]) -> None:
    assert not failures[scenario], failures[scenario]
