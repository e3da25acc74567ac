"""SDP4Bit's Triton kernels on a GPU against the reference, on the same tensors and on the CPU."""

import pytest
import torch

from taco_kernels.sdp4bit import (
    GroupFormat,
    add_dequantized,
    quantize,
    quantize_difference,
    reference,
    sum_dequantize,
    sum_requantize,
)
from tests.kernels.wires.sdp4bit import apart

FORMATS = [
    GroupFormat(bits, size, hadamard)
    for bits in (4, 8)
    for size in (64, 512, 4096)
    for hadamard in (True, False)
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


pytestmark = pytest.mark.usefixtures("filled_outputs")


def _close(exact: torch.Tensor, wires: torch.Tensor, format: GroupFormat, numel: int) -> None:
    """A rotation sums in another order: few codes may be their neighbours, steps a rounding apart."""
    difference = apart(exact, wires, format, numel)
    allowed = 2e-4 + 2 / exact.shape[0] / numel if format.hadamard else 0.0
    assert difference.codes <= allowed and difference.grid_steps <= 1 and difference.padding, difference
    assert difference.scales <= (2**-14 if format.hadamard else 0.0), difference


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_kernels(format: GroupFormat) -> None:
    """Every operation over types, sizes that divide nothing, strided rows and damaged values."""
    generator = torch.Generator().manual_seed(0)
    target = GroupFormat(12 - format.bits, 128 if format.group_size > 128 else 1024, format.hadamard)
    for case, (numel, dtype) in enumerate((n, d) for n in (1, 2500, 65536 + 48) for d in DTYPES):
        wide = torch.randn(2, 3, numel + 32, generator=generator)
        wide[1, 1] *= 1e-6
        wide[0, 2] = 0.0
        damaged = case % 3 == 2
        if damaged:
            wide[1, 0, 16] = float("nan")
        wide = wide.to(dtype).cuda()
        x = wide[:, :, 16 : 16 + numel].transpose(0, 1)
        exact = reference.quantize(x, format)
        wires = quantize(x, format)
        _close(exact, wires, format, numel)

        senders = exact.view(3, 2, -1)
        out = torch.full((2, 2 * numel), -4.25e4, dtype=dtype, device="cuda")[:, :numel]
        sum_dequantize(senders, format, out, 0.25)
        expected = reference.sum_dequantize(senders, format, torch.empty_like(out), 0.25)
        ulp = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 2e-6)
        torch.testing.assert_close(out, expected, rtol=ulp, atol=1e-6, equal_nan=True)
        assert bool(out.isnan().any()) == damaged

        expected = reference.sum_requantize(senders, format, numel, target)
        again = sum_requantize(senders, format, numel, target)
        difference = apart(expected, again, target, numel)
        assert difference == (0.0, 0, 0.0, True), "sums and codes without a rotation are bit-equal"


def test_weights_have_the_bits_of_the_reference() -> None:
    """Replicas on any device agree: differences and their sums are bit-equal to the CPU's."""
    format = GroupFormat(4, 2048)
    for numel in (1, 2048, 1_000_003):
        for dtype in (torch.bfloat16, torch.float16):
            generator = torch.Generator().manual_seed(numel)
            old = torch.randn(3, numel, generator=generator).to(dtype)
            new = (old.float() + 1e-3 * torch.randn(3, numel, generator=generator)).to(dtype)
            wires = torch.cat([quantize_difference(n, o, format) for n, o in zip(new, old, strict=True)])
            on_gpu = [quantize_difference(n.cuda(), o.cuda(), format) for n, o in zip(new, old, strict=True)]
            assert torch.equal(torch.cat(on_gpu).cpu(), wires)
            updated = add_dequantized(torch.cat(on_gpu), format, old.cuda())
            assert torch.equal(updated.cpu(), add_dequantized(wires, format, old.clone()))
