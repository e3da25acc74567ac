"""The reference codec's random numbers, and what rounding with them does to the mean."""

import math

import pytest
import torch

import taco_kernels as tk
from taco_kernels import FORMATS, CodecConfig, Stream, reference
from taco_kernels.count_sketch.philox import philox, uniform_nibbles
from tests.unit.codec_formulas import INTEGERS, STREAM, grid, inputs


def test_philox_known_answers() -> None:
    """The vectors of the authors' Random123 library for seven rounds."""
    cases = [
        ([0] * 4, 0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        ([0xFFFFFFFF] * 4, 2**64 - 1, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
    ]
    for counter, key, words in cases:
        assert [int(w) for w in philox([torch.tensor([c]) for c in counter], key)] == words


def test_random_numbers_follow_their_address() -> None:
    """Offset and element number add up, streams and keys differ, chunks continue where the last one ended."""
    first = uniform_nibbles(STREAM, 0, 4096, "cpu")
    for offset, count in ((1024, 1024), (32, 64), (96, 2000)):
        moved = STREAM._replace(offset=STREAM.offset + offset)
        assert torch.equal(uniform_nibbles(moved, 0, count, "cpu"), first[offset : offset + count])
        assert torch.equal(uniform_nibbles(STREAM, offset, count, "cpu"), first[offset : offset + count])
    for other in (STREAM._replace(key=STREAM.key + 2**32), STREAM._replace(stream=STREAM.stream - 2**40)):
        same = float((uniform_nibbles(other, 0, 4096, "cpu") == first).float().mean())
        assert abs(same - 1 / 16) < 0.015
    for element in (0, 5, 13, 70, 127, 1000):  # the address as Stream describes it
        i = STREAM.offset + element
        counter = [4 * (i // 128) + i // 16 % 4, 0, STREAM.stream & 0xFFFFFFFF, STREAM.stream >> 32]
        words = philox([torch.tensor([c]) for c in counter], STREAM.key)
        byte = int(words[2 * (i // 64 % 2) + i // 4 % 2]) >> 8 * (i % 4)
        assert int(first[element]) == (byte if i % 16 < 8 else byte >> 4) & 15
    config = CodecConfig("int4", 32, rounding="stochastic")
    x = torch.randn(192, generator=torch.Generator().manual_seed(3))
    wires = tk.encode(x, config, 2, STREAM)
    second = tk.encode(x[96:], config, 1, STREAM._replace(offset=STREAM.offset + 96))
    assert torch.equal(wires[1], second[0])


def uniform(counts: torch.Tensor) -> bool:
    """Whether a chi-square test finds counts alike: within 4.5 standard deviations of what chance gives."""
    degrees = counts.numel() - 1
    expected = counts.sum() / counts.numel()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return abs(statistic - degrees) < 4.5 * math.sqrt(2 * degrees)


def test_random_numbers_are_uniform_and_independent() -> None:
    """Chi-square of numbers, of pairs at every distance up to a block and over senders and iterations."""
    count, side = 2**18, 2**17
    streams = [Stream(key, stream) for key in (2, 3, 4) for stream in (0, 1, 2)]
    numbers = [uniform_nibbles(random, 0, count, "cpu").long() for random in streams]
    for values in numbers:
        assert uniform(torch.bincount(values, minlength=16).double())
        for bit in range(4):  # of every element of a block by itself
            ones = (values.view(-1, 128) >> bit & 1).sum(dim=0).double()
            assert float((ones - count / 256).abs().max()) < 5.5 * math.sqrt(count / 512)
    first = numbers[0]
    for distance in (*range(1, 18), 32, 64, 128, 256):
        pairs = first[:-distance] * 16 + first[distance:]
        assert uniform(torch.bincount(pairs, minlength=256).double()), distance
    for i, a in enumerate(numbers):
        for b in numbers[i + 1 :]:  # senders, iterations, and both
            assert uniform(torch.bincount(a[:side] * 16 + b[:side], minlength=256).double())


def mean_error(config: CodecConfig, v: torch.Tensor) -> torch.Tensor:
    """Error of v fp32[n] (at most qmax) in steps of the grid, over all 16 random numbers."""
    total = torch.zeros(len(v), dtype=torch.float64)
    for number in range(16):
        r = torch.full((len(v), 1), number, dtype=torch.int32)
        codes = reference.round_to_grid(v[:, None], torch.ones(len(v), 1), config, r)
        q = reference.code_values(codes, config)
        if config.rounding == "dither":
            q = q + reference.dither(r)
        total += q[:, 0].double() / 16
    return total - v.double()


@pytest.mark.parametrize("format", FORMATS)
def test_mean_error_is_a_thirty_second_of_a_step(format: str) -> None:
    """As rounding to nearest in a format with 4 bits more, where that alone errs by half a step."""
    g = torch.Generator().manual_seed(4)
    points = grid(CodecConfig(format)).float()
    inside = points[:-1] + (points[1:] - points[:-1]) * torch.rand(8, len(points) - 1, generator=g)
    v = torch.cat([inside.reshape(-1), points])
    step = (points[1:] - points[:-1]).repeat(8)
    for rounding in ("stochastic", "dither") if format in INTEGERS else ("stochastic",):
        error = mean_error(CodecConfig(format, rounding=rounding), v).abs()
        share = error[: len(step)] / step
        assert (
            1 / 40 < float(share.max()) < 1 / 32 + 1 / 200
        )  # 8 bits behind the point add 1 / 512, fp16's 1 / 256
        assert abs(float(share.mean()) - 1 / 64) < 1 / 500
        assert float(error[len(step) :].max()) == 0


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
@pytest.mark.parametrize("format", FORMATS)
def test_random_rounding_is_unbiased(format: str, rounding: str) -> None:
    """The mean of many encodes is the input; rounding to nearest repeats its error instead."""
    if rounding == "dither" and format not in INTEGERS:
        with pytest.raises(ValueError, match="int8"):
            CodecConfig(format, rounding=rounding)
        return
    config, trials = CodecConfig(format, 32, rounding=rounding), 150
    x = inputs("gaussian", 64, 32)
    mean, single = torch.zeros_like(x), 0.0
    for trial in range(trials):
        random = Stream(key=5, stream=trial)
        y = tk.decode(tk.encode(x, config, random=random), config, x.shape, torch.float32, random)
        mean += y / trials
        single += float((y - x).square().mean()) / trials
    # independent unbiased errors leave 1 / trials of the mean square, a uniform one of 1/32 of a step 1/256
    left = single / 256 if rounding == "dither" else single / 512
    assert float((mean - x).square().mean()) < 1.3 * (single / trials + left)
    nearest = CodecConfig(format, 32)
    error = tk.decode(tk.encode(x, nearest), nearest, x.shape, torch.float32) - x
    ratio = single / float(error.square().mean())
    if rounding == "dither":  # no more error than rounding to nearest
        assert 0.9 < ratio < 1.1
    else:
        assert 1.7 < ratio < 2.3
