"""TAH-Quant's kernels against the reference, on a device."""

import pytest
import torch

from taco_kernels import tah_quant
from taco_kernels.tah_quant import TahConfig, decode, encode
from tests.kernels.wires.tah_quant import check_kernels, tokens

CASES = (
    (TahConfig(), (2048, 1, 4096)),
    (TahConfig(allocation="tile", high_ratio=0.3), (333, 70)),
    (TahConfig(), (1, 1, 1)),
    (TahConfig(), (9000, 1, 128)),
    (TahConfig(tile_size=32, high_bits=4, low_bits=2), (128, 2, 1024)),
    (TahConfig(tile_size=128, high_bits=4, low_bits=4), (128, 2, 1000)),
    (TahConfig(high_ratio=0.0), (128, 2, 1024)),
    (TahConfig(high_ratio=1.0), (128, 2, 1024)),
)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize(("config", "shape"), CASES, ids=str)
def test_kernels_reproduce_the_reference(config: TahConfig, shape: tuple[int, ...], dtype) -> None:
    check_kernels(tah_quant, tokens(shape, dtype), config, "cuda")


def test_strides_alignment_and_determinism() -> None:
    """A transposed input, a wire at an odd address, and the same bytes in every run."""
    config, x = TahConfig(), tokens((2, 256, 512), torch.bfloat16).cuda().transpose(0, 1)
    wire = encode(x, config)
    for _ in range(5):
        assert torch.equal(wire, encode(x.contiguous(), config))
    odd = torch.empty(wire.numel() + 1, dtype=torch.uint8, device="cuda")[1:].copy_(wire)
    result = decode(odd, config, x.shape, x.dtype)
    assert torch.equal(
        result.view(torch.int16), decode(wire, config, x.shape, x.dtype).view(torch.int16)
    )
    error = (result.float() - x.float()).nan_to_num(0.0)
    assert error.norm() < 0.1 * x.float().nan_to_num(0.0).norm()


def test_capture_and_no_synchronisation() -> None:
    """Encode and decode run inside a CUDA graph: nothing waits for the host."""
    config, x = TahConfig(), tokens((512, 1, 1024), torch.bfloat16).cuda()
    expected = decode(encode(x, config), config, x.shape, x.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = decode(encode(x, config), config, x.shape, x.dtype)
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))
