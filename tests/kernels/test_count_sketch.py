"""The count sketch: exactness, its bound, overflow, non-finite values, determinism."""

from typing import NamedTuple

import pytest
import torch

from taco_kernels import count_sketch as sketch
from taco_kernels.count_sketch.sketch import grid_steps, row_hashes

SEED = 1234567890123


def sparse(senders: int, numel: int, density: float, seed: int = 0) -> torch.Tensor:
    """fp32[W, numel] over six decades, whose supports have the given union density.

    Args:
        senders: W.
        numel: values of each.
        density: share of the values that any sender has.
        seed: of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    share = 1 - (1 - density) ** (1 / senders)
    values = torch.randn(senders, numel, generator=generator)
    values *= torch.randn(senders, numel, generator=generator).exp()
    return values * (torch.rand(senders, numel, generator=generator) < share)


class Sent(NamedTuple):
    """What senders encode."""

    wires: torch.Tensor
    """uint8[W, bytes]."""
    exponents: torch.Tensor
    """uint8[rows], shared."""
    values: torch.Tensor
    """fp32[W, numel]: each sender's values less the remainder."""


def send(x: torch.Tensor, layout: sketch.SketchLayout, senders: int | None = None) -> Sent:
    """Encode x fp32[W, numel]; on the grid of ``senders``, unless W."""
    exponents = sketch.row_exponents(x, layout).amax(0, keepdim=True)
    every_value = torch.zeros(1)  # threshold
    wires = []
    values = []
    for row in x:
        rest = torch.empty_like(row[None])
        wire = sketch.encode(
            row[None], every_value, exponents, layout, senders or len(x), SEED, rest
        )
        wires.append(wire)
        values.append(row - rest[0])
    return Sent(torch.cat(wires), exponents[0], torch.stack(values))


def receive(
    wires: torch.Tensor, exponents: torch.Tensor, layout: sketch.SketchLayout, senders: int
) -> sketch.Decoded:
    """Decode the senders' wires, as the owner of a shard does."""
    cells, words = sketch.combine(wires, layout)
    return sketch.decode(cells, words, exponents, layout, senders, SEED)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality to the last bit; a zero's sign does not count."""
    return torch.equal((a + 0.0).view(torch.int32), (b + 0.0).view(torch.int32))


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """fp32 addition, one sender after the other."""
    return sum(x[1:], x[0])


BELOW_THE_BOUND = pytest.mark.parametrize(
    ("senders", "cell_bits", "numel"),
    [
        (1, 32, 1),
        (1, 32, 31),  # less than a row
        (1, 32, 33),  # rows that are not whole
        (1, 32, 30_011),
        (2, 16, 4097),
        (2, 16, 2_200_000),  # several blocks
        (3, 32, 200_000),
        (40, 16, 200_000),
    ],
)


def below_the_bound(
    senders: int, cell_bits: int, numel: int
) -> tuple[sketch.SketchLayout, torch.Tensor, Sent]:
    """A layout, values nearly as dense as decode exactly, and what is sent of them."""
    ratio = 4.0 if numel > 100_000 else 1.0
    layout = sketch.SketchLayout(sketch.SketchConfig(ratio=ratio, cell_bits=cell_bits), numel)
    x = sparse(senders, numel, 0.95 * layout.exact_density, seed=senders)
    return layout, x, send(x, layout)


@BELOW_THE_BOUND
def test_decode_is_the_fp32_sum_in_any_order_below_the_bound(
    senders: int, cell_bits: int, numel: int
) -> None:
    layout, _, sent = below_the_bound(senders, cell_bits, numel)
    values, counters = receive(sent.wires, sent.exponents, layout, senders)
    assert counters.tolist() == [int((sent.values != 0).any(0).sum()), 0]
    assert same_bits(values, ordered_sum(sent.values))
    assert same_bits(values, ordered_sum(sent.values.flip(0)))


@BELOW_THE_BOUND
def test_a_sum_of_sums_is_the_sum(senders: int, cell_bits: int, numel: int) -> None:
    """Nodes may add up what they have and send that on."""
    layout, _, sent = below_the_bound(senders, cell_bits, numel)
    nodes = []
    for wires in sent.wires.flip(0).split(2):
        nodes.append(sketch.pack(*sketch.combine(wires, layout), layout))
    in_two = receive(torch.stack(nodes), sent.exponents, layout, senders)
    in_one = receive(sent.wires, sent.exponents, layout, senders)
    assert torch.equal(in_two.values, in_one.values)


@BELOW_THE_BOUND
def test_a_sender_knows_what_was_rounded_away(senders: int, cell_bits: int, numel: int) -> None:
    """The remainder is a step of the grid at most."""
    layout, x, sent = below_the_bound(senders, cell_bits, numel)
    mantissa = layout.config.mantissa(senders)
    step = grid_steps(sent.exponents, mantissa).repeat_interleave(layout.width)[:numel]
    assert ((x - sent.values).abs() <= step).all()


def test_the_index_of_many_senders_does_not_carry() -> None:
    """Every sender sets the same bits; summed counters of 1, 4 or 8 bits would spill over into neighbours."""
    senders = 300
    layout = sketch.SketchLayout(sketch.SketchConfig(), 5_000)
    x = torch.zeros(1, layout.numel)
    x[0, 64:5_000:8] = torch.arange(1.0, 618.0)
    sent = send(x, layout, senders)
    cells, words = sketch.combine(sent.wires.expand(senders, -1), layout)
    bits = (words[:, None] >> torch.arange(32) & 1).view(-1)[: layout.numel]
    assert torch.equal(bits.bool(), x[0] != 0)
    values, counters = sketch.decode(cells, words, sent.exponents, layout, senders, SEED)
    assert counters.tolist() == [617, 0]
    assert torch.equal(values, x[0] * senders)


