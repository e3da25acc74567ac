"""SDP4Bit's Triton kernels on a GPU against the reference, on the same tensors and on the CPU."""

from itertools import product

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


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_kernels(format: GroupFormat) -> None:
    """Over types and sizes that divide nothing."""
    target = GroupFormat(
        12 - format.bits, 128 if format.group_size > 128 else 1024, format.hadamard
    )
    for numel, dtype in product((1, 2500, 65536 + 48), DTYPES):
        check_operations(sdp4bit, format, target, numel, dtype, "cuda")


def test_weights_have_the_bits_of_the_reference() -> None:
    """Replicas on any device agree: differences and their sums are bit-equal to the CPU's."""
    format = GroupFormat(4, 2048)
    for numel in (1, 2048, 1_000_003):
        for dtype in (torch.bfloat16, torch.float16):
            generator = torch.Generator().manual_seed(numel)
            old = torch.randn(3, numel, generator=generator).to(dtype)
            new = (old.float() + 1e-3 * torch.randn(3, numel, generator=generator)).to(dtype)
            wires = torch.cat(
                [quantize_difference(n, o, format) for n, o in zip(new, old, strict=True)]
            )
            on_gpu = [
                quantize_difference(n.cuda(), o.cuda(), format)
                for n, o in zip(new, old, strict=True)
            ]
            assert torch.equal(torch.cat(on_gpu).cpu(), wires)
            updated = add_dequantized(torch.cat(on_gpu), format, old.cuda())
            assert torch.equal(updated.cpu(), add_dequantized(wires, format, old.clone()))
