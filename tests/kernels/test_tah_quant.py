"""TAH-Quant's definition: what is transformed, who gets the bits, how many bytes, how large the error;
and the kernels under Triton's CPU interpreter."""

import math

import pytest
import torch

from taco_kernels.tah_quant import TahConfig, decode, encode, layout_of, reference
from tests.kernels.interpreter import interpreted
from tests.kernels.wires.tah_quant import check_kernels, tokens

SHAPES = ((64, 3, 192), (7, 3, 100), (5,), (2, 2, 2, 70), (1, 1, 1))
CONFIGS = (
    TahConfig(),
    TahConfig(tile_size=32, high_bits=4, low_bits=2, high_ratio=0.5),
    TahConfig(tile_size=128, high_bits=3, low_bits=2, allocation="tile"),
    TahConfig(high_bits=4, low_bits=4),
    TahConfig(high_ratio=1.0),
    TahConfig(high_ratio=0.0),
)


def activations(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Gaussian values with an outlier in every third tile of 64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[17::192] *= 40
    return x


def high_units(x: torch.Tensor, config: TahConfig) -> torch.Tensor:
    """bool[populations, population]."""
    layout = layout_of(config, tuple(x.shape))
    return reference.choose_high(entropies(x, config), layout)


def entropies(x: torch.Tensor, config: TahConfig) -> torch.Tensor:
    """Of units, by sums of magnitudes."""
    layout = layout_of(config, tuple(x.shape))
    magnitude = reference.to_tiles(x, layout).abs()
    weighted = torch.special.xlogy(magnitude, magnitude) / math.log(2)
    return reference.entropies(magnitude.sum(1), weighted.sum(1), layout)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_round_trip_stays_within_half_a_cell(config: TahConfig) -> None:
    """Per tile: the error's norm is at most that of half a cell everywhere; a high tile's cell is a step."""
    for shape in SHAPES:
        x = activations(shape)
        wire = encode(x, config)
        assert wire.dtype == torch.uint8 and wire.numel() == layout_of(config, shape).wire_bytes
        result = decode(wire, config, shape, torch.float32)
        layout = layout_of(config, shape)
        error = reference.to_tiles(result - x, layout)
        steps, _ = reference.scales_of(wire, layout)
        cells = torch.full_like(steps, 2.0**config.extra_bits)
        if config.extra_bits:
            high = reference.slots_on(wire, layout) < layout.high_tiles
            assert high.sum() == layout.high_tiles
            cells[high] = 1.0
        bound = 0.5 * steps * cells * math.sqrt(config.tile_size) * (1 + 1e-3) + 1e-5
        assert (error.norm(dim=1) <= bound).all(), shape


def test_pivot_swap_and_hadamard() -> None:
    """Tiles with one outlier are swapped and rotated by an orthonormal matrix, whose row 0 is constant."""
    config = TahConfig()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).clamp(-2, 2)
    x[0, 37] = 50.0
    x[1, 0] = -50.0
    x[2, 5] = 3.9  # not twice the second
    x[2, 6] = 2.0
    x[3] = 0
    fits = torch.ones(4, dtype=torch.bool)
    y, pivots = reference.transform_tiles(x, fits, config)
    assert pivots.tolist() == [37 + 128, 0 + 128, 0, 0]
    assert torch.equal(y[2:], x[2:])
    assert y.norm(dim=1).allclose(x.norm(dim=1), rtol=1e-5)
    assert (y[0] - 50 / 8).abs().max() < 6, "the outlier has become an offset"
    spread = y[0].max() - y[0].min()
    assert spread < (x[0].max() - x[0].min()) / 3, "a third of the step"
    back = reference.bring_forward(reference.hadamard(y[:2]) / 8, torch.tensor([37, 0]))
    assert back.allclose(x[:2], atol=1e-4)


