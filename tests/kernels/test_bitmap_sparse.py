"""Bitmap-sparse tensors: the definition, and the kernels under Triton's CPU interpreter, bit for bit."""

import sys

import pytest
import torch

from taco_kernels import bitmap_sparse
from taco_kernels.count_sketch.selection import share_threshold
from tests.kernels.interpreter import output_interpreted, speed_up


def gradients(senders: int, numel: int) -> torch.Tensor:
    """fp32[W, numel] over six decades."""
    g = torch.Generator().manual_seed(numel)
    return torch.randn(senders, numel, generator=g) * torch.randn(senders, numel, generator=g).exp()


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("senders", [1, 3, 16])
def test_the_sum_is_in_fp32_and_in_order(senders: int, bits: int) -> None:
    """What is sent and what remains make up the values; the sum is that of fp32 addition in rank order."""
    for numel in (1, 1023, 50_001):
        layout = bitmap_sparse.BitmapLayout(numel, 0.2, bits)
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
        total = sent[0].clone()
        for row in sent[1:]:
            total += row
        assert torch.equal(bitmap_sparse.decode_sum(wires, layout), total)


def test_what_does_not_fit_is_not_lost() -> None:
    layout = bitmap_sparse.BitmapLayout(10_000, 0.05)
    x = gradients(2, 10_000)
    rest = torch.empty_like(x)
    wires = bitmap_sparse.encode(x, torch.zeros(2), layout, rest)
    sent = x - rest
    assert (sent != 0).sum(1).tolist() == [layout.capacity] * 2
    assert torch.equal(bitmap_sparse.decode_sum(wires, layout), sent[0] + sent[1])
    assert torch.equal(rest[:, 2000:], x[:, 2000:]), "the first values are sent"


def test_non_finite_values_show_in_their_row() -> None:
    layout = bitmap_sparse.BitmapLayout(5_000, 0.3)
    x = gradients(3, 5_000)
    for value in (float("nan"), float("inf")):
        x[1, 1500] = value
        total = bitmap_sparse.decode_sum(bitmap_sparse.encode(x, torch.ones(3), layout), layout)
        assert total[1024:2048].isnan().all() and total[:1024].isfinite().all()
        assert total[2048:].isfinite().all()


def test_bytes() -> None:
    layout = bitmap_sparse.BitmapLayout(10_000_000, 0.2)
    bits = 0.2 * 16 + 1 + 32 / 4096 + 8 / 1024
    assert 8 * layout.wire_bytes / layout.numel == pytest.approx(bits, abs=0.001)
    with pytest.raises(ValueError, match="share"):
        bitmap_sparse.BitmapLayout(10, 0.0)
    with pytest.raises(ValueError, match="x is"):
        bitmap_sparse.encode(torch.zeros(1, 9), torch.zeros(1), bitmap_sparse.BitmapLayout(10, 0.2))


def test_starts() -> None:
    """How many values come before every fourth row, of those that are sent."""
    layout = bitmap_sparse.BitmapLayout(30_000, 0.1)
    x = gradients(2, 30_000)
    rest = torch.empty_like(x)
    wires = bitmap_sparse.encode(x, torch.tensor([1.0, 8.0]), layout, rest)
    starts = wires[:, layout.starts_at :].view(torch.int32)[:, : layout.tiles]
    sent = torch.nn.functional.pad(x != rest, (0, 2 * 4096)).view(2, -1)
    for tile in range(layout.tiles):
        assert torch.equal(starts[:, tile], sent[:, : 4096 * tile].sum(1).int())
    assert starts[0, -1] == layout.capacity > starts[1, -1] > 0


@pytest.mark.slow
def test_kernels_reproduce_the_reference() -> None:
    assert output_interpreted(__file__, "sizes") == "12 cases"


@pytest.mark.slow
def test_kernels_send_what_the_reference_sends() -> None:
    assert output_interpreted(__file__, "edges") == "2 cases"


