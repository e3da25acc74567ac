"""Normalised messages on a CUDA device: as accurate as on the CPU, no wait for the host."""

import pytest
import torch

from megatron.compression.pipeline_parallel.codecs import forward_codec
from megatron.compression.pipeline_parallel.config import PipelineParallelCompression
from tests.unit.test_pipeline_codecs import RANDOM, early_activations

SETTINGS = (
    dict(pp_compression="int4", pp_normalize="standardize"),
    dict(pp_compression="int4", pp_normalize="standardize", pp_rounding="dither"),
    dict(pp_compression="int4", pp_normalize="center", pp_rounding="stochastic"),
    dict(pp_compression="tah-quant", pp_normalize="standardize"),
    dict(pp_compression="auto"),
    dict(pp_compression="int5", pp_normalize="center", pp_scales="signed", pp_group_size=128),
)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_as_on_the_cpu(settings: dict, dtype: torch.dtype) -> None:
    """The errors agree to 3 %; nothing synchronises."""
    codec = forward_codec(PipelineParallelCompression(**settings))
    x = early_activations((128, 4, 512)).to(dtype)
    on_device = x.cuda()
    codec.decode(codec.encode(on_device, RANDOM), x.shape, dtype, RANDOM)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        wire = codec.encode(on_device, RANDOM)
        decoded = codec.decode(wire, x.shape, dtype, RANDOM)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert wire.numel() == codec.wire_bytes(x.shape)
    on_cpu = codec.decode(codec.encode(x, RANDOM), x.shape, dtype, RANDOM)
    error, expected = ((y.float() - x.float()).norm() for y in (decoded.cpu(), on_cpu))
    assert expected < 0.25 * (x.float() - x.float().mean((0, 1))).norm()
    assert float(error) == pytest.approx(float(expected), rel=0.03)
