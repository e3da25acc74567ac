"""Kernels on this GPU have the bits of the definitions, as far as tests/kernels says that they do."""

import pytest

from tests.kernels.test_bits import check_with_a_transform, check_without_a_transform
from tests.kernels.test_stored_codes import ENCODERS, STORED, hashes_of_kernels

TIE_DISTANCE = 16.0
"""As of the interpreter, doubled: tensor cores may cut the bits of a sum off instead of rounding."""


@pytest.fixture(scope="module")
def hashes() -> dict[str, str]:
    return hashes_of_kernels("cuda")


@pytest.mark.parametrize("name", ENCODERS)
def test_codes_have_the_stored_hashes(name: str, hashes: dict[str, str]) -> None:
    assert hashes[name] == STORED[name]


def test_codes_and_steps_without_a_transform_are_equal() -> None:
    check_without_a_transform("cuda")


def test_codes_with_a_transform_differ_on_ties_alone() -> None:
    check_with_a_transform("cuda", TIE_DISTANCE)
