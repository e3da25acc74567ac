"""Bitmap-sparse tensors: the definition, and the kernels under Triton's CPU interpreter, bit for bit."""

from functools import partial

import pytest
import torch

from taco_kernels import bitmap_sparse
from taco_kernels.bitmap_sparse import BitmapLayout, reference
from taco_kernels.count_sketch.selection import share_threshold
from tests.kernels.interpreter import failures_of_scenarios

EXACTLY = dict(rtol=0, atol=0, equal_nan=True)
"""For torch.testing.assert_close."""


def gradients(senders: int, numel: int, spread: float = 1.0) -> torch.Tensor:
    """fp32[W, numel] over six decades, or as many more as ``spread`` tells."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(senders, numel, generator=generator)
    sizes = torch.randn(senders, numel, generator=generator)
    return values * sizes.mul(spread).exp()


def sent_and_rest(
    senders: int, layout: BitmapLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients, their wires, and what was sent and what remains of them."""
    x = gradients(senders, layout.numel)
    rest = torch.empty_like(x)
    wires = bitmap_sparse.encode(x, share_threshold(x, layout.share), layout, rest)
    return x, wires, x - rest, rest


SENDERS_AND_BITS = pytest.mark.parametrize(("senders", "bits"), [(1, 16), (3, 8), (16, 16)])
SIZES = pytest.mark.parametrize("numel", (1, 1023, 50_001))


@SENDERS_AND_BITS
@SIZES
def test_the_sum_is_in_fp32_and_in_the_order_of_the_senders(
    numel: int, senders: int, bits: int
) -> None:
    layout = BitmapLayout(numel, 0.2, bits)
    _, wires, sent, _ = sent_and_rest(senders, layout)
    assert wires.shape == (senders, layout.wire_bytes)
    assert torch.equal(bitmap_sparse.decode_sum(wires, layout), sum(sent[1:], sent[0]))


@SENDERS_AND_BITS
@SIZES
def test_sent_values_are_rounded_and_their_errors_remain(
    numel: int, senders: int, bits: int
) -> None:
    x, _, sent, rest = sent_and_rest(senders, BitmapLayout(numel, 0.2, bits))
    errors = rest - torch.where(sent == 0, x, 0.0)
    assert errors.norm() / sent.norm() < (1e-3 if bits == 16 else 0.1)


@SENDERS_AND_BITS
@SIZES
def test_no_more_than_the_share_is_sent(numel: int, senders: int, bits: int) -> None:
    layout = BitmapLayout(numel, 0.2, bits)
    _, _, sent, _ = sent_and_rest(senders, layout)
    assert ((sent != 0).sum(1) <= layout.capacity).all()


def test_nearly_the_share_is_sent_of_a_large_shard() -> None:
    """Codes have 16 bits: in 8 many of the values are rounded to zero."""
    _, _, sent, _ = sent_and_rest(3, BitmapLayout(50_001, 0.2, 16))
    assert ((sent != 0).sum(1) > 0.19 * 50_001).all()


def test_the_threshold_of_a_sample_errs_on_the_safe_side() -> None:
    """A wire with too many values to send would leave out the last of them, not the smallest."""
    x = torch.randn(1, 1_000_003, generator=torch.Generator().manual_seed(0))
    share = 0.05

    threshold = share_threshold(x, share)

    reached = float((x.abs() >= threshold).float().mean())
    assert 0.9 * share < reached <= share


def test_a_remainder_may_take_the_place_of_the_values() -> None:
    layout = BitmapLayout(5_000, 0.2)
    x = gradients(2, 5_000)
    thresholds = share_threshold(x, layout.share)
    rest = torch.empty_like(x)
    wires = bitmap_sparse.encode(x, thresholds, layout, rest)
    in_place = x.clone()
    assert torch.equal(bitmap_sparse.encode(in_place, thresholds, layout, in_place), wires)
    assert torch.equal(in_place, rest)


