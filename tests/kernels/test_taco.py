"""The reference codec against a float64 rendering of TACO's formulas, the interpreted kernels against it."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import taco_kernels.taco as tk
from taco_kernels.taco import FORMATS, GROUP_SIZES, SCALES, CodecConfig
from tests.kernels.codec_formulas import (
    INTEGERS,
    expected,
    grid,
    inputs,
    matrix,
    nearest_two,
    read_wire,
)
from tests.kernels.interpreter import interpreted, small_tiles
from tests.kernels.wires.taco import assert_alike, check_sums

# relative L2 error of one encode of Gaussian data, groups of 128: measured, plus 3 %
GAUSSIAN_ERROR = {"fp8-e4m3": 0.0265, "fp8-e5m2": 0.0530}
GAUSSIAN_ERROR |= {"int8": 0.0067, "int6": 0.0273, "int5": 0.0565, "int4": 0.121}


def scales_of(format: str) -> tuple[str, ...]:
    """What a format's groups can send."""
    return tuple(scales for scales in SCALES if scales != "signed" or format in INTEGERS)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_wire_holds_the_papers_formulas(format: str, group_size: int) -> None:
    """s, alpha and every code of every kind of input, with and without the transform."""
    for hadamard in (True, False):
        config = CodecConfig(format, group_size, hadamard=hadamard)
        for kind in ("gaussian", "outlier", "near zero", "zero", "huge", "channel"):
            x = inputs(kind, 6, group_size)
            q, s, alpha = read_wire(tk.encode(x, config)[0], config)
            v, s_exact, alpha_exact = expected(x.view(6, -1), config)
            if kind == "zero":
                assert (q == 0).all() and (s == 0).all()
                continue
            torch.testing.assert_close(alpha, alpha_exact, rtol=2e-6, atol=0)
            torch.testing.assert_close(s, s_exact, rtol=4e-6, atol=0)
            below, above = nearest_two(v, grid(config))
            distance = torch.minimum((v - below).abs(), (v - above).abs())
            rounding = 5e-7 * config.qmax  # of the fp32 transform, whose largest value is qmax
            assert ((q - v).abs() <= distance + rounding).all()  # the nearest code
            assert (((q == below) | (q == above)) | (above - below < rounding)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_round_to_nearest_even_on_exact_ties(format: str) -> None:
    """Without the transform and with max|x| = qmax the codes are plain roundings of x."""
    config = CodecConfig(format, 32, scales="single", hadamard=False)
    points = grid(config)
    middles = ((points[1:] + points[:-1]) / 2)[torch.randperm(len(points) - 1)[:31]]
    x = torch.cat([torch.tensor([config.qmax], dtype=torch.float64), middles]).float()
    x = torch.nn.functional.pad(x, (0, 32 - len(x)))
    if format.startswith("fp8"):
        dtype = torch.float8_e4m3fn if format == "fp8-e4m3" else torch.float8_e5m2
        exact = x.to(dtype).float()
    else:
        exact = torch.round(x)
    assert torch.equal(tk.decode(tk.encode(x, config), config, x.shape, torch.float32), exact)


@pytest.mark.parametrize("scales", ["dual", "single"])
@pytest.mark.parametrize("format", FORMATS)
def test_error_bounds(format: str, scales: str) -> None:
    """Relative L2 error by format on Gaussian data."""
    config = CodecConfig(format, scales=scales)
    x = inputs("gaussian", 1000, 128)

    def error(x: torch.Tensor, config: CodecConfig) -> float:
        return float(
            (tk.decode(tk.encode(x, config), config, x.shape, x.dtype) - x).norm() / x.norm()
        )

    assert 0.9 * GAUSSIAN_ERROR[format] < error(x, config) < GAUSSIAN_ERROR[format]


@pytest.mark.parametrize("format", FORMATS)
def test_single_scale_is_rounded_up_so_that_nothing_saturates(format: str) -> None:
    config = CodecConfig(format, 64, scales="single")
    x = inputs("outlier", 200, 64)
    q, step, _ = read_wire(tk.encode(x, config)[0], config)
    y = x.view(200, 64).double() @ matrix(64).T / 8  # mean-normalised transform
    exact = y.abs().amax(1) / config.qmax
    assert (step >= exact * (1 - 1e-6)).all() and (step <= exact * (1 + 2**-7)).all()
    assert ((q * step[:, None] - y).abs() <= y.abs() * 0.13 + step[:, None] * 0.501).all()


def test_signed_scales_use_every_code_and_overflow_none() -> None:
    """Of each group far has the outermost code, or near the largest; no error is above rounding's own.

    On the uniform grid, which int8 has; test_quadratic.py has the other.
    """
    config = CodecConfig("int8", 32, "signed", hadamard=False)
    x = inputs("gaussian", 2000, 32).view(2000, 32)
    x[::4] = x[::4].abs()
    x[1::8, 5] = -x[1::8].abs().amax(1)  # both extremes alike
    x[1::8, 6] = -x[1::8, 5]
    x[2] = -3.0
    wire = tk.encode(x, config)[0]
    q, step, _ = read_wire(wire, config)
    high, low = x.amax(1).clamp(min=0).double(), -x.amin(1).clamp(max=0).double()
    far, near, outermost = (
        torch.maximum(high, low),
        torch.minimum(high, low),
        2 ** (config.bits - 1),
    )
    exact = torch.maximum(far / outermost, near / config.qmax)
    assert (step.abs() >= exact * (1 - 1e-7)).all() and (step.abs() <= exact * (1 + 2**-7)).all()
    assert torch.equal(step < 0, high > low)
    assert q.min() == -outermost and q.max() == config.qmax
    ends = q.gather(1, x.abs().argmax(1, keepdim=True))[
        :, 0
    ].abs()  # of the extreme, -far / step at most
    assert (ends >= (far / step.abs()) - 0.5 - 1e-4).all() and (
        ends >= 0.98 * config.qmax - 1
    ).all()
    y = tk.decode(wire[None], config, x.shape, torch.float32)
    assert ((y - x).abs() <= 0.5 * step.abs()[:, None].float() * (1 + 1e-5)).all()


@pytest.mark.parametrize("format, scales", [(f, s) for f in FORMATS for s in scales_of(f)])
@pytest.mark.parametrize("hadamard", [True, False])
def test_non_finite_groups_decode_to_nan_and_stay_alone(
    format: str, scales: str, hadamard: bool
) -> None:
    config = CodecConfig(format, 32, scales=scales, hadamard=hadamard)
    for value in (math.nan, math.inf, -math.inf):
        x = inputs("gaussian", 5, 32)
        x[40] = value
        wires = tk.encode(x, config)
        y = tk.decode(wires, config, x.shape, torch.float32).view(5, 32)
        assert y[1].isnan().all() and y[[0, 2, 3, 4]].isfinite().all()
        total = tk.decode_sum(wires.repeat(2, 1), config, x.shape, torch.float32).view(5, 32)
        assert total[1].isnan().all() and total[[0, 2, 3, 4]].isfinite().all()
        again = tk.decode_sum_encode(wires.repeat(2, 1), config, x.numel())
        assert torch.equal(
            tk.decode(again[None], config, x.shape, torch.float32).isnan().view(5, 32), y.isnan()
        )


@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_finite_values_survive_and_zeros_are_exact(format: str) -> None:
    """fp32's range end to end: no NaN, no infinity, the usual error; zeros stay zeros, in sums too."""
    for group_size in (32, 256):
        for scales in scales_of(format):
            config = CodecConfig(format, group_size, scales=scales)
            x = inputs("gaussian", 4, group_size)
            x = x / x.abs().max() * 3e38
            y = tk.decode(tk.encode(x, config), config, x.shape, torch.float32)
            assert y.isfinite().all()
            assert float((y / 1e38 - x / 1e38).norm() / (x / 1e38).norm()) < 0.2
            wires = tk.encode(torch.zeros_like(x), config, 2)
            assert (tk.decode(wires, config, x.shape, torch.float32) == 0).all()
            assert (tk.decode_sum(wires, config, (x.numel() // 2,), torch.float32) == 0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hadamard", [True, False])
def test_decode_sum_and_decode_sum_encode(format: str, hadamard: bool) -> None:
    """decode_sum equals the sum of decodes; decode_sum_encode equals encode of it within a grid step, in
    another format too."""
    for group_size, scales in ((32, "dual"), (128, "single"), (256, "dual")):
        config = CodecConfig(format, group_size, scales, hadamard)
        numel, senders = 3 * group_size + 17, 5
        xs = inputs("outlier", senders, numel).view(senders, numel)
        wires = torch.cat([tk.encode(x, config) for x in xs])
        parts = [tk.decode(wire[None], config, (numel,), torch.float32) for wire in wires]
        total = tk.decode_sum(wires, config, (numel,), torch.float32)
        size, difference = (
            torch.nn.functional.pad(x, (0, 4 * group_size - numel)).view(4, -1).abs()
            for x in (sum(p.abs() for p in parts), total - sum(parts))
        )
        assert (difference <= 4e-6 * size.amax(1, keepdim=True)).all()

        other = replace(config, format="int4" if format == "int8" else "int8")
        for config_out in (config, other):
            wire = tk.decode_sum_encode(wires, config, numel, config_out=config_out)
            assert wire.shape == (config_out.wire_bytes(numel),)
            q, s, alpha = read_wire(wire, config_out)
            q2, s2, alpha2 = read_wire(tk.encode(total, config_out)[0], config_out)
            points = grid(config_out)
            steps = (torch.searchsorted(points, q) - torch.searchsorted(points, q2)).abs()
            whole = slice(0, 3)  # decode_sum cuts the padded tail of the last group off
            assert steps[whole].max() <= 1 and (steps[whole] > 0).float().mean() < 0.02
            rtol = 2**-7 if scales == "single" else 1e-5
            torch.testing.assert_close(s[whole], s2[whole], rtol=rtol, atol=0)
            if alpha is not None:
                torch.testing.assert_close(alpha[whole], alpha2[whole], rtol=1e-5, atol=0)


def test_bad_calls_are_refused() -> None:
    config = CodecConfig("int8")
    wires = tk.encode(torch.randn(256), config)
    with pytest.raises(ValueError, match="group_size"):
        tk.decode_sum_encode(wires, config, 256, config_out=CodecConfig("int8", 32))


def test_sizes_on_the_wire() -> None:
    """8.5 bits a value for the paper's set-up, and exact sizes in general."""
    assert CodecConfig().bytes_per_group() * 8 / 128 == 8.5
    assert [CodecConfig(f, scales="single").bytes_per_group() for f in FORMATS] == [
        130,
        130,
        130,
        98,
        82,
        66,
    ]
    config = CodecConfig("int5", 32)
    assert (
        config.chunk_numel(100, 3) == 64 and config.wire_bytes(64) == 64
    )  # 2 * (20 + 8), padded to 16
    assert config.chunk_numel(0, 4) == 0 and config.wire_bytes(0) == 0


EVERY_CASE = (
    "fp8-e4m3",
    "int6",
)  # others: each configuration is strided in one format and not in the next
SMALL = ("fp8-e5m2", "int5")  # with transforms of 64 points and butterflies, as on sm_86


@pytest.mark.slow
def test_kernels_reproduce_the_reference() -> None:
    assert interpreted(main) == "50"


def main() -> int:
    """All formats; exits with a traceback on a difference."""
    return sum(check_format(format) for format in FORMATS)


def check_format(format: str) -> int:
    """Every kernel in a spread of configurations of one format; their number."""
    from taco_kernels.common.device import Device, device_number
    from taco_kernels.taco import launch, reference, spec

    small_tiles(spec.TUNING)
    spec.LEAST_TILE, spec.MOST_RANKS = 256, 1  # and tiles of a chunk, where groups are short
    small = Device(multiprocessors=4, capability=(8, 6), interpret=True)
    assert (small.point, device_number(-1).point) == (64, 128)
    launch.device_number = lambda index: small if format in SMALL else device_number(index)

    cases = together = 0
    for number, (group_size, scales, hadamard, dtype) in enumerate(
        (
            (32, "dual", True, torch.float32),
            (64, "single", True, torch.bfloat16),
            (128, "dual", True, torch.float16),
            (128, "single", False, torch.float32),
            (256, "single", True, torch.float32),
            (64, "signed", False, torch.float32),
            (128, "signed", True, torch.bfloat16),
        )
    ):
        if scales == "signed" and format.startswith("fp8"):
            continue
        config = CodecConfig(format, group_size, scales, hadamard)
        both, one = (False, True), ((number + FORMATS.index(format)) % 2 == 0,)
        for strided in both if format in EVERY_CASE else one:
            g = torch.Generator().manual_seed(2 * number + strided)
            base = torch.randn(3, 2, 2 * group_size + 16, generator=g)
            base[1, 0, 40] = float("nan") if strided else 50.0
            # strided: rows of one group inside a wider tensor; else a size that divides nothing
            x = (base[:, :, 16 : 16 + group_size] if strided else base[:, :, 1:]).to(dtype)
            numel, shape = x.numel(), x.shape
            exact = reference.encode(x, config, 2)
            assert_alike(exact, launch.encode(x, config, 2), config, 0.004)

            # chunks of which a tile holds several, the last tile not all of them
            width = (1 + number % 3) * max(group_size, 256 if number % 2 else 128)
            short = torch.randn(9, width, generator=torch.Generator().manual_seed(number)).to(dtype)
            rows, like = reference.encode(short, config, 9), (config, short.numel(), None)
            wires = (9,), dtype, 0
            encoding = launch._plan("encode", *like, *wires, -1).launch.constants["C"]
            wires = rows.shape, torch.uint8, rows.shape[1]
            decoding = launch._plan("decode", *like, *wires, -1).launch.constants["C"]
            together += encoding.ROW.value > 0 and decoding.ROW.value > 0
            assert_alike(rows, launch.encode(short, config, 9), config, 0.004)
            again = launch.decode(rows, config, short.shape, dtype)
            expected = reference.decode(rows, config, short.shape, dtype)
            # sums of codes are exact in any order, but for e5m2's, which span 32 binades; and the interpreter
            # truncates where bf16 is rounded
            ulp = 2**-7 if dtype == torch.bfloat16 else 0.0
            bit = 2**-22 if format == "fp8-e5m2" and dtype == torch.float32 else 0.0
            torch.testing.assert_close(again, expected, rtol=ulp + bit, atol=bit)

            y = torch.full(shape, 7.0, dtype=dtype)
            target = (
                torch.full((3, 2, 3 * group_size), 7.0, dtype=dtype)[:, :, :group_size]
                if strided
                else y
            )
            launch.decode(exact, config, shape, dtype, out=target)
            expected = reference.decode(exact, config, shape, dtype)
            torch.testing.assert_close(target, expected, rtol=ulp + bit, atol=bit, equal_nan=True)
            assert bool(target.isnan().any()) == strided

            senders = torch.randn(3, numel, generator=g)
            stack = torch.cat([reference.encode(s, config) for s in senders])
            other = replace(config, format="int8" if format == "int4" else "int4")
            # sums of codes times bf16 steps can lie in the middle between two codes, where the interpreter,
            # without a fused multiply-add, rounds twice
            codes = 0.01 if scales != "dual" and not hadamard else 0.004
            check_sums(
                launch, stack, shape, config, partial(assert_alike, codes=codes), (config, other)
            )
            cases += 1
    assert 2 * together >= cases, "chunks of which a tile holds several"
    return cases
