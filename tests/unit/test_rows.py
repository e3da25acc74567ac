"""Sums of ranks' rows: in fp32, in the order of the ranks, rounded once."""

import pytest
import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.communication.collectives import reduce_scatter_rows, sum_in_order

RANKS = 3
ROWS = 4
"""Rows that the first rank gets of each rank."""
WIDTH = 64


class Arrived:
    """The first rank's transport, to which the ranks' rows have come."""

    world_size = RANKS

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.group = self

    def rank(self) -> int:
        return 0

    def all_to_all(self, rows, send_counts, recv_counts) -> tuple[torch.Tensor, None]:
        assert len(rows) == sum(send_counts)
        assert recv_counts == [ROWS] * RANKS
        return self.rows, None


def reduced(spec: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a reduce-scatter's sum of bf16 rows, and the addends [RANKS, ROWS, WIDTH] in fp32."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor([1.0, 30.0, 0.1]).view(-1, 1, 1)
    x = (torch.randn(RANKS, ROWS, WIDTH, generator=generator) * magnitudes).bfloat16()
    codec = None
    payloads = x.flatten(0, 1)
    addends = x.float()
    if spec is not None:
        codec = parse_codec(spec)
        payloads = codec.encode(payloads)
        addends = codec.decode(payloads, (WIDTH,), torch.float32).view(x.shape)
    local_rows = torch.cat([x[0]] * RANKS)
    work = reduce_scatter_rows(local_rows, codec, Arrived(payloads), [ROWS] * RANKS)
    return work.wait(), addends


@pytest.mark.parametrize("spec", [None, "int8:group=64"])
def test_addends_of_bf16_are_summed_in_fp32_in_the_order_of_the_ranks(spec: str | None) -> None:
    total, addends = reduced(spec)
    expected = ((addends[0] + addends[1]) + addends[2]).bfloat16()
    assert total.dtype == torch.bfloat16
    assert torch.equal(total, expected)


@pytest.mark.parametrize("spec", [None, "int8:group=64"])
def test_rounding_after_each_addition_would_give_another_sum(spec: str | None) -> None:
    """So the test above tells the two apart."""
    total, addends = reduced(spec)
    rounded = addends.bfloat16()
    assert not torch.equal(total, (rounded[0] + rounded[1]) + rounded[2])


def test_rounding_decoded_addends_would_give_another_sum() -> None:
    total, addends = reduced("int8:group=64")
    assert not torch.equal(total, sum_in_order(addends.bfloat16()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 3, 4, 8, 64])
@pytest.mark.parametrize("values", [1, 3, 1000])
def test_sums_run_in_the_order_of_the_ranks(values: int, ranks: int, dtype: torch.dtype) -> None:
    """torch.sum has another order from eight rows on, on CUDA from four rows of one value."""
    generator = torch.Generator().manual_seed(values)
    rows = torch.randn(ranks, values, generator=generator).to(dtype)
    before = rows.clone()
    expected = torch.zeros(values)
    for row in rows:
        expected = expected + row.float()
    total = sum_in_order(rows)
    assert total.dtype == torch.float32
    assert torch.equal(total, expected)
    assert torch.equal(rows, before), "the rows are left as they are"
