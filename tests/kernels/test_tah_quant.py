"""TAH-Quant's definition: what is transformed, who gets the bits, how many bytes, how large the error."""

import math

import pytest
import torch

from taco_kernels.tah_quant import TahConfig, decode, encode, layout_of, reference

SHAPES = ((32, 2, 64), (64, 3, 192), (7, 3, 100), (300, 1, 64), (5,), (3, 130), (2, 2, 2, 70), (1, 1, 1))
CONFIGS = (
    TahConfig(),
    TahConfig(allocation="tile"),
    TahConfig(tile_size=32, high_bits=4, low_bits=2, high_ratio=0.5),
    TahConfig(tile_size=128, high_bits=3, low_bits=2, allocation="tile"),
    TahConfig(high_bits=4, low_bits=4),
    TahConfig(transform="none"),
    TahConfig(high_ratio=1.0),
    TahConfig(high_ratio=0.0),
)


def activations(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Gaussian values with an outlier in every third tile of 64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[17::192] *= 40
    return x


def steps_and_pivots(wire: torch.Tensor, config: TahConfig, shape) -> tuple[torch.Tensor, torch.Tensor]:
    layout = layout_of(config, shape)
    steps, _ = reference.scales_of(wire, layout)
    return steps, reference.section(wire, "pivots", layout)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_stays_within_half_a_cell(config: TahConfig, shape: tuple[int, ...]) -> None:
    """Per tile: the error's norm is at most that of half a cell everywhere; a high tile's cell is a step."""
    x = activations(shape)
    wire = encode(x, config)
    assert wire.dtype == torch.uint8 and wire.numel() == layout_of(config, shape).wire_bytes
    result = decode(wire, config, shape, torch.float32)
    layout = layout_of(config, shape)
    error = reference.to_tiles(result - x, layout)
    steps, _ = reference.scales_of(wire, layout)
    cells = torch.full_like(steps, 2.0**config.extra_bits)
    if config.extra_bits:
        high = reference.unpack_widths(reference.section(wire, "widths", layout), layout)
        slots = reference.tile_slots(high, layout)
        assert (slots < layout.high_tiles).sum() == layout.high_tiles
        cells[slots < layout.high_tiles] = 1.0
    bound = 0.5 * steps * cells * math.sqrt(config.tile_size) * (1 + 1e-3) + 1e-5
    assert (error.norm(dim=1) <= bound).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_strides_and_dtypes(dtype: torch.dtype) -> None:
    """A transposed view encodes as its contiguous copy; the result has the type asked for."""
    x = activations((2, 40, 64)).to(dtype).transpose(0, 1)
    config = TahConfig()
    wire = encode(x, config)
    assert torch.equal(wire, encode(x.contiguous(), config))
    result = decode(wire, config, x.shape, dtype)
    assert result.dtype == dtype and result.shape == x.shape
    assert (result.float() - x.float()).norm() < 0.15 * x.float().norm()


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
    assert spread < (x[0].max() - x[0].min()) / 3
    back = reference.bring_forward(reference.hadamard(y[:2]) / 8, torch.tensor([37, 0]))
    assert back.allclose(x[:2], atol=1e-4)


def test_transform_pays_on_outliers() -> None:
    """With an outlier in a third of the tiles the control without the transform is far worse."""
    x = activations((64, 2, 256))
    errors = {}
    for transform in ("pivot-hadamard", "none"):
        config = TahConfig(transform=transform)
        result = decode(encode(x, config), config, x.shape, torch.float32)
        errors[transform] = float((result - x).norm())
    assert errors["pivot-hadamard"] < 0.5 * errors["none"]


def test_tokens_of_low_entropy_get_three_bits() -> None:
    """In each sequence the 80 % of tokens with the most even magnitudes are high; ties go to the first."""
    config, tokens, samples = TahConfig(), 20, 2
    x = torch.ones(tokens, samples, 128)
    peaked = {(3, 0), (7, 0), (11, 0), (19, 0), (0, 1), (1, 1), (2, 1), (5, 1)}
    for token, sample in peaked:
        x[token, sample, 1:] = 0.01 * (1 + token)
    layout = layout_of(config, x.shape)
    high = reference.choose_high(reference.entropy(reference.to_tiles(x, layout), layout), layout)
    assert high.shape == (samples, tokens) and high.sum(dim=1).tolist() == [16, 16]
    assert {(t, s) for s in range(samples) for t in range(tokens) if not high[s, t]} == peaked
    same = layout_of(config, (tokens, 1, 64))
    first = reference.choose_high(torch.ones(tokens), same)
    assert first[0].tolist() == [True] * 16 + [False] * 4


def test_entropy_is_shannons() -> None:
    layout = layout_of(TahConfig(), (6, 2, 128))
    x = activations((6, 2, 128))
    share = x.abs() / x.abs().sum(dim=-1, keepdim=True)
    expected = -(share * share.log2()).sum(dim=-1)
    assert reference.entropy(reference.to_tiles(x, layout), layout).allclose(expected.view(-1), rtol=1e-4)


@pytest.mark.parametrize("allocation", ("token", "tile"))
@pytest.mark.parametrize("shape", ((2048, 1, 4096), (1024, 4, 896), (512, 2, 1024)), ids=str)
def test_bits_per_value(allocation: str, shape: tuple[int, ...]) -> None:
    """At most 4.5 at the default settings with everything included; the same bytes for the same shape."""
    config = TahConfig(allocation=allocation)
    assert 8 * layout_of(config, shape).wire_bytes / math.prod(shape) <= 4.5
    small = (64, 2, 128)
    sizes = {encode(activations(small, seed), config).numel() for seed in range(3)}
    assert sizes == {layout_of(config, small).wire_bytes}


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf, -7e4, -1e6, 1e6, 3e38), ids=str)
@pytest.mark.parametrize("transform", ("pivot-hadamard", "none"))
def test_what_is_not_finite_stays_visible(value: float, transform: str) -> None:
    """The tile of a NaN, an infinity or a value beyond the range decodes to no finite value; others do."""
    config = TahConfig(transform=transform)
    x = activations((8, 1, 128))
    x[3, 0, 70:74] = value  # four of them: no single outlier that would be rotated away
    result = decode(encode(x, config), config, x.shape, torch.float32)
    assert not torch.isfinite(result[3, 0, 64:]).any()
    others = torch.ones_like(x, dtype=torch.bool)
    others[3, 0, 64:] = False
    assert torch.isfinite(result[others]).all()


