"""The reference codec against a float64 rendering of TACO's formulas, the interpreted kernels against it.

First what the definition promises, by operation and kind of input; then the kernels, each configuration as
scenarios of one program with the interpreter on.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

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
from tests.kernels.interpreter import failures_of_scenarios, small_tiles
from tests.kernels.wires.taco import assert_alike, check_sums

GAUSSIAN_ERROR = {
    "fp8-e4m3": 0.0265,
    "fp8-e5m2": 0.0530,
    "int8": 0.0067,
    "int6": 0.0273,
    "int5": 0.0565,
    "int4": 0.121,
}
"""Relative L2 error of one encode of Gaussian data, groups of 128: measured, plus 3 %."""


def scales_of(format: str) -> tuple[str, ...]:
    """Return the scales that a format's groups can have."""
    return tuple(scales for scales in SCALES if scales != "signed" or format in INTEGERS)


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_wire_holds_the_papers_formulas(format: str, group_size: int, hadamard: bool) -> None:
    """s, alpha and every code, for every kind of input."""
    config = CodecConfig(format, group_size, hadamard=hadamard)
    points = grid(config)
    for kind in ("gaussian", "outlier", "near zero", "huge", "channel"):
        x = inputs(kind, 6, group_size)
        q, s, alpha = read_wire(tk.encode(x, config)[0], config)
        v, exact_s, exact_alpha = expected(x.view(6, -1), config)
        torch.testing.assert_close(alpha, exact_alpha, rtol=2e-6, atol=0)
        torch.testing.assert_close(s, exact_s, rtol=4e-6, atol=0)
        below, above = nearest_two(v, points)
        distance = torch.minimum((v - below).abs(), (v - above).abs())
        rounding = 5e-7 * config.qmax  # of the fp32 transform, whose largest value is qmax
        assert ((q - v).abs() <= distance + rounding).all(), f"{kind}: not the nearest code"
        neighbour = (q == below) | (q == above)
        assert (neighbour | (above - below < rounding)).all(), f"{kind}: not a neighbour"


