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


@pytest.mark.parametrize("into", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("scale", (1.0, 0.3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_in_the_order_of_the_senders_and_rounded_once(
    dtype: torch.dtype, scale: float, into: torch.dtype
) -> None:
    """One sender has overflowed, and counts as zeros."""
    layout = layout_of(5000, dtype, SHARE)
    senders = []
    for name, x in cases(2, 5000, dtype, seed=9):
        if name in ("gaussian", "one value", "tiny", "every exponent"):
            senders.append(reference.encode(x, layout))
    payloads = torch.stack(senders)
    result = lossless.decode_sum(payloads.cuda(), layout, into, scale)
    assert torch.equal(result.cpu(), reference.decode_sum(payloads, layout, into, scale))


def test_a_row_of_more_than_2_31_bytes_comes_back() -> None:
    numel = 2**30 + 2**29 + 24
    layout = layout_of(numel, torch.bfloat16, SHARE)
    pattern = torch.randn(1, 2**20, device="cuda").bfloat16()
    x = pattern.repeat(1, numel // 2**20 + 1)[:, :numel].contiguous()
    payloads = lossless.encode(x, layout)
    assert payloads[0, FLAG_AT] == 0
    assert torch.equal(lossless.decode(payloads, layout).view(torch.int16), x.view(torch.int16))
