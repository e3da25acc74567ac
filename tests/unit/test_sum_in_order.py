"""The uncompressed sum has the bits of a sum in rank order, whatever the shape and the number of ranks."""

import pytest
import torch

from megatron.compression.communication.collectives import sum_in_order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 13, 64])
def test_rank_order(ranks: int, dtype: torch.dtype) -> None:
    """torch.sum has another order from eight rows on, on CUDA from four rows of one value."""
    for values in (1, 3, 1000):
        rows = torch.randn(ranks, values, generator=torch.Generator().manual_seed(values)).to(dtype)
        before, expected = rows.clone(), torch.zeros(values)
        for row in rows.unbind():
            expected = expected + row.float()
        total = sum_in_order(rows)
        assert total.dtype == torch.float32 and torch.equal(total, expected)
        assert torch.equal(rows, before)
