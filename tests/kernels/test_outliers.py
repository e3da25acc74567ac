"""Outliers: what becomes of their neighbours, in one message and in sums; and the kernels, interpreted."""

from functools import partial

import pytest
import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.codecs.recipes import RECIPES
from taco_kernels.taco import CodecConfig, outliers, reference
from tests.kernels.interpreter import failures_of_scenarios, small_tiles
from tests.kernels.wires.outliers import Operations, check_operations

PIPELINE = RECIPES["pipeline_parallel"][0].compression
PIPELINE_BACKWARD = "int6:group=32,scales=single,hadamard=off,outliers=on"
SUMMED = (
    "int6:outliers=on",
    "int8:outliers=on",
    "int5:outliers=on",
    "taco:outliers=on",
    PIPELINE_BACKWARD,
)
"""Codecs that can be summed."""
MAGNITUDES = (100.0, 1000.0, 10000.0)
"""How large outliers are; other values are Gaussian."""
NUMEL = 16 * 1024


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return fp32 Gaussian values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(result: torch.Tensor, exact: torch.Tensor, counted: torch.Tensor) -> float:
    """Return the relative L2 error of the values in a mask."""
    return float((result - exact)[counted].norm() / exact[counted].norm())


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("spec", (*SUMMED, PIPELINE))
def test_neighbours_keep_their_error(spec: str, magnitude: float) -> None:
    """One outlier in a group of 128: the others' error is that without it, in its group and elsewhere."""
    codec = parse_codec(spec)
    x = gaussian(1, 300, 1, 128)
    shape = x.shape[1:]
    massive = x.clone()
    massive[0, 7, 0, 40] = -magnitude
    without = codec.decode(codec.encode(x), shape, torch.float32)
    decoded = codec.decode(codec.encode(massive), shape, torch.float32)

    elsewhere = torch.ones(x.shape, dtype=torch.bool)
    elsewhere[0, 7, 0, 40] = False
    in_its_group = torch.zeros(x.shape, dtype=torch.bool)
    in_its_group[0, 7] = elsewhere[0, 7]
    for counted in (elsewhere, in_its_group):
        assert error(decoded, massive, counted) <= 1.1 * error(without, x, counted)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("spec", (*SUMMED, PIPELINE))
def test_an_outlier_comes_back(spec: str, magnitude: float) -> None:
    """It is right to 12 bits, and to the error of the zero that it leaves."""
    codec = parse_codec(spec)
    x = gaussian(1, 300, 1, 128)
    x[0, 7, 0, 40] = -magnitude
    decoded = codec.decode(codec.encode(x), x.shape[1:], torch.float32)
    assert abs(float(decoded[0, 7, 0, 40]) + magnitude) < 0.1 + 2**-11 * magnitude


def errors_of_sums(spec: str, senders: list[torch.Tensor], counted: torch.Tensor) -> list[float]:
    """Return the errors of a sum that is decoded (reduce-scatter), and of one encoded again (all-reduce)."""
    codec = parse_codec(spec)
    payloads = torch.stack([codec.encode(row) for row in senders])
    exact = sum(senders)
    total = codec.decode_sum(payloads, (NUMEL,), torch.float32)
    again = codec.decode_sum_encode(payloads, (NUMEL,), codec)
    decoded_again = codec.decode(again, (NUMEL,), torch.float32)
    return [error(total, exact, counted), error(decoded_again, exact, counted)]


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("spec", SUMMED)
def test_neighbours_in_sums_keep_their_error(spec: str, magnitude: float) -> None:
    """Four ranks have an outlier each, in the first group of every block, at different positions."""
    positions = [3, 40, 77, 126]
    senders = [gaussian(1, NUMEL, seed=seed) for seed in range(4)]
    neighbours = torch.zeros(1, NUMEL, dtype=torch.bool)
    neighbours.view(-1, outliers.BLOCK)[:, :128] = True
    neighbours.view(-1, outliers.BLOCK)[:, positions] = False
    massive = [row.clone() for row in senders]
    for rank, position in enumerate(positions):
        massive[rank].view(-1, outliers.BLOCK)[:, position] = magnitude * (-1) ** rank
    without = errors_of_sums(spec, senders, neighbours)
    for result, bound in zip(errors_of_sums(spec, massive, neighbours), without, strict=True):
        assert result <= 1.1 * bound


@pytest.mark.parametrize("format, scales", [("int6", "signed"), ("fp8-e4m3", "dual")])
def test_ordinary_values_have_the_same_bits(format: str, scales: str) -> None:
    """Lists of zeros follow the wire of the codec without the setting."""
    x = gaussian(5120).bfloat16()
    on = CodecConfig(format, 128, scales, outliers=True)
    off = CodecConfig(format, 128, scales)
    wires = reference.encode(x, on)
    without = reference.encode(x, off)
    split = without.shape[1]
    assert torch.equal(wires[:, :split], without)
    assert not wires[:, split:].any()
    blocks = 3  # of 2048 values
    assert wires.shape[1] == on.wire_bytes(5120) == off.wire_bytes(5120) + 32 * blocks