@pytest.mark.parametrize("format", INTEGERS)
def test_epsilon_stands_under_alphas_root(format: str) -> None:
    """Seen where groups are small but alpha is not at its bound."""
    config = CodecConfig(format, 128)
    largest_alpha = 1000
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 128, generator=generator) * (2 * config.qmax / largest_alpha)
    _, _, alpha = read_wire(tk.encode(x, config)[0], config)
    exact = config.qmax / (x.double().square().mean(1) + 1e-6).sqrt()
    assert exact.max() < largest_alpha
    torch.testing.assert_close(alpha.double().view(-1), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_a_group_of_zeros_sends_zeros(format: str) -> None:
    config = CodecConfig(format, 64)
    q, s, _ = read_wire(tk.encode(inputs("zero", 6, 64), config)[0], config)
    assert (q == 0).all() and (s == 0).all()


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
def test_error_of_gaussian_values(format: str, scales: str) -> None:
    """Not larger than measured, and not smaller, which would be another format."""
    config = CodecConfig(format, scales=scales)
    x = inputs("gaussian", 1000, 128)
    decoded = tk.decode(tk.encode(x, config), config, x.shape, x.dtype)
    error = float((decoded - x).norm() / x.norm())
    assert 0.9 * GAUSSIAN_ERROR[format] < error < GAUSSIAN_ERROR[format]


@pytest.mark.parametrize("format", FORMATS)
def test_single_scale_is_rounded_up_so_that_nothing_saturates(format: str) -> None:
    config = CodecConfig(format, 64, scales="single")
    x = inputs("outlier", 200, 64)
    q, step, _ = read_wire(tk.encode(x, config)[0], config)
    y = x.view(200, 64).double() @ matrix(64).T / 8  # mean-normalised transform
    exact = y.abs().amax(1) / config.qmax
    assert (step >= exact * (1 - 1e-6)).all() and (step <= exact * (1 + 2**-7)).all()
    assert ((q * step[:, None] - y).abs() <= y.abs() * 0.13 + step[:, None] * 0.501).all()


def signed_groups() -> torch.Tensor:
    """Return fp32[2000, 32]: groups of one sign, of equal extremes, of equal values, and Gaussian ones."""
    x = inputs("gaussian", 2000, 32).view(2000, 32)
    x[::4] = x[::4].abs()
    x[1::8, 5] = -x[1::8].abs().amax(1)  # both extremes alike
    x[1::8, 6] = -x[1::8, 5]
    x[2] = -3.0
    return x


SIGNED = CodecConfig("int8", 32, "signed", hadamard=False)
"""The uniform grid, which int8 has; test_quadratic.py has the other."""


def test_signed_steps_serve_both_extremes() -> None:
    """|step| is the larger of far / 128 and near / 127, rounded up to bf16; negative where far is positive."""
    x = signed_groups()
    _, step, _ = read_wire(tk.encode(x, SIGNED)[0], SIGNED)
    high = x.amax(1).clamp(min=0).double()
    low = -x.amin(1).clamp(max=0).double()
    far = torch.maximum(high, low)
    near = torch.minimum(high, low)
    exact = torch.maximum(far / 128, near / 127)
    assert (step.abs() >= exact * (1 - 1e-7)).all()
    assert (step.abs() <= exact * (1 + 2**-7)).all()
    assert torch.equal(step < 0, high > low)


def test_signed_scales_use_every_code_and_overflow_none() -> None:
    """Far has the outermost code, or near the largest; no error is above rounding's own."""
    x = signed_groups()
    wire = tk.encode(x, SIGNED)
    q, step, _ = read_wire(wire[0], SIGNED)
    assert q.min() == -128 and q.max() == 127
    extreme = x.abs().argmax(1, keepdim=True)
    far = x.gather(1, extreme)[:, 0].abs().double()
    far_code = q.gather(1, extreme)[:, 0].abs()
    assert (far_code >= far / step.abs() - 0.5 - 1e-4).all()
    assert (far_code >= 0.98 * 127 - 1).all()
    decoded = tk.decode(wire, SIGNED, x.shape, torch.float32)
    half_a_step = 0.5 * step.abs()[:, None].float()
    assert ((decoded - x).abs() <= half_a_step * (1 + 1e-5)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("format, scales", [(f, s) for f in FORMATS for s in scales_of(f)])
@pytest.mark.parametrize("hadamard", [True, False])
def test_non_finite_groups_decode_to_nan_and_stay_alone(
    format: str, scales: str, hadamard: bool, value: float
) -> None:
    """The second group is NaN in one tensor, in sums, and in sums that are encoded again."""
    config = CodecConfig(format, 32, scales=scales, hadamard=hadamard)
    x = inputs("gaussian", 5, 32)
    x[40] = value  # in the second group
    wires = tk.encode(x, config)
    two = wires.repeat(2, 1)
    again = tk.decode_sum_encode(two, config, x.numel())
    for decoded in (
        tk.decode(wires, config, x.shape, torch.float32),
        tk.decode_sum(two, config, x.shape, torch.float32),
        tk.decode(again[None], config, x.shape, torch.float32),
    ):
        groups = decoded.view(5, 32)
        assert groups[1].isnan().all()
        assert groups[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("group_size", [32, 256])
@pytest.mark.parametrize("format, scales", [(f, s) for f in FORMATS for s in scales_of(f)])
def test_the_largest_finite_values_survive(format: str, scales: str, group_size: int) -> None:
    """fp32's range end to end: no NaN, no infinity, the usual error."""
    config = CodecConfig(format, group_size, scales=scales)
    x = inputs("gaussian", 4, group_size)
    x = x / x.abs().max() * 3e38
    decoded = tk.decode(tk.encode(x, config), config, x.shape, torch.float32)
    assert decoded.isfinite().all()
    scaled = x / 1e38  # a norm of x itself would overflow
    assert float((decoded / 1e38 - scaled).norm() / scaled.norm()) < 0.2


@pytest.mark.parametrize("format, scales", [(f, s) for f in FORMATS for s in scales_of(f)])
def test_zeros_are_exact_in_sums_too(format: str, scales: str) -> None:
    config = CodecConfig(format, 32, scales=scales)
    wires = tk.encode(torch.zeros(256), config, 2)
    assert (tk.decode(wires, config, (256,), torch.float32) == 0).all()
    assert (tk.decode_sum(wires, config, (128,), torch.float32) == 0).all()


SUMMED = [(32, "dual"), (128, "single"), (256, "dual")]
"""Group sizes and scales of what is summed."""


def senders_of(group_size: int) -> torch.Tensor:
    """Return five senders' values: three whole groups and 17 values each."""
    numel = 3 * group_size + 17
    return inputs("outlier", 5, numel).view(5, numel)


@pytest.mark.parametrize("group_size, scales", SUMMED)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hadamard", [True, False])
def test_decode_sum_is_the_sum_of_decodes(
    format: str, hadamard: bool, group_size: int, scales: str
) -> None:
    """They are equal to fp32's rounding of the largest value of a group."""
    config = CodecConfig(format, group_size, scales, hadamard)
    senders = senders_of(group_size)
    shape = senders.shape[1:]
    wires = torch.cat([tk.encode(x, config) for x in senders])
    parts = [tk.decode(wire[None], config, shape, torch.float32) for wire in wires]
    total = tk.decode_sum(wires, config, shape, torch.float32)

    def in_groups(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 4 * group_size - x.numel())).view(4, -1)

    size = in_groups(sum(part.abs() for part in parts)).amax(1, keepdim=True)
    difference = in_groups(total - sum(parts)).abs()
    assert (difference <= 4e-6 * size).all()


@pytest.mark.parametrize("group_size, scales", SUMMED)
@pytest.mark.parametrize("format", FORMATS)
def test_a_sum_of_two_has_the_bits_of_the_sum_of_decodes(
    format: str, group_size: int, scales: str
) -> None:
    """Codes are exact in the inverse transform, sums of them are not: two senders pass it one by one."""
    config = CodecConfig(format, group_size, scales)
    senders = senders_of(group_size)[:2]
    shape = senders.shape[1:]
    wires = torch.cat([tk.encode(x, config) for x in senders])
    first, second = (tk.decode(wire[None], config, shape, torch.float32) for wire in wires)

    total = tk.decode_sum(wires, config, shape, torch.float32)

    assert torch.equal(total, first + second)


@pytest.mark.parametrize("same_format", [True, False])
@pytest.mark.parametrize("group_size, scales", SUMMED)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hadamard", [True, False])
def test_decode_sum_encode_is_encode_of_the_sum(
    format: str, hadamard: bool, group_size: int, scales: str, same_format: bool
) -> None:
    """Within a grid step of few codes, as the transforms that it leaves out round; in another format, too."""
    config = CodecConfig(format, group_size, scales, hadamard)
    config_out = config
    if not same_format:
        config_out = replace(config, format="int4" if format == "int8" else "int8")
    senders = senders_of(group_size)
    numel = senders.shape[1]
    wires = torch.cat([tk.encode(x, config) for x in senders])
    wire = tk.decode_sum_encode(wires, config, numel, config_out=config_out)
    assert wire.shape == (config_out.wire_bytes(numel),)

    total = tk.decode_sum(wires, config, (numel,), torch.float32)
    q, s, alpha = read_wire(wire, config_out)
    exact_q, exact_s, exact_alpha = read_wire(tk.encode(total, config_out)[0], config_out)
    points = grid(config_out)
    steps = (torch.searchsorted(points, q) - torch.searchsorted(points, exact_q)).abs()
    whole_groups = slice(0, 3)  # decode_sum cuts the padded tail of the last group off
    assert steps[whole_groups].max() <= 1
    assert (steps[whole_groups] > 0).float().mean() < 0.02
    rtol = 2**-7 if scales == "single" else 1e-5
    torch.testing.assert_close(s[whole_groups], exact_s[whole_groups], rtol=rtol, atol=0)
    if alpha is not None:
        torch.testing.assert_close(
            alpha[whole_groups], exact_alpha[whole_groups], rtol=1e-5, atol=0
        )


def test_a_sum_is_refused_in_other_groups() -> None:
    config = CodecConfig("int8")
    wires = tk.encode(torch.randn(256), config)
    with pytest.raises(ValueError, match="group_size"):
        tk.decode_sum_encode(wires, config, 256, config_out=CodecConfig("int8", 32))


def test_bytes_a_group() -> None:
    """8.5 bits a value for the paper's set-up; a bf16 step instead of two fp32 scales with single scales."""
    assert CodecConfig().bytes_per_group() * 8 / 128 == 8.5
    sizes = {f: CodecConfig(f, scales="single").bytes_per_group() for f in FORMATS}
    assert sizes == {
        "fp8-e4m3": 130,
        "fp8-e5m2": 130,
        "int8": 130,
        "int6": 98,
        "int5": 82,
        "int4": 66,
    }


def test_bytes_of_a_chunk() -> None:
    """Whole groups, padded to 16 bytes: 100 values in three chunks are two groups of 32 each."""
    config = CodecConfig("int5", 32)
    assert config.chunk_numel(100, 3) == 64
    assert config.wire_bytes(64) == 64  # 2 * (20 + 8), padded
    assert config.chunk_numel(0, 4) == 0
    assert config.wire_bytes(0) == 0


# The kernels, interpreted

SMALL_FORMATS = ("fp8-e5m2", "int5")
"""Formats that run with transforms of 64 points and butterflies, as on sm_86."""


class Case(NamedTuple):
    """A configuration of the kernels, and the type of the tensor."""

    config: CodecConfig
    dtype: torch.dtype
    seed: int

    @property
    def name(self) -> str:
        """Name of the case, for the test's."""
        config = self.config
        rotated = "" if config.hadamard else " not rotated"
        return f"{config.format} {config.group_size} {config.scales}{rotated} {self.dtype}"

    @property
    def codes_apart(self) -> float:
        """Share of codes that may be neighbours of the definition's: a transform is a sum."""
        return 0.004 if self.config.hadamard else 0.0

    @property
    def rtol(self) -> float:
        """Relative error that decoded values may have.

        Sums of codes are exact in any order, but for e5m2's, which span 32 binades.
        """
        if self.config.format != "fp8-e5m2":
            return 0.0
        return 2**-7 if self.dtype == torch.bfloat16 else self.atol

    @property
    def atol(self) -> float:
        """Absolute error that decoded values may have."""
        return 2**-22 if self.config.format == "fp8-e5m2" and self.dtype == torch.float32 else 0.0


def cases() -> list[Case]:
    """Return a spread of group sizes, scales and types for every format."""
    spread = (
        (32, "dual", True, torch.float32),
        (64, "single", True, torch.bfloat16),
        (128, "dual", True, torch.float16),
        (128, "single", False, torch.float32),
        (256, "single", True, torch.float32),
        (64, "signed", False, torch.float32),
        (128, "signed", True, torch.bfloat16),
    )
    return [
        Case(CodecConfig(format, group_size, scales, hadamard), dtype, seed)
        for format in FORMATS
        for seed, (group_size, scales, hadamard, dtype) in enumerate(spread)
        if scales in scales_of(format)
    ]


def tiny_tiles(format: str) -> None:
    """Let kernels take several tiles of tiny tensors, and as on sm_86 those of some formats."""
    from taco_kernels.common.device import Device, device_number
    from taco_kernels.taco import launch, spec

    small_tiles(spec.TUNING)
    spec.LEAST_TILE = 256  # and tiles of a chunk, where groups are short
    spec.MOST_RANKS = 1
    device = device_number(-1)
    assert device.point == 128
    if format in SMALL_FORMATS:
        device = Device(multiprocessors=4, capability=(8, 6), interpret=True)
        assert device.point == 64
    launch.device_number = lambda index: device


def check_contiguous(case: Case) -> None:
    """Encode and decode two chunks of a size that divides nothing."""
    generator = torch.Generator().manual_seed(2 * case.seed)
    x = torch.randn(3, 2, 2 * case.config.group_size + 15, generator=generator)
    x[1, 0, 39] = 50.0
    x = x.to(case.dtype)
    check_tensor(case, x, torch.full(x.shape, 7.0, dtype=case.dtype))


def check_strided(case: Case) -> None:
    """Encode and decode rows of one group inside a wider tensor, one of which has a NaN."""
    size = case.config.group_size
    generator = torch.Generator().manual_seed(2 * case.seed + 1)
    base = torch.randn(3, 2, 2 * size + 16, generator=generator)
    base[1, 0, 24] = float("nan")
    x = base[:, :, 16 : 16 + size].to(case.dtype)
    strided = torch.empty(base.shape, dtype=case.dtype)[:, :, 16 : 16 + size].copy_(x)
    wider = torch.full((3, 2, 3 * size), 7.0, dtype=case.dtype)
    check_tensor(case, strided, wider[:, :, :size])
    assert wider[:, :, :size].isnan().any()
    assert (wider[:, :, size:] == 7.0).all(), "nothing is stored beside the rows"


def check_tensor(case: Case, x: torch.Tensor, target: torch.Tensor) -> None:
    """Encode x in two chunks, and decode them into ``target``."""
    from taco_kernels.taco import launch, reference

    tiny_tiles(case.config.format)
    exact = reference.encode(x, case.config, 2)
    assert_alike(exact, launch.encode(x, case.config, 2), case.config, case.codes_apart)
    launch.decode(exact, case.config, x.shape, case.dtype, out=target)
    values = reference.decode(exact, case.config, x.shape, case.dtype)
    torch.testing.assert_close(target, values, rtol=case.rtol, atol=case.atol, equal_nan=True)


def check_chunks_that_share_a_tile(case: Case) -> None:
    """Nine chunks of three groups (two of 256): a tile holds several, the last tile not all of them."""
    size = case.config.group_size
    groups = 2 if size == 256 else 3
    check_short_chunks(case, groups, row=groups)


def check_chunks_with_a_tile_of_their_size(case: Case) -> None:
    """Nine chunks that are shorter than a tile, and too long to share one."""
    check_short_chunks(case, 768 // case.config.group_size, row=0)


def check_short_chunks(case: Case, groups: int, row: int) -> None:
    """Encode and decode nine chunks; ``row``: groups of each that the plan lets share a tile, or 0."""
    from taco_kernels.taco import launch, reference

    tiny_tiles(case.config.format)
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randn(9, groups * case.config.group_size, generator=generator).to(case.dtype)
    exact = reference.encode(x, case.config, 9)
    encode = launch._plan("encode", case.config, x.numel(), None, (9,), case.dtype, 0, -1)
    wires = exact.shape, torch.uint8, exact.shape[1]
    decode = launch._plan("decode", case.config, x.numel(), None, *wires, -1)
    for plan in (encode, decode):
        assert plan.launch.constants["C"].ROW.value == row
    assert_alike(exact, launch.encode(x, case.config, 9), case.config, case.codes_apart)
    decoded = launch.decode(exact, case.config, x.shape, case.dtype)
    values = reference.decode(exact, case.config, x.shape, case.dtype)
    torch.testing.assert_close(decoded, values, rtol=case.rtol, atol=case.atol)


def check_sums_of_senders(case: Case) -> None:
    """Sum three senders and two, decoded and encoded again, in this format and in another."""
    from taco_kernels.taco import launch, reference

    config = case.config
    tiny_tiles(config.format)
    shape = (3, 2, 2 * config.group_size + 15)
    senders = torch.randn(3, math.prod(shape), generator=torch.Generator().manual_seed(case.seed))
    stack = torch.cat([reference.encode(sender, config) for sender in senders])
    another = replace(config, format="int8" if config.format == "int4" else "int4")
    agree = partial(assert_alike, codes=case.codes_apart)
    check_sums(launch, stack, shape, config, agree, (config, another))


CHECKS: dict[str, Callable[[Case], None]] = {
    "contiguous": check_contiguous,
    "strided": check_strided,
    "chunks that share a tile": check_chunks_that_share_a_tile,
    "chunks with a tile of their size": check_chunks_with_a_tile_of_their_size,
    "sums": check_sums_of_senders,
}
ALTERNATING = ("strided", "chunks with a tile of their size")
"""Checks that every second case has: others share their code."""
SCENARIOS = {
    f"{case.name}: {name}": partial(check, case)
    for number, case in enumerate(cases())
    for name, check in CHECKS.items()
    if name not in ALTERNATING or number % 2 == 0
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of_scenarios(__name__)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kernels_reproduce_the_reference(scenario: str, failures: dict[str, str]) -> None:
    assert not failures[scenario], failures[scenario]