@pytest.mark.parametrize("values", ((7e4,) * 4, (9e5,) * 4, (9e5,), (7e4, 1.0) * 32), ids=len)
@pytest.mark.parametrize("transform", ("pivot-hadamard", "none"))
def test_large_positive_values_decode(values: tuple[float, ...], transform: str) -> None:
    """Beyond fp16's range with a step inside it: as accurate as other tiles. One value alone is rotated."""
    config = TahConfig(transform=transform, high_ratio=1.0)
    x = activations((8, 1, 128)).abs()
    x[3, 0, 64 : 64 + len(values)] = torch.tensor(values)
    wire = encode(x, config)
    result = decode(wire, config, x.shape, torch.float32)
    steps, _ = reference.scales_of(wire, layout_of(config, x.shape))
    assert torch.isfinite(result).all()
    error = (result - x)[3, 0, 64:]
    assert error.norm() <= 0.5 * steps[7] * 8 * (1 + 1e-3)
    if transform == "none":
        assert error.abs().max() <= 0.5 * steps[7] * (1 + 1e-3)


def test_small_values_keep_the_resolution_of_fp16() -> None:
    """Steps are rounded up and never vanish: the error stays below half of fp16's smallest number, 2^-24."""
    x = activations((8, 1, 64)) * 1e-9
    config = TahConfig(high_ratio=1.0, transform="none")
    result = decode(encode(x, config), config, x.shape, torch.float32)
    assert (result - x).abs().max() <= 2.0**-25
    zero = torch.zeros(8, 1, 64)
    assert torch.equal(decode(encode(zero, config), config, zero.shape, torch.float32), zero)


@pytest.mark.parametrize("shape", ((0,), (0, 2, 64), (4, 0, 64), (4, 2, 0)), ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    config = TahConfig()
    wire = encode(torch.empty(shape), config)
    assert wire.numel() == layout_of(config, shape).wire_bytes == 0
    assert decode(wire, config, shape, torch.bfloat16).shape == shape


def test_wrong_settings_and_wires_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tile_size=48 is not supported; choose one of 32, 64, 128"):
        TahConfig(tile_size=48)
    with pytest.raises(ValueError, match="low_bits=5 and high_bits=4 must lie between 2 and 4"):
        TahConfig(low_bits=5)
    with pytest.raises(ValueError, match=r"high_ratio=1\.5 must lie between 0 and 1"):
        TahConfig(high_ratio=1.5)
    with pytest.raises(ValueError, match=r"needs torch.uint8\[2272\]"):
        decode(torch.zeros(100, dtype=torch.uint8), TahConfig(), (32, 2, 64), torch.float32)


def test_centred_cells_beat_end_points() -> None:
    """Dropping a code's last bit is a 3-bit grid of less squared error than one from minimum to maximum."""
    x = torch.randn(512, 1, 64, generator=torch.Generator().manual_seed(3))
    config = TahConfig(high_ratio=0.0, transform="none")
    ours = (decode(encode(x, config), config, x.shape, torch.float32) - x).square().mean()
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    step = (high - low) / 7
    plain = (low + ((x - low) / step).round() * step - x).square().mean()
    assert ours < 0.93 * plain
