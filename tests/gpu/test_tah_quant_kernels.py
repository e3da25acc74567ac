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


def transposed() -> torch.Tensor:
    """Return bf16[256, 2, 512] that is not contiguous."""
    return tokens((2, 256, 512), torch.bfloat16).cuda().transpose(0, 1)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of bf16 values: NaN equals itself there."""
    return x.view(torch.int16)


def test_a_transposed_tensor_has_the_bytes_of_its_copy_in_every_run() -> None:
    x = transposed()
    wire = encode(x, TahConfig())
    for _ in range(5):
        assert torch.equal(wire, encode(x.contiguous(), TahConfig()))


def test_a_wire_at_an_odd_address_is_decoded() -> None:
    x = transposed()
    wire = encode(x, TahConfig())
    odd = torch.empty(wire.numel() + 1, dtype=torch.uint8, device="cuda")[1:].copy_(wire)
    result = decode(odd, TahConfig(), x.shape, x.dtype)
    assert torch.equal(bits(result), bits(decode(wire, TahConfig(), x.shape, x.dtype)))


def test_error_of_a_round_trip() -> None:
    """Below a tenth, where values are finite."""
    x = transposed()
    result = decode(encode(x, TahConfig()), TahConfig(), x.shape, x.dtype)
    error = (result.float() - x.float()).nan_to_num(0.0)
    assert error.norm() < 0.1 * x.float().nan_to_num(0.0).norm()


def test_capture_and_no_synchronisation() -> None:
    """Encode and decode run inside a CUDA graph: nothing waits for the host."""
    config = TahConfig()
    x = tokens((512, 1, 1024), torch.bfloat16).cuda()
    expected = decode(encode(x, config), config, x.shape, x.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = decode(encode(x, config), config, x.shape, x.dtype)
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(result), bits(expected))
