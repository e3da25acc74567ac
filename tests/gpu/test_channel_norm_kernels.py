"""Normalised channels and separate outliers: the kernels on a GPU against the reference."""

import pytest
import torch

from taco_kernels import channel_norm
from taco_kernels.taco import CodecConfig, launch
from tests.kernels.test_channel_norm import check_kernels, message
from tests.kernels.wires.outliers import check_operations, check_values_apart

DTYPES = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)


@DTYPES
@pytest.mark.parametrize("tokens, channels", ((1, 32), (1000, 4096), (515, 96)))
def test_kernels_against_the_reference(tokens: int, channels: int, dtype: torch.dtype) -> None:
    config = CodecConfig("int4", 32, "signed", hadamard=False)
    layout = channel_norm.ChannelNormLayout(tokens, channels, config)
    check_kernels(message(tokens, channels, dtype), layout, "cuda")


@DTYPES
def test_values_apart_in_a_channel_of_equal_ones_arrive(dtype: torch.dtype) -> None:
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
SHAPES = ((16, 1024), (3, 1000))


@pytest.mark.parametrize("config, dtype", CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", (0, 1, 40))
def test_outliers_against_the_reference(
    count: int, shape: tuple[int, int], config: CodecConfig, dtype: torch.dtype
) -> None:
    seed = 2 * count + SHAPES.index(shape)
    check_operations(launch, config, dtype, count, shape, seed, "cuda")


@DTYPES
def test_massive_tokens_spoil_neither_their_groups_nor_their_channels(dtype: torch.dtype) -> None:
    """The error of all other values is as small as in plain torch."""
    config = CodecConfig("int4", 32, "signed", hadamard=False, outliers=True)
    layout = channel_norm.ChannelNormLayout(1000, 1024, config)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 1024, generator=generator) + torch.randn(1024, generator=generator)
    x[0, 77] = 1e4
    x[300, 77] = 1e3
    x[999, 1000] = -300.0
    x = x.to(dtype)
    exact = channel_norm.decode(channel_norm.encode(x, layout), layout, dtype)
    result = channel_norm.decode(channel_norm.encode(x.cuda(), layout), layout, dtype).cpu()

    small = x.abs() < 100
    in_first_token = small & (torch.arange(1000) == 0)[:, None]
    in_channel = small & (torch.arange(1024) == 77)
    for values in (small, in_first_token, in_channel):
        norm = x[values].float().norm()
        error = (result - x)[values].float().norm() / norm
        exact_error = (exact - x)[values].float().norm() / norm
        assert error < 1.02 * exact_error < 0.12
    torch.testing.assert_close(result[~small], x[~small], rtol=2**-7, atol=0.5)
