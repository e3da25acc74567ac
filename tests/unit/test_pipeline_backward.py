"""What the backward of TAH-Quant's pipeline sends."""

import torch


def test_backward_bits_per_value() -> None:
    """Fixed point of 6 bits in tiles of 32: 6.5 bits, and a bf16 scale that small gradients do not leave."""
    from megatron.compression.pipeline_parallel.codecs import backward_codec
    from megatron.compression.pipeline_parallel.config import PipelineParallelCompression

    codec = backward_codec(PipelineParallelCompression(pp_compression="tah-quant"))
    shape = (512, 2, 256)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 1e-9
    wire = codec.encode(gradient)
    assert wire.numel() == codec.wire_bytes(shape) and 8 * wire.numel() / gradient.numel() <= 6.6
    result = codec.decode(wire, shape, torch.float32)
    assert (result - gradient).norm() < 0.03 * gradient.norm()