@pytest.mark.parametrize(
    "dtype, within",
    [(torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.float32, 2**-12)],
    ids=str,
)
def test_a_word_gives_its_value_back(dtype: torch.dtype, within: float) -> None:
    """Exactly in bf16 and fp16, to 12 bits in fp32."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4096, generator=g) * 10 ** torch.empty(4096).uniform_(-3, 4, generator=g)
    x = x.to(dtype).float()
    words = outliers.words_of(x)
    assert words.min() >= 0, "31 bits"
    assert ((outliers.values_of(words).view(-1) - x).abs() <= within * x.abs()).all()


TWELVE = CodecConfig("int8", 128, "signed", outliers=True)
"""The codec of a block with twelve outliers: four more than a list has slots."""


def twelve_outliers() -> torch.Tensor:
    """Return a block of Gaussian values with outliers of 500, 600, ... 1600."""
    x = gaussian(outliers.BLOCK)
    x[torch.arange(12) * 170 + 5] = torch.arange(12.0) * 100 + 500
    return x


def test_the_largest_outliers_are_listed() -> None:
    """The others stay in their groups; with the list nothing is lost."""
    x = twelve_outliers()
    words, rest = outliers.split(x.view(-1, 128))
    positions = (words[0] & (outliers.BLOCK - 1)).tolist()
    assert sorted(positions) == [170 * i + 5 for i in range(4, 12)]
    assert outliers.add(rest, words).view(-1).equal(x)


def test_lists_of_a_sum_that_overflow_lose_nothing() -> None:
    """Two senders' lists have 16 words: the 8 largest are sent, the others join their groups."""
    x = twelve_outliers()
    stack = torch.cat([reference.encode(x.roll(shift), TWELVE) for shift in (0, 40)])
    exact = reference.decode_sum(stack, TWELVE, x.shape, torch.float32)
    again = reference.decode_sum_encode(stack, TWELVE, x.numel())
    decoded = reference.decode(again[None], TWELVE, x.shape, torch.float32)
    assert (decoded - exact).norm() < 0.03 * exact.norm()
    listed = outliers.values_of(reference.lists_of(again, 16, TWELVE))
    assert listed.min() > 1200


# The kernels, interpreted


def check_kernels(config: CodecConfig, dtype: torch.dtype, count: int, seed: int) -> None:
    """Run every operation on values with ``count`` outliers, in several tiles of a block each."""
    from taco_kernels.taco import launch
    from taco_kernels.taco.spec import TUNING

    small_tiles(TUNING, outliers.BLOCK)
    check_operations(launch, config, dtype, count, (3, 1000), seed, "cpu")


CASES = (
    (CodecConfig("int6", 128, "signed", outliers=True), torch.bfloat16, (0, 1, 4)),
    (CodecConfig("int8", 32, "single", outliers=True), torch.float32, (2, 12)),
    (CodecConfig("fp8-e4m3", 128, "dual", outliers=True), torch.float16, (1, 12)),
    (CodecConfig("int4", 32, "signed", hadamard=False, outliers=True), torch.float32, (12,)),
    (CodecConfig("int5", 256, "signed", outliers=True), torch.float32, (12,)),
)
"""A spread of configurations, types, and numbers of outliers: none, a few, more than slots."""


def check_many_senders() -> None:
    """More senders than kernels unroll their loops for; the last one alone may have outliers."""
    from taco_kernels.taco import launch
    from taco_kernels.taco.spec import TUNING

    small_tiles(TUNING, outliers.BLOCK)
    config = CodecConfig("int6", 128, "signed", outliers=True)
    for count in (0, 3):
        quiet = Operations(launch, config, torch.float32, 0, (1, 2048), 1, "cpu")
        loud = quiet._replace(count=count)
        wires = torch.cat([quiet.wires_of_senders(9), loud.wires_of_senders(1)])
        quiet.check_decode_sum(wires)
        quiet.check_decode_sum_encode(wires, config)


SCENARIOS = {
    f"{config.format} {config.group_size}, {count} outliers": partial(
        check_kernels, config, dtype, count, seed=count
    )
    for config, dtype, counts in CASES
    for count in counts
} | {"ten senders": check_many_senders}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of_scenarios(__name__)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kernels_reproduce_the_reference(scenario: str, failures: dict[str, str]) -> None:
    assert not failures[scenario], failures[scenario]
