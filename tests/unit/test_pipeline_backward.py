"""What the backward of TAH-Quant's pipeline sends."""

import torch

from megatron.compression.codecs import parse_codec


def test_backward_bits_per_value() -> None:
    """Fixed point of 6 bits in tiles of 32: 6.5 bits, and a bf16 scale that small gradients do not leave."""
    codec = parse_codec("tah-quant").backward
    shape = (512, 2, 256)
    gradient = torch.randn(1, *shape, generator=torch.Generator().manual_seed(2)) * 1e-9
    payload = codec.encode(gradient)
    assert payload.numel() == codec.payload_bytes(shape) and 8 * payload.numel() / gradient.numel() <= 6.6
    result = codec.decode(payload, shape, torch.float32)
    assert (result - gradient).norm() < 0.03 * gradient.norm()
