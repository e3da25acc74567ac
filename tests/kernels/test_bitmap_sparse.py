"""Bitmap-sparse tensors: the definition, and the kernels under Triton's CPU interpreter, bit for bit."""

import pytest
import torch

from taco_kernels import bitmap_sparse
from taco_kernels.bitmap_sparse import BitmapLayout, reference
from taco_kernels.count_sketch.selection import share_threshold
from tests.kernels.interpreter import interpreted


def gradients(senders: int, numel: int, spread: float = 1.0) -> torch.Tensor:
    """fp32[W, numel] over six decades, or as many more as ``spread`` says."""
    g = torch.Generator().manual_seed(numel)
    values, sizes = (torch.randn(senders, numel, generator=g) for _ in range(2))
    return values * sizes.mul(spread).exp()


@pytest.mark.parametrize(("senders", "bits"), [(1, 16), (3, 8), (16, 16)])
def test_the_sum_is_in_fp32_and_in_order(senders: int, bits: int) -> None:
    """What is sent and what remains make up the values; the sum is that of fp32 addition in rank order."""
    for numel in (1, 1023, 50_001):
        layout = BitmapLayout(numel, 0.2, bits)
        x = gradients(senders, numel)
        rest = x.clone()
        wires = bitmap_sparse.encode(rest, share_threshold(x, layout.share), layout, rest)
        sent = x - rest
        assert wires.shape == (senders, layout.wire_bytes)
        count = (sent != 0).sum(1)
        assert (count <= layout.capacity).all() and (
            numel < 50_000 or (count > 0.19 * numel * (bits > 8)).all()
        )
        error = float((rest - torch.where(sent == 0, x, 0.0)).norm() / sent.norm())
        assert error < (1e-3 if bits == 16 else 0.1)
        assert torch.equal(bitmap_sparse.decode_sum(wires, layout), sum(sent[1:], sent[0]))


def test_what_does_not_fit_is_not_lost() -> None:
    """The first values are sent, the rest remains; starts count the values before every fourth row."""
    layout = BitmapLayout(30_000, 0.1)
    x = gradients(2, 30_000)
    rest = torch.empty_like(x)
    wires = bitmap_sparse.encode(x, torch.tensor([0.0, 8.0]), layout, rest)
    sent = x - rest
    assert (sent[0] != 0).sum() == layout.capacity > (sent[1] != 0).sum() > 0
    assert torch.equal(bitmap_sparse.decode_sum(wires, layout), sent[0] + sent[1])
    assert torch.equal(rest[0, 8000:], x[0, 8000:])
    starts = wires[:, layout.starts_at :].view(torch.int32)[:, : layout.tiles]
    counted = torch.nn.functional.pad(x != rest, (0, 2 * 4096)).view(2, -1)
    for tile in range(layout.tiles):
        assert torch.equal(starts[:, tile], counted[:, : 4096 * tile].sum(1).int())


def test_non_finite_values_show_in_their_row() -> None:
    layout = BitmapLayout(5_000, 0.3)
    x = gradients(3, 5_000)
    for value in (float("nan"), float("inf")):
        x[1, 1500] = value
        total = bitmap_sparse.decode_sum(bitmap_sparse.encode(x, torch.ones(3), layout), layout)
        assert total[1024:2048].isnan().all() and total[:1024].isfinite().all()
        assert total[2048:].isfinite().all()


def test_bytes() -> None:
    layout = BitmapLayout(10_000_000, 0.2)
    bits = 0.2 * 16 + 1 + 32 / 4096 + 8 / 1024
    assert 8 * layout.wire_bytes / layout.numel == pytest.approx(bits, abs=0.001)
    with pytest.raises(ValueError, match="share"):
        BitmapLayout(10, 0.0)


@pytest.mark.slow
def test_kernels_reproduce_the_reference() -> None:
    interpreted(main)


def edges() -> torch.Tensor:
    """fp32[1, 9 * 1024] of values just sent or not: half a step, the least exponent, denormal numbers."""
    x = torch.zeros(9, 1024)
    ranks = torch.arange(1023) - 511.0
    for row, exponent in enumerate((0, 1, -94, -95, -96, 120, 127)):
        largest = 2.0**exponent
        step = largest * 2.0**-6
        x[row, 0] = largest * (2 - 2.0**-20)  # rounds up, past the largest code
        halves = ranks[:1022] * step / 2
        x[row, 1:1023] = halves
        x[row, 700:800] = torch.nextafter(halves[700:800], halves[700:800] * 2)
        x[row, 800:900] = torch.nextafter(halves[800:900], torch.zeros(100))
    x[7, :1023] = ranks * 1e-43
    x[8, :1023] = ranks
    x[8, 3] = -torch.inf
    return x.view(1, -1)


def check_kernels(
    kernels, x: torch.Tensor, thresholds: torch.Tensor, layout: BitmapLayout, device: str = "cpu"
) -> None:
    """Kernels on ``device`` against the reference: in place, into another tensor, without a remainder."""
    expected_rest, exactly = torch.empty_like(x), dict(rtol=0, atol=0, equal_nan=True)
    expected = reference.encode(x, thresholds, layout, expected_rest)
    there, copy = x.to(device), x.to(device, copy=True)
    strided = torch.empty(len(x), layout.numel + 3, device=device)[:, : layout.numel]
    for source, rest in ((copy, copy), (there, strided), (there, None)):
        wires = kernels.encode(source, thresholds.to(device), layout, rest)
        assert torch.equal(wires.cpu(), expected)
        if rest is not None:
            torch.testing.assert_close(rest.cpu(), expected_rest, **exactly)
    total = kernels.decode_sum(wires, layout).cpu()
    torch.testing.assert_close(total, reference.decode_sum(expected, layout), **exactly)


def main() -> None:
    """Sizes that divide nothing, a NaN, too many values, one value; a traceback on a difference."""
    from taco_kernels.bitmap_sparse import launch

    for numel, share, bits, keep in (
        (3_003, 0.1, 16, 0.1),
        (5_126, 0.05, 8, 0.5),  # no room for most rows
        (2_048, 1.0, 16, 1.0),
        (1, 0.5, 16, 1.0),
    ):
        x = gradients(3, numel)
        x[0, numel // 2] = 1e-40
        x[1, numel // 3] = float("nan") if numel % 2 else 3e38
        x[2, :1024] *= 2.0**-120  # below the smallest exponent
        layout = BitmapLayout(numel, share, bits)
        check_kernels(launch, x, share_threshold(x.nan_to_num(0), keep), layout)
    x = edges().repeat(3, 1)
    for bits in (8, 16):
        thresholds = torch.tensor([-0.0, float(x[0, 5].abs()), torch.inf])
        check_kernels(launch, x, thresholds, BitmapLayout(x.shape[1], 1.0, bits))
