"""Normalised channels and outliers stored separately: the kernels on a GPU against the reference."""

from itertools import product

import pytest
import torch

from taco_kernels import channel_norm
from taco_kernels.taco import CodecConfig, launch
from tests.kernels.test_channel_norm import check_kernels, message
from tests.kernels.wires.outliers import check_operations, check_values_apart


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("tokens, channels", ((1, 32), (1000, 4096), (515, 96)))
def test_kernels_against_the_reference(tokens, channels, dtype) -> None:
    config = CodecConfig("int4", 32, "signed", hadamard=False)
    layout = channel_norm.ChannelNormLayout(tokens, channels, config)
    check_kernels(message(tokens, channels, dtype), layout, "cuda")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_values_apart_in_a_channel_of_equal_ones_arrive(dtype) -> None:
    check_values_apart(channel_norm.encode, channel_norm.decode, dtype, "cuda")


CASES = (
    (CodecConfig("int8", 128, "signed", outliers=True), torch.float16),
    (CodecConfig("int5", 128, "single", outliers=True), torch.float32),
    (CodecConfig("int4", 32, "signed", outliers=True), torch.bfloat16),
    (CodecConfig("int6", 32, "single", False, True), torch.bfloat16),
    (CodecConfig("fp8-e5m2", 64, "single", outliers=True), torch.float16),
    (CodecConfig("int8", 64, "single", False, True), torch.float32),
    (CodecConfig("int6", 256, "signed", outliers=True), torch.bfloat16),
    (CodecConfig("fp8-e4m3", 256, "dual", outliers=True), torch.float16),
)
"""Every format, group size, dtype; with the transform and without."""


@pytest.mark.parametrize("config, dtype", CASES, ids=str)
def test_outliers_against_the_reference(config: CodecConfig, dtype: torch.dtype) -> None:
    for seed, (count, shape) in enumerate(product((0, 1, 40), ((16, 1024), (3, 1000)))):
        check_operations(launch, config, dtype, count, shape, seed, "cuda")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_normalised_channels(dtype: torch.dtype) -> None:
    """Massive tokens spoil neither their groups nor their channels: as little error as in plain torch."""
    layout = channel_norm.ChannelNormLayout(
        1000, 1024, CodecConfig("int4", 32, "signed", hadamard=False, outliers=True)
    )
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 1024, generator=g) + torch.randn(1024, generator=g)
    x[0, 77], x[300, 77], x[999, 1000] = 1e4, 1e3, -300.0
    x = x.to(dtype)
    exact = channel_norm.decode(channel_norm.encode(x, layout), layout, dtype)
    found = channel_norm.decode(channel_norm.encode(x.cuda(), layout), layout, dtype).cpu()
    small = x.abs() < 100
    for part in (
        small,
        small & (torch.arange(1000) == 0)[:, None],
        small & (torch.arange(1024) == 77),
    ):
        errors = [
            float((y - x)[part].float().norm() / x[part].float().norm()) for y in (found, exact)
        ]
        assert errors[0] < 1.02 * errors[1] < 0.12, errors
    torch.testing.assert_close(found[~small], x[~small], rtol=2**-7, atol=0.5)
