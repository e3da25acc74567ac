"""Outliers, under Triton's CPU interpreter, against outliers.py: lists alike, codes nearly."""

import pytest

from tests.kernels.interpreter import interpreted, small_tiles

pytestmark = pytest.mark.slow


def test_kernels_reproduce_the_reference() -> None:
    assert interpreted(main) == "9"


def main() -> int:
    """A spread of configurations, numbers of outliers and ends of tensors."""
    import torch

    from taco_kernels.taco import CodecConfig, launch
    from taco_kernels.taco.spec import TUNING
    from tests.kernels.wires.outliers import check_operations

    small_tiles(TUNING, 2048)
    cases = 0
    for config, dtype, counts in (
        (CodecConfig("int6", 128, "signed", outliers=True), torch.bfloat16, (0, 1, 4)),
        (CodecConfig("int8", 32, "single", outliers=True), torch.float32, (2, 12)),
        (CodecConfig("fp8-e4m3", 128, "dual", outliers=True), torch.float16, (1, 12)),
        (CodecConfig("int4", 32, "signed", False, True), torch.float32, (12,)),
        (CodecConfig("int5", 256, "signed", outliers=True), torch.float32, (12,)),
    ):
        for count in counts:
            check_operations(launch, config, dtype, count, (3, 1000), seed=cases)
            cases += 1
    check_channel_norm(torch.bfloat16)
    check_channel_norm(torch.float32)
    return cases


def check_channel_norm(dtype) -> None:
    """Statistics without the tokens that are outliers, lists and codes as in the reference."""
    import torch

    from taco_kernels.channel_norm import ChannelNormLayout, launch, reference
    from taco_kernels.taco import CodecConfig
    from tests.kernels.test_channel_norm import right_statistics
    from tests.kernels.wires.outliers import assert_wires_alike

    launch.TILES = 1
    config = CodecConfig("int4", 32, "signed", hadamard=False, outliers=True)
    layout = ChannelNormLayout(150, 64, config)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(150, 64, generator=g) + torch.randn(64, generator=g)
    x[3, 5], x[140, 50], x[7, 40] = 4000.0, -300.0, 50.0
    x = x.to(dtype)
    exact, wire = reference.encode(x, layout), launch.encode(x, layout)
    at = layout.statistics_at
    found, right = (w[at:].view(torch.bfloat16).float().view(2, -1) for w in (wire, exact))
    torch.testing.assert_close(found, right, rtol=2**-7, atol=1e-6 * float(right.abs().max()))
    assert right[1].max() < 2.0, "one token does not decide a channel's spread"
    with pytest.MonkeyPatch.context() as patch:  # the interpreter truncates where bf16 is rounded
        patch.setattr(launch, "_statistics", right_statistics)
        wire = launch.encode(x, layout)
    assert_wires_alike(wire[None, :at], exact[None, :at], config, layout.numel)
    y, expected = launch.decode(exact, layout, dtype), reference.decode(exact, layout, dtype)
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-5)
