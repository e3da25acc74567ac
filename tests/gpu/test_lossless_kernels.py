"""The lossless kernels on a CUDA device: every bit of every input, crosswise with the reference."""

import pytest
import torch

from taco_kernels import lossless
from taco_kernels.lossless import FLAG_AT, layout_of, reference
from tests.kernels.wires.lossless import cases, check_every_bit

SHARE = 0.07
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", (1, 129, 3000, 16_384, 1_000_003))
def test_every_bit_comes_back(numel: int, dtype: torch.dtype) -> None:
    layout = layout_of(numel, dtype, SHARE)
    for name, x in cases(3, numel, dtype, seed=numel):
        check_every_bit(lossless, name, x, layout, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: torch.dtype) -> None:
    """In the order of the senders, rounded once; one that overflowed among them."""
    layout, senders = layout_of(5000, dtype, SHARE), []
    for name, x in cases(2, 5000, dtype, seed=9):
        if name in ("gaussian", "one value", "tiny", "every exponent"):
            senders.append(reference.encode(x, layout))
    stacked = torch.stack(senders)
    for scale in (1.0, 0.3):
        for into in (torch.float32, torch.bfloat16):
            found = lossless.decode_sum(stacked.cuda(), layout, into, scale)
            assert torch.equal(found.cpu(), reference.decode_sum(stacked, layout, into, scale))


def test_long_rows() -> None:
    """A row of more than 2^31 bytes."""
    numel = 2**30 + 2**29 + 24
    layout = layout_of(numel, torch.bfloat16, SHARE)
    x = (
        torch.randn(1, 2**20, device="cuda")
        .bfloat16()
        .repeat(1, numel // 2**20 + 1)[:, :numel]
        .contiguous()
    )
    payloads = lossless.encode(x, layout)
    assert payloads[0, FLAG_AT] == 0
    assert torch.equal(lossless.decode(payloads, layout).view(torch.int16), x.view(torch.int16))
