"""Lossless codes at every distance from a block's base: those with a code, escapes of 4 bits and of 8.

A block's base is the smaller of the largest exponents of its even and its odd groups of eight values
(taco_kernels/lossless/reference.py). Distances of 0 to 6 have a code of their own; -2, -1 and 7 to 19 are
escapes of 4 bits; everything else, -3 or 20 for example, makes a tile's escapes 8 bits long.
"""

import pytest
import torch

from taco_kernels.lossless import FLAG_AT, layout_of, reference
from tests.kernels.interpreter import interpreted
from tests.kernels.wires.lossless import bits

DISTANCES = range(-3, 22)
NUMEL = 4096
BASE_EXPONENT = 0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def row_of(distances: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A row ``[1, NUMEL]`` in which a few values lie at ``distances`` from the base of their block.

    All other values lie at the base. Those at a distance stand in even groups alone, so that the odd
    groups keep the base where it is.
    """
    row = torch.full((1, NUMEL), 1.5 * 2.0**BASE_EXPONENT, dtype=torch.float32)
    row[:, 1::3] *= -1
    for number, distance in enumerate(distances):
        position = 128 * number + 16 * (number % 8) + number % 8
        row[0, position] = 1.25 * 2.0 ** (BASE_EXPONENT - distance)
    return row.to(dtype)


def check(kernels, distances: list[int], dtype: torch.dtype) -> None:
    """Assert that every bit of such a row comes back through ``kernels``, and equal payloads."""
    row = row_of(distances, dtype)
    layout = layout_of(NUMEL, dtype, 0.07)
    assert not layout.raw
    payload = kernels.encode(row, layout)
    assert payload[0, FLAG_AT] == 0, "the row fits"
    assert torch.equal(bits(kernels.decode(payload, layout)), bits(row)), distances
    assert torch.equal(bits(reference.decode(payload, layout)), bits(row)), distances


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back_at_a_distance(dtype: str, distance: int) -> None:
    check(reference, [distance], DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back_at_all_short_distances_together(dtype: str) -> None:
    check(reference, list(range(-2, 20)), DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back_at_all_distances_together(dtype: str) -> None:
    check(reference, list(DISTANCES), DTYPES[dtype])


@pytest.mark.slow
def test_kernels_keep_every_bit_at_every_distance() -> None:
    assert interpreted(check_kernels) == "54"


def check_kernels() -> int:
    """Check the Triton kernels, and return the number of rows that were tried."""
    from taco_kernels.lossless import launch

    rows = [[distance] for distance in DISTANCES]
    rows += [list(range(-2, 20)), list(DISTANCES)]
    for dtype in DTYPES.values():
        for distances in rows:
            check(launch, distances, dtype)
    return len(rows) * len(DTYPES)
