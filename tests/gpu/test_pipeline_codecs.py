"""Normalised messages on a CUDA device: as accurate as on the CPU, no wait for the host."""

import pytest
import torch

from megatron.compression.codecs import parse_codec
from tests.unit.test_pipeline_config import early_activations

SPECS = (
    "int4:group=64,scales=single,normalize=standardize",
    "int4:group=32,normalize=standardize",
    "int4:group=64,normalize=standardize",
    "int5:normalize=standardize",
)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_as_on_the_cpu(spec: str, dtype: torch.dtype) -> None:
    """The errors agree to 3 %; nothing synchronises."""
    codec = parse_codec(spec)
    x = early_activations((128, 4, 512)).to(dtype)
    on_device = x.cuda()
    codec.decode(codec.encode(on_device[None]), x.shape, dtype)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        payload = codec.encode(on_device[None])
        (decoded,) = codec.decode(payload, x.shape, dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert payload.numel() == codec.payload_bytes(x.shape)
    (on_cpu,) = codec.decode(codec.encode(x[None]), x.shape, dtype)
    error, expected = ((y.float() - x.float()).norm() for y in (decoded.cpu(), on_cpu))
    assert expected < 0.25 * (x.float() - x.float().mean((0, 1))).norm()
    assert float(error) == pytest.approx(float(expected), rel=0.03)