def edge_cases() -> None:
    """Where a value is just sent or just not: half a step, the threshold itself, the smallest exponent."""
    from taco_kernels.bitmap_sparse import launch, reference

    for bits in (8, 16):
        layout = bitmap_sparse.BitmapLayout(9 * 1024, 1.0, bits)
        x = torch.zeros(9, 1024)
        ranks = torch.arange(1023) - 511.0
        for row, exponent in enumerate((0, 1, -94, -95, -96, 120, 127)):
            largest = 2.0**exponent
            step = largest * 2.0 ** (2 - bits)
            x[row, 0] = largest * (2 - 2.0**-20)  # rounds up, past the largest code
            halves = ranks[:1022] * step / 2
            x[row, 1:1023] = halves
            x[row, 700:800] = torch.nextafter(halves[700:800], halves[700:800] * 2)
            x[row, 800:900] = torch.nextafter(halves[800:900], torch.zeros(100))
            x[row, 512:522] = torch.tensor([0.5, -0.5]).repeat(5) * step
            x[row, 514:518] = torch.nextafter(x[row, 514:518], torch.zeros(4))
            x[row, 518:522] = torch.nextafter(x[row, 518:522], x[row, 518:522] * 2)
        x[7, :1023] = ranks * 1e-43  # denormal numbers
        x[8, :1023] = ranks
        x[8, 3] = -torch.inf
        x = x.view(1, -1).repeat(5, 1)
        x[4, -1] = torch.nan
        thresholds = torch.tensor([0.0, -0.0, float(x[0, 5]), 2.0**-15, torch.inf]).abs()
        thresholds[1] = -0.0
        rest, expected_rest = x.clone(), torch.empty_like(x)
        wires = launch.encode(rest, thresholds, layout, rest)
        assert torch.equal(wires, reference.encode(x, thresholds, layout, expected_rest)), bits
        torch.testing.assert_close(rest, expected_rest, rtol=0, atol=0, equal_nan=True)
    print("2 cases")


def reference_cases() -> None:
    """Sizes that divide nothing, a NaN, too many values, few rows: numel, share, bits, kept."""
    from taco_kernels.bitmap_sparse import launch, reference

    cases = 0
    for numel, share, bits, keep in (
        (3_003, 0.1, 16, 0.1),
        (4_096, 0.3, 16, 0.5),
        (3_074, 0.4, 8, 0.4),
        (5_125, 0.05, 8, 0.5),  # no room for most rows
        (2_050, 1.0, 16, 1.0),
        (1, 0.5, 16, 1.0),
    ):
        layout = bitmap_sparse.BitmapLayout(numel, share, bits)
        x = gradients(3, numel)
        x[0, numel // 2] = 1e-40
        x[1, numel // 3] = float("nan") if numel % 2 else 3e38
        x[2, :1024] *= 2.0**-120  # below the smallest exponent
        thresholds = share_threshold(x.nan_to_num(0), keep)
        thresholds[2] = -0.0 if numel % 4 == 2 else thresholds[2]
        expected_rest = torch.empty_like(x)
        expected = reference.encode(x, thresholds, layout, expected_rest)
        strided = torch.empty(3, numel + 3)[:, :numel]
        for rest in (x.clone(), strided if cases % 4 else None):  # in place, elsewhere, not kept
            source = x if rest is strided or rest is None else rest
            wires = launch.encode(source, thresholds, layout, rest)
            assert torch.equal(wires, expected)
            if rest is not None:
                torch.testing.assert_close(rest, expected_rest, rtol=0, atol=0, equal_nan=True)
            cases += 1
        total, expected_total = launch.decode_sum(wires, layout), reference.decode_sum(wires, layout)
        torch.testing.assert_close(total, expected_total, rtol=0, atol=0, equal_nan=True)
        assert bool(total.isnan().any()) == bool(numel % 2)
    print(cases, "cases")


if __name__ == "__main__":
    speed_up()
    {"sizes": reference_cases, "edges": edge_cases}[sys.argv[1]]()
