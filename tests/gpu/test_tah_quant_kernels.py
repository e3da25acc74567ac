"""TAH-Quant's kernels against the reference, on a device."""

import pytest
import torch

from taco_kernels.tah_quant import TahConfig, decode, encode, layout_of, reference
from tests.kernels.wires.tah_quant import difference

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


def activations(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Tokens of different scales with outliers, on the device."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(shape, generator=generator, device="cuda")
    x *= torch.randn(shape[:-1], generator=generator, device="cuda")[..., None].exp()
    x.view(-1)[5::192] *= 40
    x.view(-1)[1:2] = float("nan")
    return x.to(dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize(("config", "shape"), CASES, ids=str)
def test_kernels_reproduce_the_reference(config: TahConfig, shape: tuple[int, ...], dtype) -> None:
    """Equal choices; codes that differ only where sums in another order meet the middle of two."""
    x = activations(shape, dtype)
    exact, wire = reference.encode(x.cpu(), config), encode(x, config).cpu()
    found = difference(exact, wire, config, shape)
    layout = layout_of(config, shape)
    choices = 2 + layout.units // 2000  # entropies closer than fp32 tells apart
    assert found.widths <= choices * layout.tiles_per_unit, found
    assert found.pivots == 0 and found.padding, found
    assert found.scales <= 0.05 and found.codes <= 0.002 and found.cells <= 1, found
    result = decode(exact.cuda(), config, shape, torch.float32).cpu()
    expected = reference.decode(exact, config, shape, torch.float32)
    exactly = dict(rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(result, expected, **exactly)
    torch.testing.assert_close(
        decode(exact.cuda(), config, shape, dtype).cpu(), expected.to(dtype), **exactly
    )


def test_strides_alignment_and_determinism() -> None:
    """A transposed input, a wire at an odd address, and the same bytes in every run."""
    config, x = TahConfig(), activations((2, 256, 512), torch.bfloat16).transpose(0, 1)
    wire = encode(x, config)
    for _ in range(5):
        assert torch.equal(wire, encode(x.contiguous(), config))
    odd = torch.empty(wire.numel() + 1, dtype=torch.uint8, device="cuda")[1:].copy_(wire)
    result = decode(odd, config, x.shape, x.dtype)
    assert torch.equal(result.view(torch.int16), decode(wire, config, x.shape, x.dtype).view(torch.int16))
    error = (result.float() - x.float()).nan_to_num(0.0)
    assert error.norm() < 0.1 * x.float().nan_to_num(0.0).norm()


def test_capture_and_no_synchronisation() -> None:
    """Encode and decode run inside a CUDA graph: nothing waits for the host."""
    config, x = TahConfig(), activations((512, 1, 1024), torch.bfloat16)
    expected = decode(encode(x, config), config, x.shape, x.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = decode(encode(x, config), config, x.shape, x.dtype)
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))
