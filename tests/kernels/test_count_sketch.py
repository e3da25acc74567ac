"""The count sketch: exactness, its bound, overflow, non-finite values, determinism."""

import pytest
import torch

from taco_kernels import count_sketch as sketch
from taco_kernels.count_sketch.sketch import grid_steps, row_hashes

SEED = 1234567890123


def sparse(senders: int, numel: int, density: float, seed: int = 0) -> torch.Tensor:
    """fp32[W, numel] over six decades, whose supports have the given union density."""
    g = torch.Generator().manual_seed(seed)
    share = 1 - (1 - density) ** (1 / senders)
    values = (
        torch.randn(senders, numel, generator=g) * torch.randn(senders, numel, generator=g).exp()
    )
    return values * (torch.rand(senders, numel, generator=g) < share)


def send(
    x: torch.Tensor, layout: sketch.SketchLayout, senders: int = 0
) -> tuple[torch.Tensor, ...]:
    """Wires, shared exponents and what was sent (x less the remainder) of senders x fp32[W, numel]."""
    exponents = sketch.row_exponents(x, layout).amax(0, keepdim=True)
    wires, sent = [], []
    for row in x:
        rest = torch.empty_like(row[None])
        none = torch.zeros(1)
        wires.append(
            sketch.encode(row[None], none, exponents, layout, senders or len(x), SEED, rest)
        )
        sent.append(row - rest[0])
    return torch.cat(wires), exponents[0], torch.stack(sent)


def receive(wires, exponents, layout: sketch.SketchLayout, senders: int) -> sketch.Decoded:
    """What the owner makes of the wires."""
    return sketch.decode(*sketch.combine(wires, layout), exponents, layout, senders, SEED)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality to the last bit; a zero's sign does not count."""
    return torch.equal((a + 0.0).view(torch.int32), (b + 0.0).view(torch.int32))


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """fp32 addition, one sender after the other."""
    return sum(x[1:], x[0])


@pytest.mark.parametrize(
    ("senders", "cell_bits", "sizes"),
    [
        (1, 32, (1, 31, 33, 30_011)),  # less than a row, rows that are not whole
        (2, 16, (4097, 2_200_000)),  # several blocks
        (3, 32, (200_000,)),
        (40, 16, (200_000,)),
    ],
)
def test_decode_is_the_fp32_sum_in_any_order_below_the_bound(senders, cell_bits, sizes) -> None:
    for numel in sizes:
        ratio = 4.0 if numel > 100_000 else 1.0
        layout = sketch.SketchLayout(sketch.SketchConfig(ratio=ratio, cell_bits=cell_bits), numel)
        x = sparse(senders, numel, 0.95 * layout.exact_density, seed=senders)
        wires, exponents, sent = send(x, layout)
        values, counters = receive(wires, exponents, layout, senders)
        parts = [
            sketch.pack(*sketch.combine(some, layout), layout) for some in wires.flip(0).split(2)
        ]
        again = receive(torch.stack(parts), exponents, layout, senders)
        assert torch.equal(values, again.values), "a sum of sums is the sum"
        assert counters.tolist() == [int((sent != 0).any(0).sum()), 0]
        assert same_bits(values, ordered_sum(sent)) and same_bits(values, ordered_sum(sent.flip(0)))
        # what was rounded away is small, and the sender knows it
        mantissa = layout.config.mantissa(senders)
        step = grid_steps(exponents, mantissa).repeat_interleave(layout.width)[:numel]
        assert bool(((x - sent).abs() <= step).all())


def test_the_index_of_many_senders_does_not_carry() -> None:
    """Every sender sets the same bits; summed counters of 1, 4 or 8 bits would spill over into neighbours."""
    senders = 300
    layout = sketch.SketchLayout(sketch.SketchConfig(), 5_000)
    x = torch.zeros(1, layout.numel)
    x[0, 64:5_000:8] = torch.arange(1.0, 618.0)
    wires, exponents, _ = send(x, layout, senders)
    cells, words = sketch.combine(wires.expand(senders, -1), layout)
    bits = (words[:, None] >> torch.arange(32) & 1).view(-1)[: layout.numel]
    assert torch.equal(bits.bool(), x[0] != 0)
    values, counters = sketch.decode(cells, words, exponents, layout, senders, SEED)
    assert counters.tolist() == [617, 0]
    assert torch.equal(values, x[0] * senders)


