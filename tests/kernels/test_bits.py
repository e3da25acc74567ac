"""Kernels' wires have the definition's bits; where they have not, how far they are apart, and why.

Equal bit for bit: codes and bf16 steps of groups that are not transformed, whatever is in them, and of
transformed ones whose sums are exact in fp32 (test_stored_codes.py). A difference is the order of a sum, which
a kernel leaves to the tensor cores and to Triton:

    transform   a code is its neighbour where the value lies within fp32's rounding of a tie
    alpha, s    last bits, of the sum of squares under alpha's root

The others are in test_channel_norm.py (statistics) and wires/lossless.py (order of the tiles' escapes).
"""

from collections.abc import Iterator

import pytest
import torch

from taco_kernels.taco import FORMATS, CodecConfig, reference
from tests.kernels.interpreter import failures_of_scenarios
from tests.kernels.test_taco import scales_of
from tests.kernels.wires.bits import compare

GROUPS = 48
SIZES = (32, 128)
SCALE_ULPS = 16
"""Units in the last place that s and alpha may differ by: with a transform both sums add to it."""
TIE_DISTANCE = 8.0
"""Largest distance from a tie, in roundings (2^-24) of a group's largest value. The interpreter's is 1.3."""


def values(size: int, special: bool) -> torch.Tensor:
    """Return fp32[GROUPS, size], groups of sizes far apart.

    Args:
        size: values of a group.
        special: one group holds zeros, and one a NaN.
    """
    generator = torch.Generator().manual_seed(size)
    exponents = torch.randint(-20, 20, (GROUPS, 1), generator=generator)
    x = torch.randn(GROUPS, size, generator=generator) * torch.exp2(exponents.float())
    if special:
        x[3] = 0.0
        x[5, 3] = float("nan")
    return x


def configs(hadamard: bool) -> Iterator[CodecConfig]:
    """Yield every format with all its scales, in groups of SIZES."""
    for format in FORMATS:
        for scales in scales_of(format):
            for size in SIZES:
                yield CodecConfig(format, size, scales, hadamard)


def check_without_a_transform(device: str = "cpu") -> None:
    """All codes and all bf16 steps are equal, and dual scales but for their last bits.

    Codes of a group with a NaN mean nothing: its scale is NaN.
    """
    from taco_kernels.taco import launch

    for config in configs(hadamard=False):
        x = values(config.group_size, special=True)
        [wire] = launch.encode(x.to(device), config).cpu()
        [expected] = reference.encode(x, config)
        bits = compare(x, wire, expected, config)
        assert bits.codes == 0 and bits.steps == 0, (config, bits)
        assert bits.scale_ulps <= SCALE_ULPS, (config, bits)


def check_with_a_transform(device: str = "cpu", tie_distance: float = TIE_DISTANCE) -> None:
    """Few codes are neighbours of the definition's, all of values on a tie but for fp32's rounding."""
    from taco_kernels.taco import launch

    codes = 0
    for config in configs(hadamard=True):
        x = values(config.group_size, special=False)
        [wire] = launch.encode(x.to(device), config).cpu()
        [expected] = reference.encode(x, config)
        bits = compare(x, wire, expected, config)
        assert bits.grid_steps <= 1 and bits.steps <= 1, (config, bits)
        assert bits.tie_distance <= tie_distance, (config, bits)
        assert bits.scale_ulps <= SCALE_ULPS, (config, bits)
        codes += bits.codes
    assert codes <= 1e-4 * len(list(configs(hadamard=True))) * GROUPS * max(SIZES)


SCENARIOS = {
    "without a transform": check_without_a_transform,
    "with a transform": check_with_a_transform,
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of_scenarios(__name__)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_bits_of_kernels(scenario: str, failures: dict[str, str]) -> None:
    assert not failures[scenario], failures[scenario]


@pytest.mark.slow
def test_a_comparison_sees_a_code_that_is_no_tie() -> None:
    """Of two wires, one with a code that is another's neighbour without reason."""
    config = CodecConfig("int8", 32, "single", hadamard=False)
    x = values(32, special=False)
    [expected] = reference.encode(x, config)
    wire = expected.clone()
    wire[7] += 1
    bits = compare(x, wire, expected, config)
    assert bits.codes == 1 and bits.grid_steps == 1
    assert bits.tie_distance > 100 * TIE_DISTANCE
