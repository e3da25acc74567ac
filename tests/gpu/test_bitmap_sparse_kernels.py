"""The packing kernels on a GPU, bit for bit against the reference on the CPU."""

import pytest
import torch

from taco_kernels import bitmap_sparse
from taco_kernels.bitmap_sparse import reference
from taco_kernels.count_sketch.selection import share_threshold


@pytest.mark.parametrize(
    ("numel", "share", "bits", "senders", "keep"),
    [
        (3_000_000, 0.2, 16, 4, 0.198),
        (1_000_003, 0.2, 16, 3, 0.198),
        (500_000, 1.0, 16, 2, 0.99),
        (800_001, 0.1, 8, 16, 0.6),  # more than there is room for
        (1_500, 0.3, 16, 2, 0.2),  # fewer rows than a start
        (17_000_002, 0.2, 16, 2, 0.198),  # rows enough for a running sum of several blocks
    ],
)
def test_kernels_reproduce_the_reference(
    numel: int, share: float, bits: int, senders: int, keep: float
) -> None:
    layout = bitmap_sparse.BitmapLayout(numel, share, bits)
    g = torch.Generator().manual_seed(numel)
    x = torch.randn(senders, numel, generator=g) * torch.randn(senders, numel, generator=g).mul(2).exp()
    x[0, numel * 7 // 10] = float("nan")
    x[1, ::5] *= 2.0**-120  # below the smallest exponent, where rows have nothing else
    x[1, :2048] *= 2.0**-120
    thresholds = share_threshold(x, keep)
    device = x.cuda()
    rest, expected_rest = device.clone(), torch.empty_like(x)
    wires = bitmap_sparse.encode(rest, thresholds.cuda(), layout, rest)
    expected = reference.encode(x, thresholds, layout, expected_rest)
    assert torch.equal(wires.cpu(), expected)
    torch.testing.assert_close(rest.cpu(), expected_rest, rtol=0, atol=0, equal_nan=True)
    total = bitmap_sparse.decode_sum(wires, layout).cpu()
    expected_total = reference.decode_sum(expected, layout)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0, equal_nan=True)
    assert bool(total.isnan().any())