def test_above_the_bound_the_error_is_counted_and_bounded() -> None:
    layout = sketch.SketchLayout(sketch.SketchConfig(), 300_000)
    for factor in (1.12, 1.5, 4.0):
        x = sparse(4, layout.numel, min(1.0, factor * layout.exact_density))
        wires, exponents, sent = send(x, layout)
        values, counters = receive(wires, exponents, layout, 4)
        exact = ordered_sum(sent)
        wrong = values != exact
        union, leftovers = counters.tolist()
        assert union == int((sent != 0).any(0).sum())
        assert 0 < int(wrong.sum()) <= leftovers <= union
        # a median of three estimates, each off by the values it cannot tell apart: wide, but unbiased
        error = (values - exact).double()
        assert float(error.norm() / exact.double().norm()) < 4
        assert abs(float((error / exact.double().std()).mean())) < 0.05


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_non_finite_values_stay_visible_and_stay_in_their_row(value: float) -> None:
    layout = sketch.SketchLayout(sketch.SketchConfig(), 100_000)
    x = sparse(3, layout.numel, 0.1)
    clean = x.clone()
    x[1, 777] = value
    wires, exponents, _ = send(x, layout)
    values, counters = receive(wires, exponents, layout, 3)
    row = slice(777 // layout.width * layout.width, (777 // layout.width + 1) * layout.width)
    assert values[row].isnan().all() and int(counters[1]) == 0
    _, _, sent = send(clean, layout)
    other = torch.ones(layout.numel, dtype=torch.bool)
    other[row] = False
    assert torch.equal(values[other], ordered_sum(sent)[other])


@pytest.mark.parametrize(("numel", "ratio"), [(3_000_001, 4.0), (300_000, 16.0)])
def test_no_two_rows_of_a_block_share_all_three_sketch_rows(numel: int, ratio: float) -> None:
    """Their elements could not be told apart; and otherwise the rows of a sketch are as good as drawn."""
    layout = sketch.SketchLayout(sketch.SketchConfig(ratio=ratio), numel)
    places, masks, signs = row_hashes(layout, SEED)
    assert not torch.equal(places, row_hashes(layout, SEED + 1)[0]), "hashes depend on the seed"
    assert (masks >= 0).all() and (masks < layout.width).all() and (signs.abs() == 1).all()
    assert len(places.unique(dim=0)) == layout.rows
    for j in range(3):
        members = places[:, j].bincount(minlength=layout.blocks * 3 * layout.third)
        members = members.view(-1, layout.third)[j::3].double()
        drawn = members.mean(1, keepdim=True)
        spread = (members - drawn).square().div(drawn).sum() / (
            layout.blocks * max(1, layout.third - 1)
        )
        assert 0.5 < spread < 1.5, "a chi-square of as many degrees of freedom"


@pytest.mark.parametrize(("senders", "alike"), [(1, 0.0), (4, 0.7), (16, 0.0)])
def test_chosen_thresholds_fill_the_sketch_and_do_not_overflow_it(
    senders: int, alike: float
) -> None:
    g = torch.Generator().manual_seed(senders)
    layout = sketch.SketchLayout(sketch.SketchConfig(), 200_000)
    shared = torch.randn(1, layout.numel, generator=g).exp() * torch.randn(
        1, layout.numel, generator=g
    )
    noise = torch.randn(senders, layout.numel, generator=g).exp() * torch.randn(
        senders, layout.numel, generator=g
    )
    x = alike * shared + (1 - alike) * noise
    offers = [sketch.candidates(row[None], 0.2) for row in x]
    union = torch.stack([classes for _, classes in offers]).amax(0)
    chosen = [sketch.choose(thresholds, union, layout.exact_density) for thresholds, _ in offers]
    kept = torch.stack([row.abs() >= t for row, t in zip(x, chosen, strict=True)])
    assert kept.float().mean(1).max() < 0.206
    assert 0.8 * layout.exact_density < float(kept.any(0).float().mean()) < layout.exact_density


def test_errors_name_the_argument() -> None:
    for settings in ({"ratio": 0.1}, {"cell_bits": 8}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            sketch.SketchConfig(**settings)
    layout = sketch.SketchLayout(sketch.SketchConfig(), 1000)
    with pytest.raises(ValueError, match="senders"):
        layout.config.mantissa(5000)
