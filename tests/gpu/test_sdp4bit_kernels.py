"""SDP4Bit's Triton kernels on a GPU against the reference, on the same tensors and on the CPU."""

import pytest
import torch

from taco_kernels import sdp4bit
from taco_kernels.sdp4bit import GroupFormat, add_dequantized, quantize_difference
from tests.kernels.wires.sdp4bit import check_operations

FORMATS = [
    GroupFormat(bits, size, hadamard)
    for bits in (4, 8)
    for size in (64, 512, 4096)
    for hadamard in (True, False)
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

pytestmark = pytest.mark.usefixtures("filled_outputs")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 2500, 65536 + 48])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_kernels_reproduce_the_reference(
    format: GroupFormat, numel: int, dtype: torch.dtype
) -> None:
    """Sizes divide nothing; sums are quantised again in other bits and other groups."""
    group_size = 128 if format.group_size > 128 else 1024
    target = GroupFormat(12 - format.bits, group_size, format.hadamard)
    check_operations(sdp4bit, format, target, numel, dtype, "cuda")


WEIGHTS = GroupFormat(4, 2048)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 2048, 1_000_003])
def test_weights_have_the_bits_of_the_reference(numel: int, dtype: torch.dtype) -> None:
    """Replicas on any device agree: differences and their sums are bit-equal to the CPU's."""
    generator = torch.Generator().manual_seed(numel)
    old = torch.randn(3, numel, generator=generator).to(dtype)
    new = (old.float() + 1e-3 * torch.randn(3, numel, generator=generator)).to(dtype)

    def wires_on(device: str) -> torch.Tensor:
        rows = zip(new.to(device), old.to(device), strict=True)
        return torch.cat([quantize_difference(n, o, WEIGHTS) for n, o in rows])

    on_cpu = wires_on("cpu")
    on_gpu = wires_on("cuda")
    assert torch.equal(on_gpu.cpu(), on_cpu)
    updated = add_dequantized(on_gpu, WEIGHTS, old.cuda())
    assert torch.equal(updated.cpu(), add_dequantized(on_cpu, WEIGHTS, old.clone()))