def test_tokens_of_low_entropy_get_three_bits() -> None:
    """In each sequence the 80 % of tokens with the most even magnitudes are high; ties go to the first."""
    config, tokens, samples = TahConfig(), 20, 2
    x = torch.ones(tokens, samples, 128)
    peaked = {(3, 0), (7, 0), (11, 0), (19, 0), (0, 1), (1, 1), (2, 1), (5, 1)}
    for token, sample in peaked:
        x[token, sample, 1:] = 0.01 * (1 + token)
    high = high_units(x, config)
    assert high.shape == (samples, tokens) and high.sum(dim=1).tolist() == [16, 16]
    assert {(t, s) for s in range(samples) for t in range(tokens) if not high[s, t]} == peaked
    assert high_units(torch.ones(tokens, 1, 64), config)[0].tolist() == [True] * 16 + [False] * 4
    share = x.abs() / x.abs().sum(dim=-1, keepdim=True)
    shannon = -(share * share.log2()).sum(dim=-1)
    assert entropies(x, config).allclose(shannon.view(-1), rtol=1e-4)


@pytest.mark.parametrize("allocation", ("token", "tile"))
def test_bits_per_value(allocation: str) -> None:
    """At most 4.5 at the default settings with everything included; the same bytes for the same shape."""
    config = TahConfig(allocation=allocation)
    for shape in ((2048, 1, 4096), (1024, 4, 896), (512, 2, 1024)):
        assert 8 * layout_of(config, shape).wire_bytes / math.prod(shape) <= 4.5
    sizes = {encode(activations((64, 2, 128), seed), config).numel() for seed in range(3)}
    assert sizes == {layout_of(config, (64, 2, 128)).wire_bytes}


@pytest.mark.parametrize("value", (math.nan, math.inf, -7e4, 1e6, 3e38), ids=str)
def test_what_is_not_finite_stays_visible(value: float) -> None:
    """The tile of a NaN, an infinity or a value beyond the range decodes to no finite value; others do."""
    config = TahConfig()
    x = activations((8, 1, 128))
    x[3, 0, 70:74] = value  # four of them: no single outlier that would be rotated away
    result = decode(encode(x, config), config, x.shape, torch.float32)
    assert not torch.isfinite(result[3, 0, 64:]).any()
    others = torch.ones_like(x, dtype=torch.bool)
    others[3, 0, 64:] = False
    assert torch.isfinite(result[others]).all()


@pytest.mark.parametrize("values", ((9e5,) * 4, (9e5,), (7e4, 1.0) * 32), ids=len)
def test_large_positive_values_decode(values: tuple[float, ...]) -> None:
    """Beyond fp16's range with a step inside it: as accurate as other tiles. One value alone is rotated."""
    config = TahConfig(high_ratio=1.0)
    x = activations((8, 1, 128)).abs()
    x[3, 0, 64 : 64 + len(values)] = torch.tensor(values)
    wire = encode(x, config)
    result = decode(wire, config, x.shape, torch.float32)
    steps, _ = reference.scales_of(wire, layout_of(config, x.shape))
    assert torch.isfinite(result).all()
    assert (result - x)[3, 0, 64:].norm() <= 0.5 * steps[7] * 8 * (1 + 1e-3)


@pytest.mark.slow
def test_kernels_reproduce_the_reference() -> None:
    interpreted(main)


def main() -> None:
    """Both kernels in a spread of settings; exits with a traceback on a difference."""
    from taco_kernels.tah_quant import launch

    cases = (
        (
            TahConfig(),
            (40, 2, 128),
            torch.bfloat16,
            None,
        ),  # several steps of programs, the last not full
        (TahConfig(), (33, 1, 192), torch.float32, float("nan")),  # three products a transform
        (
            TahConfig(allocation="tile", high_ratio=0.3),
            (7, 3, 100),
            torch.float16,
            None,
        ),  # padded rows
        (
            TahConfig(tile_size=32, low_bits=2),
            (35, 2, 64),
            torch.bfloat16,
            float("inf"),
        ),  # two extra bits
        (TahConfig(tile_size=128, high_bits=3, low_bits=2), (10, 2, 256), torch.float32, -1e5),
        (TahConfig(low_bits=4), (20, 2, 64), torch.bfloat16, 7e4),  # no extra bits: no choice
        (
            TahConfig(high_ratio=1.0, allocation="tile"),
            (9,),
            torch.float32,
            None,
        ),  # a part of one tile
    )
    for number, (config, shape, dtype, special) in enumerate(cases):
        x = tokens(shape, dtype, special, seed=number)
        if number == 0:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        check_kernels(launch, x, config)
