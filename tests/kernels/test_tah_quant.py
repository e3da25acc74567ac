"""TAH-Quant's definition: what is transformed, who gets the bits, how many bytes, how large the error;
and the kernels under Triton's CPU interpreter."""

import math
from functools import partial

import pytest
import torch

from taco_kernels.tah_quant import TahConfig, decode, encode, layout_of, reference
from tests.kernels.interpreter import failures_of_scenarios
from tests.kernels.wires.tah_quant import check_kernels, tokens

SHAPES = ((64, 3, 192), (7, 3, 100), (5,), (2, 2, 2, 70), (1, 1, 1))
"""Several samples and one, rows that are whole tiles and rows that are not, one value."""
CONFIGS = (
    TahConfig(),
    TahConfig(tile_size=32, high_bits=4, low_bits=2, high_ratio=0.5),
    TahConfig(tile_size=128, high_bits=3, low_bits=2, allocation="tile"),
    TahConfig(high_bits=4, low_bits=4),
    TahConfig(high_ratio=1.0),
    TahConfig(high_ratio=0.0),
)


def activations(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return Gaussian values with an outlier in every third tile of 64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[17::192] *= 40
    return x


def high_units(x: torch.Tensor, config: TahConfig) -> torch.Tensor:
    """Return which units are high, bool[populations, population]."""
    layout = layout_of(config, tuple(x.shape))
    return reference.choose_high(entropies(x, config), layout)


def entropies(x: torch.Tensor, config: TahConfig) -> torch.Tensor:
    """Return the entropies of units, fp32, by sums of magnitudes."""
    layout = layout_of(config, tuple(x.shape))
    magnitude = reference.to_tiles(x, layout).abs()
    weighted = torch.special.xlogy(magnitude, magnitude) / math.log(2)
    return reference.entropies(magnitude.sum(1), weighted.sum(1), layout)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_round_trip_stays_within_half_a_cell(config: TahConfig, shape: tuple[int, ...]) -> None:
    """A tile's error is at most half a cell everywhere. A high tile's cell is a step."""
    x = activations(shape)
    layout = layout_of(config, shape)
    wire = encode(x, config)
    assert wire.dtype == torch.uint8
    assert wire.numel() == layout.wire_bytes
    result = decode(wire, config, shape, torch.float32)
    error = reference.to_tiles(result - x, layout)
    steps, _ = reference.scales_of(wire, layout)
    cells = torch.full_like(steps, 2.0**config.extra_bits)
    if config.extra_bits:
        high = reference.slots_on(wire, layout) < layout.high_tiles
        assert high.sum() == layout.high_tiles
        cells[high] = 1.0
    bound = 0.5 * steps * cells * math.sqrt(config.tile_size) * (1 + 1e-3) + 1e-5
    assert (error.norm(dim=1) <= bound).all()


def pivot_tiles() -> torch.Tensor:
    """Return four tiles: an outlier in element 37, one in element 0, none twice the second, zeros."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).clamp(-2, 2)
    x[0, 37] = 50.0
    x[1, 0] = -50.0
    x[2, 5] = 3.9  # not twice the second
    x[2, 6] = 2.0
    x[3] = 0
    return x


def transformed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the codec makes of finite tiles, and their bytes of pivots."""
    return reference.transform_tiles(x, torch.ones(len(x), dtype=torch.bool), TahConfig())


def test_tiles_with_one_outlier_are_transformed() -> None:
    """The matrix is orthonormal; tiles without an outlier stay what they are."""
    x = pivot_tiles()
    y, pivots = transformed(x)
    assert pivots.tolist() == [37 + 128, 0 + 128, 0, 0]
    assert torch.equal(y[2:], x[2:])
    assert y.norm(dim=1).allclose(x.norm(dim=1), rtol=1e-5)


def test_an_outlier_becomes_an_offset() -> None:
    """Row 0 of the matrix is constant: the tile spreads over a third of what it did, and so does its step."""
    x = pivot_tiles()
    y, _ = transformed(x)
    assert (y[0] - 50 / 8).abs().max() < 6
    spread = y[0].max() - y[0].min()
    assert spread < (x[0].max() - x[0].min()) / 3


def test_the_transform_and_the_exchange_undo_themselves() -> None:
    x = pivot_tiles()
    y, _ = transformed(x)
    inverse = reference.hadamard(y[:2]) / 8
    again = reference.bring_forward(inverse, torch.tensor([37, 0]))
    assert again.allclose(x[:2], atol=1e-4)


TOKENS = 20
PEAKED = {(3, 0), (7, 0), (11, 0), (19, 0), (0, 1), (1, 1), (2, 1), (5, 1)}
"""Token and sample of rows whose first value is far larger than the others: a fifth of each sample."""


def peaked_rows() -> torch.Tensor:
    """Return fp32[TOKENS, 2, 128] of ones, but for PEAKED."""
    x = torch.ones(TOKENS, 2, 128)
    for token, sample in PEAKED:
        x[token, sample, 1:] = 0.01 * (1 + token)
    return x


def test_tokens_of_low_entropy_get_three_bits() -> None:
    """The 80 % of tokens of a sample with the most even magnitudes are high."""
    high = high_units(peaked_rows(), TahConfig())
    assert high.shape == (2, TOKENS)
    assert high.sum(dim=1).tolist() == [16, 16]
    low = {(token, sample) for sample, token in (~high).nonzero().tolist()}
    assert low == PEAKED


def test_of_equal_entropies_the_first_are_high() -> None:
    high = high_units(torch.ones(TOKENS, 1, 64), TahConfig())
    assert high[0].tolist() == [True] * 16 + [False] * 4


def test_entropies_are_shannons() -> None:
    """They are made of magnitudes as shares of their sum, from the sums that kernels make."""
    x = peaked_rows()
    share = x.abs() / x.abs().sum(dim=-1, keepdim=True)
    shannon = -(share * share.log2()).sum(dim=-1)
    assert entropies(x, TahConfig()).allclose(shannon.view(-1), rtol=1e-4)


@pytest.mark.parametrize("allocation", ("token", "tile"))
@pytest.mark.parametrize("shape", ((2048, 1, 4096), (1024, 4, 896), (512, 2, 1024)), ids=str)
def test_bits_per_value(allocation: str, shape: tuple[int, ...]) -> None:
    """At most 4.5 at the default settings with everything included."""
    config = TahConfig(allocation=allocation)
    assert 8 * layout_of(config, shape).wire_bytes / math.prod(shape) <= 4.5


@pytest.mark.parametrize("allocation", ("token", "tile"))
def test_a_shape_has_a_size(allocation: str) -> None:
    """Whatever the values are."""
    config = TahConfig(allocation=allocation)
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


# The kernels, interpreted


def check_case(
    config: TahConfig,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    special: float | None,
    seed: int,
    strided: bool = False,
) -> None:
    """Encode and decode a tensor by the kernels; ``special`` is a value that some elements have."""
    from taco_kernels.tah_quant import launch

    x = tokens(shape, dtype, special, seed=seed)
    if strided:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    check_kernels(launch, x, config)


BF16 = torch.bfloat16
CASES = {
    "several steps of programs, the last not full; transposed": (
        TahConfig(),
        (40, 2, 128),
        BF16,
        None,
    ),
    "fp32, three products a transform; NaN": (
        TahConfig(),
        (33, 1, 192),
        torch.float32,
        float("nan"),
    ),
    "rows that are not whole tiles; widths by tile": (
        TahConfig(allocation="tile", high_ratio=0.3),
        (7, 3, 100),
        torch.float16,
        None,
    ),
    "two extra bits; infinity": (
        TahConfig(tile_size=32, low_bits=2),
        (35, 2, 64),
        BF16,
        float("inf"),
    ),
    "beyond fp16's range below": (
        TahConfig(tile_size=128, high_bits=3, low_bits=2),
        (10, 2, 256),
        torch.float32,
        -1e5,
    ),
    "no extra bits, so no choice; beyond fp16's range": (
        TahConfig(low_bits=4),
        (20, 2, 64),
        BF16,
        7e4,
    ),
    "a part of one tile": (
        TahConfig(high_ratio=1.0, allocation="tile"),
        (9,),
        torch.float32,
        None,
    ),
}
SCENARIOS = {
    name: partial(check_case, *case, seed=seed, strided="transposed" in name)
    for seed, (name, case) in enumerate(CASES.items())
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of_scenarios(__name__)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kernels_reproduce_the_reference(scenario: str, failures: dict[str, str]) -> None:
    assert not failures[scenario], failures[scenario]


@pytest.mark.parametrize(("units", "high"), [(5, 4), (7, 5), (10, 8)])
def test_no_more_units_are_high_than_the_share(units: int, high: int) -> None:
    assert TahConfig(high_ratio=0.8).high_of(units) == high
