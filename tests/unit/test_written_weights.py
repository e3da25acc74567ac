"""A bucket sees every write to weights since the optimizer's step."""

import pytest
import torch

from megatron.compression.data_parallel.weights import fingerprint

ROWS = 12
WIDTH = 768


def weights() -> torch.Tensor:
    """A matrix of bf16 weights, ``[ROWS, WIDTH]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator).bfloat16()


def change_one(matrix: torch.Tensor) -> None:
    matrix[3, 100] *= 2


def exchange_two_values(matrix: torch.Tensor) -> None:
    matrix[0, [0, 6]] = matrix[0, [6, 0]]


def exchange_neighbours(matrix: torch.Tensor) -> None:
    matrix[5, [100, 101]] = matrix[5, [101, 100]]


def exchange_two_rows(matrix: torch.Tensor) -> None:
    """Exchange rows, as a new order of neurons or heads does."""
    matrix[[1, 4]] = matrix[[4, 1]]


def exchange_at_the_end(matrix: torch.Tensor) -> None:
    matrix[-1, [-1, -2]] = matrix[-1, [-2, -1]]


WRITES = [
    change_one,
    exchange_two_values,
    exchange_neighbours,
    exchange_two_rows,
    exchange_at_the_end,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_is_seen(write) -> None:
    matrix = weights()
    before = fingerprint(matrix.view(-1))

    write(matrix)

    assert not torch.equal(matrix, weights())
    assert bool((fingerprint(matrix.view(-1)) != before).any())


@pytest.mark.parametrize("numel", [0, 5, 1021, 3000])
def test_weights_that_nobody_writes_have_one_fingerprint(numel: int) -> None:
    values = weights().view(-1)[:numel]
    assert torch.equal(fingerprint(values), fingerprint(values.clone()))
