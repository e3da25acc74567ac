"""Outliers: what becomes of their neighbours, in one message and in sums; and the kernels, interpreted."""

import pytest
import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.codecs.recipes import RECIPES
from taco_kernels.taco import CodecConfig, outliers, reference
from tests.kernels.interpreter import interpreted, small_tiles
from tests.kernels.wires.outliers import check_operations

PIPELINE = RECIPES["pipeline_parallel"][0].compression
PIPELINE_BACKWARD = "int6:group=32,scales=single,hadamard=off,outliers=on"
SUMMED = (
    "int6:outliers=on",
    "int8:outliers=on",
    "int5:outliers=on",
    "taco:outliers=on",
    PIPELINE_BACKWARD,
)
MAGNITUDES = (100.0, 1000.0, 10000.0)
VALUES = 16 * 1024


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, exact: torch.Tensor, seen: torch.Tensor) -> float:
    return float((found - exact)[seen].norm() / exact[seen].norm())


@pytest.mark.parametrize("spec", (*SUMMED, PIPELINE))
def test_neighbours_keep_their_error(spec: str) -> None:
    """One outlier in a group of 128: the others' error is that without it, and it comes back."""
    codec, x = parse_codec(spec), values(1, 300, 1, 128)
    shape, others = x.shape[1:], torch.ones(x.shape, dtype=torch.bool)
    others[0, 7, 0, 40] = False
    group = others.clone()
    group[0, :7], group[0, 8:] = False, False
    plain = codec.decode(codec.encode(x), shape, torch.float32)
    for magnitude in MAGNITUDES:
        massive = x.clone()
        massive[0, 7, 0, 40] = -magnitude
        found = codec.decode(codec.encode(massive), shape, torch.float32)
        for seen in (others, group):
            assert error(found, massive, seen) <= 1.1 * error(plain, x, seen), magnitude
        assert abs(float(found[0, 7, 0, 40]) + magnitude) < 0.1 + 2**-11 * magnitude


@pytest.mark.parametrize("spec", SUMMED)
def test_sums_of_ranks_with_outliers_values_in_different_places(spec: str) -> None:
    """Four ranks' in the first group of each block: both exchanges of an all-reduce, and a reduce-scatter."""
    codec, senders = parse_codec(spec), [values(1, VALUES, seed=seed) for seed in range(4)]
    places = [3, 40, 77, 126]
    group = torch.zeros(1, VALUES, dtype=torch.bool)
    group.view(-1, outliers.BLOCK)[:, :128] = True
    group.view(-1, outliers.BLOCK)[:, places] = False

    def errors(rows: list[torch.Tensor]) -> tuple[float, float]:
        payloads = torch.stack([codec.encode(row) for row in rows])
        total = codec.decode_sum(payloads, (VALUES,), torch.float32)
        again = codec.decode_sum_encode(payloads, (VALUES,), codec)
        again = codec.decode(again, (VALUES,), torch.float32)
        return error(total, sum(rows), group), error(again, sum(rows), group)

    plain = errors(senders)
    for magnitude in MAGNITUDES:
        massive = [row.clone() for row in senders]
        for rank, place in enumerate(places):
            massive[rank].view(-1, outliers.BLOCK)[:, place] = magnitude * (-1) ** rank
        for found, bound in zip(errors(massive), plain, strict=True):
            assert found <= 1.1 * bound, magnitude


def test_ordinary_values_have_the_same_bits() -> None:
    """Lists of zeros behind the wire of the codec without the setting."""
    for format, scales in (("int6", "signed"), ("fp8-e4m3", "dual")):
        x, on = values(5120).bfloat16(), CodecConfig(format, 128, scales, outliers=True)
        off = CodecConfig(format, 128, scales)
        wires, plain = reference.encode(x, on), reference.encode(x, off)
        assert (
            torch.equal(wires[:, : plain.shape[1]], plain) and not wires[:, plain.shape[1] :].any()
        )
        assert wires.shape[1] == on.wire_bytes(5120) == off.wire_bytes(5120) + 3 * 32


def test_words_are_exact_in_bf16_and_fp16() -> None:
    """Every magnitude comes back from its word; fp32 to 12 bits."""
    g = torch.Generator().manual_seed(1)
    for dtype, within in ((torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.float32, 2**-12)):
        x = torch.randn(4096, generator=g) * 10 ** torch.empty(4096).uniform_(-3, 4, generator=g)
        x = x.to(dtype).float()
        words = outliers.words_of(x)
        assert words.min() >= 0
        assert ((outliers.values_of(words).view(-1) - x).abs() <= within * x.abs()).all()


def test_more_outliers_than_slots() -> None:
    """The largest are stored separately, the others stay in their groups; lists that overflow lose none."""
    config = CodecConfig("int8", 128, "signed", outliers=True)
    x = values(outliers.BLOCK)
    places = torch.arange(12) * 170 + 5
    x[places] = torch.arange(12.0) * 100 + 500
    words, rest = outliers.split(x.view(-1, 128))
    assert sorted((words[0] & 2047).tolist()) == places[4:].tolist()
    assert outliers.add(rest, words).view(-1).equal(x)
    stack = torch.cat([reference.encode(x.roll(shift), config) for shift in (0, 40)])
    exact = reference.decode_sum(stack, config, x.shape, torch.float32)
    again = reference.decode_sum_encode(stack, config, x.numel())
    found = reference.decode(again[None], config, x.shape, torch.float32)
    assert (found - exact).norm() < 0.03 * exact.norm()
    kept = outliers.values_of(reference.lists_of(again, 16, config))
    assert kept.min() > 1200, "of 16 words the 8 largest"


@pytest.mark.slow
def test_kernels_reproduce_the_reference() -> None:
    assert interpreted(main) == "9"


def main() -> int:
    """A spread of configurations, numbers of outliers and ends of tensors."""
    from taco_kernels.taco import launch
    from taco_kernels.taco.spec import TUNING

    small_tiles(TUNING, 2048)
    cases = 0
    for config, dtype, counts in (
        (CodecConfig("int6", 128, "signed", outliers=True), torch.bfloat16, (0, 1, 4)),
        (CodecConfig("int8", 32, "single", outliers=True), torch.float32, (2, 12)),
        (CodecConfig("fp8-e4m3", 128, "dual", outliers=True), torch.float16, (1, 12)),
        (CodecConfig("int4", 32, "signed", False, True), torch.float32, (12,)),
        (CodecConfig("int5", 256, "signed", outliers=True), torch.float32, (12,)),
    ):
        for count in counts:
            check_operations(launch, config, dtype, count, (3, 1000), cases, "cpu")
            cases += 1
    return cases
