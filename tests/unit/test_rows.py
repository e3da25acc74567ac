"""Sums of ranks' rows: in fp32, in the order of the ranks, rounded once."""

import pytest
import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.communication.collectives import reduce_scatter_rows, sum_in_order

RANKS, OWN, WIDTH = 3, 4, 64


class Arrived:
    """The first rank's transport, to which the ranks' rows have come."""

    world_size = RANKS

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.group = rows, self

    def rank(self) -> int:
        return 0

    def all_to_all(self, rows, send_counts, recv_counts) -> tuple[torch.Tensor, None]:
        assert len(rows) == sum(send_counts) and recv_counts == [OWN] * RANKS
        return self.rows, None


@pytest.mark.parametrize("spec", [None, "int8:group=64"])
def test_addends_of_bf16_are_summed_in_fp32_in_the_order_of_the_ranks(spec: str | None) -> None:
    """Rounded to bf16 before they are added, or after each addition, they give another sum."""
    generator = torch.Generator().manual_seed(0)
    codec = parse_codec(spec) if spec else None
    x = torch.randn(RANKS, OWN, WIDTH, generator=generator) * torch.tensor([1.0, 30.0, 0.1]).view(
        -1, 1, 1
    )
    x = x.bfloat16()
    sent = x.flatten(0, 1) if codec is None else codec.encode(x.flatten(0, 1))
    addends = (
        x.float() if codec is None else codec.decode(sent, (WIDTH,), torch.float32).view(x.shape)
    )
    work = reduce_scatter_rows(torch.cat([x[0]] * RANKS), codec, Arrived(sent), [OWN] * RANKS)
    found, exact = work.wait(), ((addends[0] + addends[1]) + addends[2]).bfloat16()
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact)
    rounded = addends.bfloat16()
    assert not torch.equal(found, (rounded[0] + rounded[1]) + rounded[2])
    if codec is not None:
        assert not torch.equal(found, sum_in_order(rounded).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 3, 4, 8, 64])
def test_sums_run_in_the_order_of_the_ranks(ranks: int, dtype: torch.dtype) -> None:
    """torch.sum has another order from eight rows on, on CUDA from four rows of one value."""
    for values in (1, 3, 1000):
        rows = torch.randn(ranks, values, generator=torch.Generator().manual_seed(values)).to(dtype)
        before, expected = rows.clone(), sum(rows.float(), torch.zeros(values))
        total = sum_in_order(rows)
        assert total.dtype == torch.float32 and torch.equal(total, expected)
        assert torch.equal(rows, before)