@pytest.mark.parametrize("load", (1.12, 1.5, 4.0))
def test_above_the_bound_the_error_is_counted_and_bounded(load: float) -> None:
    layout = sketch.SketchLayout(sketch.SketchConfig(), 300_000)
    x = sparse(4, layout.numel, min(1.0, load * layout.exact_density))
    sent = send(x, layout)
    values, counters = receive(sent.wires, sent.exponents, layout, 4)
    exact = ordered_sum(sent.values)
    union, leftovers = counters.tolist()
    assert union == int((sent.values != 0).any(0).sum())
    assert 0 < int((values != exact).sum()) <= leftovers <= union
    # a median of three estimates, each off by the values it cannot tell apart: wide, but unbiased
    error = (values - exact).double()
    assert error.norm() / exact.double().norm() < 4
    assert (error / exact.double().std()).mean().abs() < 0.05


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_non_finite_values_stay_visible_and_stay_in_their_row(value: float) -> None:
    layout = sketch.SketchLayout(sketch.SketchConfig(), 100_000)
    clean = sparse(3, layout.numel, 0.1)
    x = clean.clone()
    x[1, 777] = value
    sent = send(x, layout)
    values, counters = receive(sent.wires, sent.exponents, layout, 3)
    first = 777 // layout.width * layout.width
    in_row = torch.zeros(layout.numel, dtype=torch.bool)
    in_row[first : first + layout.width] = True
    assert values[in_row].isnan().all() and counters[1] == 0
    expected = ordered_sum(send(clean, layout).values)
    assert torch.equal(values[~in_row], expected[~in_row])


LARGE_SKETCHES = pytest.mark.parametrize(("numel", "ratio"), [(3_000_001, 4.0), (300_000, 16.0)])


def layout_of(numel: int, ratio: float) -> sketch.SketchLayout:
    """A layout with so many values a cell."""
    return sketch.SketchLayout(sketch.SketchConfig(ratio=ratio), numel)


@LARGE_SKETCHES
def test_no_two_rows_of_a_block_share_all_three_sketch_rows(numel: int, ratio: float) -> None:
    """Their elements could not be told apart."""
    layout = layout_of(numel, ratio)
    assert len(row_hashes(layout, SEED).sketch_rows.unique(dim=0)) == layout.rows


@LARGE_SKETCHES
def test_hashes_depend_on_the_seed(numel: int, ratio: float) -> None:
    layout = layout_of(numel, ratio)
    sketch_rows = row_hashes(layout, SEED).sketch_rows
    assert not torch.equal(sketch_rows, row_hashes(layout, SEED + 1).sketch_rows)


@LARGE_SKETCHES
def test_masks_stay_in_the_row_and_signs_are_signs(numel: int, ratio: float) -> None:
    layout = layout_of(numel, ratio)
    _, masks, signs = row_hashes(layout, SEED)
    assert (masks >= 0).all() and (masks < layout.width).all()
    assert (signs.abs() == 1).all()


@LARGE_SKETCHES
def test_rows_spread_over_the_sketch_as_if_drawn(numel: int, ratio: float) -> None:
    """A chi-square of each subtable has as many degrees of freedom as its blocks have rows less one."""
    layout = layout_of(numel, ratio)
    sketch_rows = row_hashes(layout, SEED).sketch_rows
    for j in range(3):
        members = sketch_rows[:, j].bincount(minlength=layout.blocks * 3 * layout.third)
        members = members.view(-1, layout.third)[j::3].double()
        expected = members.mean(1, keepdim=True)
        chi_square = (members - expected).square().div(expected).sum()
        freedom = layout.blocks * max(1, layout.third - 1)
        assert 0.5 < chi_square / freedom < 1.5


@pytest.mark.parametrize(("senders", "alike"), [(1, 0.0), (4, 0.7), (16, 0.0)])
def test_chosen_thresholds_fill_the_sketch_and_do_not_overflow_it(
    senders: int, alike: float
) -> None:
    """The senders' values may have a part in common, whose share is ``alike``, or nothing."""
    generator = torch.Generator().manual_seed(senders)
    layout = sketch.SketchLayout(sketch.SketchConfig(), 200_000)

    def heavy_tailed(rows: int) -> torch.Tensor:
        scale = torch.randn(rows, layout.numel, generator=generator).exp()
        return scale * torch.randn(rows, layout.numel, generator=generator)

    common = heavy_tailed(1)
    x = alike * common + (1 - alike) * heavy_tailed(senders)
    offers = [sketch.candidates(row[None], 0.2) for row in x]
    union = torch.stack([classes for _, classes in offers]).amax(0)
    chosen = [sketch.choose(thresholds, union, layout.exact_density) for thresholds, _ in offers]
    is_sent = x.abs() >= torch.cat(chosen)[:, None]
    assert is_sent.float().mean(1).max() < 0.206
    density = float(is_sent.any(0).float().mean())
    assert 0.8 * layout.exact_density < density < layout.exact_density


@pytest.mark.parametrize("settings", ({"ratio": 0.1}, {"cell_bits": 8}), ids=str)
def test_a_refusal_names_the_setting(settings: dict) -> None:
    [name] = settings
    with pytest.raises(ValueError, match=name):
        sketch.SketchConfig(**settings)


def test_too_many_senders_are_refused() -> None:
    with pytest.raises(ValueError, match="senders"):
        sketch.SketchConfig().mantissa(5000)
