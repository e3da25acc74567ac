"""Normalised channels: the reference against plain arithmetic, and the kernels in Triton's interpreter."""

import math

import pytest
import torch

from taco_kernels import channel_norm
from taco_kernels.channel_norm import ChannelNormLayout, reference
from taco_kernels.taco import CodecConfig
from tests.kernels.interpreter import interpreted, small_tiles
from tests.kernels.wires.outliers import assert_wires_alike, check_values_apart
from tests.kernels.wires.taco import parts

CASES = (
    # tokens, channels, format, group size, scales, dtype
    (130, 96, "int4", 32, "signed", torch.bfloat16),
    (1, 64, "int8", 64, "single", torch.float32),
    (77, 256, "int6", 128, "single", torch.float16),
    (65, 32, "int5", 32, "signed", torch.float32),
)


def message(tokens: int, channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[tokens, channels] of widths and means far apart; the first token an outlier, one channel constant."""
    g = torch.Generator().manual_seed(tokens)
    width = torch.exp(2 * torch.randn(channels, generator=g))
    x = torch.randn(tokens, channels, generator=g) * width + 30 * width * torch.randn(
        channels, generator=g
    )
    x[0] *= 5
    x[:, 3] = 2.5
    return x.to(dtype)


def layout_of(case: tuple) -> ChannelNormLayout:
    """The layout of one of CASES."""
    tokens, channels, format, group_size, scales, _ = case
    config = CodecConfig(format, group_size, scales, hadamard=False)
    return ChannelNormLayout(tokens, channels, config)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_channels_come_back_within_their_own_step(case: tuple) -> None:
    """The wire is as long as it says; the error is that of the codec on what is left of each channel."""
    layout, x = layout_of(case), message(case[0], case[1], case[-1])
    wire = channel_norm.encode(x, layout)
    assert wire.shape == (layout.wire_bytes,) and layout.statistics_at % 16 == 0
    y = channel_norm.decode(wire, layout, torch.float32)
    exact = x.double()
    size = (exact - exact.mean(0)).square().mean(0).sqrt()
    steps = {8: 127, 6: 31, 5: 15, 4: 7}[layout.config.bits]
    bound = (
        0.8 if layout.config.bend else 0.51
    ) / steps  # the quadratic grid's outermost cells are wider
    widest = ((exact - exact.mean(0)) / size.clamp(min=1e-9)).abs().max()
    lost = 2**-8 * exact.mean(0).abs()  # the mean and the spread in bf16
    assert (
        (y.double() - exact).abs() <= 1.02 * widest * size * bound + 1e-5 * exact.abs().max() + lost
    ).all()
    assert (y[:, 3] == 2.5).all(), "a constant channel is its mean"


@pytest.mark.parametrize("ratio", [0.0, 1e-4, 1e-3, 1e-2])
def test_channels_alike_do_not_spoil_their_group(ratio: float) -> None:
    """fp32 channels whose mean is thousands of times their spread, or all there is: what the mean's rounding
    leaves is in the spread that they are divided by."""
    layout = layout_of((515, 32, "int4", 32, "signed", None))
    g = torch.Generator().manual_seed(3)
    x = torch.randn(515, 32, generator=g)
    x[:, :4] = torch.tensor([0.1, 37.7, -5.3, 1e4]) * (1 + ratio * x[:, :4])
    y = channel_norm.decode(channel_norm.encode(x, layout), layout, torch.float32)
    others = (y - x)[:, 4:].norm() / x[:, 4:].norm()
    assert others < 0.1, others
    assert ((y - x)[:, :4].abs() <= (2**-8 + 0.5 * ratio) * x[:, :4].abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_apart_in_a_channel_of_equal_ones_arrive(dtype: torch.dtype) -> None:
    check_values_apart(reference.encode, reference.decode, dtype)


def test_bad_arguments_are_named() -> None:
    config = CodecConfig("int4", 32, "signed", hadamard=False)
    with pytest.raises(ValueError, match=r"config\.hadamard is on"):
        ChannelNormLayout(4, 64, CodecConfig("int4", 32, "signed"))
    with pytest.raises(
        ValueError, match=r"channels=48 must be a multiple of config\.group_size=32"
    ):
        ChannelNormLayout(4, 48, config)
    with pytest.raises(ValueError, match="tokens=0"):
        ChannelNormLayout(0, 64, config)


@pytest.mark.slow
def test_kernels_reproduce_the_reference() -> None:
    interpreted(main)


def right_statistics(x: torch.Tensor, found: torch.Tensor, robust: bool) -> torch.Tensor:
    """launch._statistics by the reference."""
    rows = reference.statistics(x.cpu(), robust)
    found.copy_(rows.view(-1))
    return reference.inverse(rows[-1]).to(x.device)


def check_kernels(x: torch.Tensor, layout: ChannelNormLayout, device: str = "cpu") -> None:
    """Statistics to one bf16, codes alike but for a few, decoding equal to one rounding."""
    from taco_kernels.channel_norm import launch

    config, at, there = layout.config, layout.statistics_at, x.to(device, copy=True)
    exact, wire = reference.encode(x, layout), launch.encode(there, layout).cpu()
    assert exact.shape == wire.shape
    found, right = (w[at:].view(torch.bfloat16).float().view(2, -1) for w in (wire, exact))
    near = 1e-6 * float(right.abs().max())
    torch.testing.assert_close(found[0], right[0], rtol=2**-7, atol=near)
    left_out = (
        reference.outlier_tokens(x.float()) if config.outliers else torch.zeros_like(x).bool()
    )
    squares = (
        (x.double() - found[0]).square().masked_fill(left_out, 0.0)
    )  # about the mean that was sent
    spread = (squares.sum(0) / (~left_out).sum(0)).sqrt().float()
    torch.testing.assert_close(found[1], spread, rtol=2**-7, atol=near)

    end, same = (
        config.lists_at(layout.numel),
        (found == right).all(0).view(-1, config.group_size).all(1),
    )
    codes, expected = (
        parts(w[:end], config)[0].view(len(x), len(same), -1)[:, same] for w in (wire, exact)
    )
    assert (codes != expected).sum() <= 1e-3 * codes.numel(), "codes of groups of equal statistics"
    # the interpreter truncates where bf16 is rounded: few statistics are equal
    assert device == "cpu" or 2 * same.sum() > same.numel()
    with pytest.MonkeyPatch.context() as patch:  # the codec's pass from the right ones
        patch.setattr(launch, "_statistics", right_statistics)
        wire = launch.encode(there, layout).cpu()
    assert torch.equal(exact[at:], wire[at:])
    assert_wires_alike(wire[None, :at], exact[None, :at], config, layout.numel, codes=0.004)

    y, expected = (
        launch.decode(exact.to(device), layout, x.dtype),
        reference.decode(exact, layout, x.dtype),
    )
    ulp = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[x.dtype]
    torch.testing.assert_close(y.cpu(), expected, rtol=ulp, atol=near)
    there[len(x) // 2, 40 % layout.channels] = math.nan
    y = launch.decode(launch.encode(there, layout), layout, x.dtype).cpu()
    spoiled = (
        torch.arange(layout.channels) // config.group_size
        == 40 % layout.channels // config.group_size
    )
    assert y[:, spoiled].isnan().all() and y[:, ~spoiled].isfinite().all()


def main() -> None:
    """The kernels on tiny messages; exits with a traceback on a difference."""
    from taco_kernels.channel_norm import launch

    launch.TILE_TOKENS, launch.TILES = 16, 2  # several tiles even here
    small_tiles(launch.TUNING)
    for case in CASES:
        check_kernels(message(case[0], case[1], case[-1]), layout_of(case))
    small_tiles(launch.TUNING, 2048)  # a whole block of lists
    check_values_apart(launch.encode, launch.decode, torch.bfloat16)
    launch.TILE_TOKENS, launch.TILES = (
        reference.TILE_TOKENS,
        1,
    )  # outliers are those of so many tokens
    layout = ChannelNormLayout(
        150, 64, CodecConfig("int4", 32, "signed", hadamard=False, outliers=True)
    )
    g = torch.Generator().manual_seed(5)
    x = torch.randn(150, 64, generator=g) + torch.randn(64, generator=g)
    x[3, 5], x[140, 50], x[7, 40] = 4000.0, -300.0, 50.0
    assert reference.statistics(x, robust=True)[1].max() < 2.0, (
        "one token does not decide a channel's spread"
    )
    for dtype in (torch.bfloat16, torch.float32):
        check_kernels(x.to(dtype), layout)
