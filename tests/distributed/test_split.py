"""scripts/_split.py: collectives over several communicators give the results of one."""

import _split
import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import spawn

COMMUNICATORS = 3
VALUES = 2 * 3 * 5 * 1024 * 16
"""fp32 values of a message: 1.9 MiB."""


def all_reduce(values: torch.Tensor) -> torch.Tensor:
    result = values.clone()
    dist.all_reduce(result)
    return result


def all_gather(values: torch.Tensor) -> torch.Tensor:
    result = values.new_empty(2 * values.numel())
    dist.all_gather_into_tensor(result, values)
    return result


def reduce_scatter(values: torch.Tensor) -> torch.Tensor:
    result = values.new_empty(values.numel() // 2)
    dist.reduce_scatter_tensor(result, values)
    return result


def all_to_all(values: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(values)
    dist.all_to_all_single(result, values)
    return result


def all_to_all_of_unequal_rows(values: torch.Tensor) -> torch.Tensor:
    """Rank 0 sends 1 row to itself and 3 to rank 1, rank 1 sends 2 and 2."""
    send_counts = [[1, 3], [2, 2]][dist.get_rank()]
    recv_counts = [[1, 2], [3, 2]][dist.get_rank()]
    rows = values[: 4 * 1000].view(4, 1000)
    result = rows.new_empty(sum(recv_counts), 1000)
    dist.all_to_all_single(result, rows, recv_counts, send_counts)
    return result


COLLECTIVES = {
    function.__name__: function
    for function in (
        all_reduce,
        all_gather,
        reduce_scatter,
        all_to_all,
        all_to_all_of_unequal_rows,
    )
}


def compare(rank: int, world_size: int) -> dict[str, tuple[bool, list[int]]]:
    """Return by collective whether the split one has the same bits, and its number of parts."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-100, 100, (VALUES,), generator=generator).float()
    expected = {name: collective(values) for name, collective in COLLECTIVES.items()}
    parts: list[int] = []
    join = _split.join

    def counting_join(works):
        parts.append(len(works))
        return join(works)

    _split.join = counting_join
    _split.install()
    _split.split_over([dist.group.WORLD], COMMUNICATORS)
    results = {}
    for name, collective in COLLECTIVES.items():
        parts.clear()
        is_same = torch.equal(collective(values), expected[name])
        results[name] = (is_same, list(parts))
    parts.clear()
    all_reduce(values[:8])
    all_gather(torch.ones(2**21, dtype=torch.uint8))
    results["left alone"] = (True, list(parts))
    return results


@pytest.fixture(scope="module")
def compared() -> list[dict]:
    """Results of both ranks."""
    return spawn(compare, 2)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_parts_on_several_communicators_give_the_same(compared: list[dict], name: str) -> None:
    assert [rank[name] for rank in compared] == [(True, [COMMUNICATORS])] * 2


def test_small_tensors_and_payloads_are_left_alone(compared: list[dict]) -> None:
    """A small tensor gains nothing, and our own transport splits payloads."""
    assert [rank["left alone"] for rank in compared] == [(True, [])] * 2