@pytest.fixture(scope="module")
def overfull() -> tuple[BitmapLayout, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layout, gradients of which the first sender keeps more than fit, their wires, and the rest."""
    layout = BitmapLayout(30_000, 0.1)
    x = gradients(2, 30_000)
    rest = torch.empty_like(x)
    wires = bitmap_sparse.encode(x, torch.tensor([0.0, 8.0]), layout, rest)
    return layout, x, wires, rest


def test_the_first_values_are_sent_of_too_many(overfull) -> None:
    layout, x, wires, rest = overfull
    sent = x - rest
    assert (sent[0] != 0).sum() == layout.capacity > (sent[1] != 0).sum() > 0
    assert torch.equal(bitmap_sparse.decode_sum(wires, layout), sent[0] + sent[1])


def test_what_does_not_fit_remains(overfull) -> None:
    _, x, _, rest = overfull
    assert torch.equal(rest[0, 8000:], x[0, 8000:])


def test_starts_count_the_values_before_every_fourth_row(overfull) -> None:
    layout, x, wires, rest = overfull
    starts = wires[:, layout.starts_at :].view(torch.int32)[:, : layout.tiles]
    is_sent = torch.nn.functional.pad(x != rest, (0, 2 * 4096)).view(2, -1)
    for tile in range(layout.tiles):
        assert torch.equal(starts[:, tile], is_sent[:, : 4096 * tile].sum(1).int())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_value_shows_in_its_row_alone(value: float) -> None:
    layout = BitmapLayout(5_000, 0.3)
    x = gradients(3, 5_000)
    x[1, 1500] = value
    total = bitmap_sparse.decode_sum(bitmap_sparse.encode(x, torch.ones(3), layout), layout)
    assert total[1024:2048].isnan().all()
    assert total[:1024].isfinite().all() and total[2048:].isfinite().all()


def test_a_wire_has_the_bytes_of_its_parts() -> None:
    """Values, a bit each of the bitmap, an int32 every 4 rows, a byte a row."""
    layout = BitmapLayout(10_000_000, 0.2)
    bits = 0.2 * 16 + 1 + 32 / 4096 + 8 / 1024
    assert 8 * layout.wire_bytes / layout.numel == pytest.approx(bits, abs=0.001)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="share"):
        BitmapLayout(10, 0.0)


# The kernels, interpreted


def edges() -> torch.Tensor:
    """fp32[1, 9 * 1024] of values just sent or not: half a step, the least exponent, denormal numbers."""
    x = torch.zeros(9, 1024)
    numbers = torch.arange(1023) - 511.0
    for row, exponent in enumerate((0, 1, -94, -95, -96, 120, 127)):
        largest = 2.0**exponent
        step = largest * 2.0**-6
        x[row, 0] = largest * (2 - 2.0**-20)  # rounds up, past the largest code
        halves = numbers[:1022] * step / 2
        x[row, 1:1023] = halves
        x[row, 700:800] = torch.nextafter(halves[700:800], halves[700:800] * 2)
        x[row, 800:900] = torch.nextafter(halves[800:900], torch.zeros(100))
    x[7, :1023] = numbers * 1e-43
    x[8, :1023] = numbers
    x[8, 3] = -torch.inf
    return x.view(1, -1)


def check_kernels(
    kernels, x: torch.Tensor, thresholds: torch.Tensor, layout: BitmapLayout, device: str = "cpu"
) -> None:
    """Compare kernels with the reference: in place, into another tensor, without a remainder.

    Args:
        kernels: module with ``encode`` and ``decode_sum``.
        x: fp32[W, numel] on the host.
        thresholds: fp32[W].
        layout: of a shard.
        device: that the kernels run on.
    """
    expected_rest = torch.empty_like(x)
    expected = reference.encode(x, thresholds, layout, expected_rest)
    source = x.to(device)
    in_place = x.to(device, copy=True)
    strided = torch.empty(len(x), layout.numel + 3, device=device)[:, : layout.numel]
    for values, rest in ((in_place, in_place), (source, strided), (source, None)):
        wires = kernels.encode(values, thresholds.to(device), layout, rest)
        assert torch.equal(wires.cpu(), expected)
        if rest is not None:
            torch.testing.assert_close(rest.cpu(), expected_rest, **EXACTLY)
    total = kernels.decode_sum(wires, layout).cpu()
    torch.testing.assert_close(total, reference.decode_sum(expected, layout), **EXACTLY)


def check_gradients(numel: int, share: float, bits: int, keep: float) -> None:
    """Three senders: a denormal number, what is not finite or nearly so, and rows below all exponents.

    Args:
        numel: values of a shard.
        share: of the values that a wire has room for.
        bits: of a code.
        keep: share of the values that reach the threshold.
    """
    from taco_kernels.bitmap_sparse import launch

    x = gradients(3, numel)
    x[0, numel // 2] = 1e-40
    x[1, numel // 3] = float("nan") if numel % 2 else 3e38
    x[2, :1024] *= 2.0**-120
    thresholds = share_threshold(x.nan_to_num(0), keep)
    check_kernels(launch, x, thresholds, BitmapLayout(numel, share, bits))


def check_edges(bits: int) -> None:
    """Thresholds of nothing, of a value that is there, and of infinity."""
    from taco_kernels.bitmap_sparse import launch

    x = edges().repeat(3, 1)
    thresholds = torch.tensor([-0.0, float(x[0, 5].abs()), torch.inf])
    check_kernels(launch, x, thresholds, BitmapLayout(x.shape[1], 1.0, bits))


SCENARIOS = {
    "a size that divides nothing": partial(check_gradients, 3_003, 0.1, 16, 0.1),
    "no room for most rows": partial(check_gradients, 5_126, 0.05, 8, 0.5),
    "everything is sent": partial(check_gradients, 2_048, 1.0, 16, 1.0),
    "one value": partial(check_gradients, 1, 0.5, 16, 1.0),
    "edges in 8 bits": partial(check_edges, 8),
    "edges in 16 bits": partial(check_edges, 16),
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of_scenarios(__name__)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kernels_reproduce_the_reference(scenario: str, failures: dict[str, str]) -> None:
    assert not failures[scenario], failures[scenario]
