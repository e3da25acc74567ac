"""The memory of error feedback on a GPU has the reference's bits."""

import pytest
import torch

from taco_kernels import error_feedback
from taco_kernels.error_feedback import reference


@pytest.mark.parametrize("numel", [1, 5000, 2**22 + 3])
@pytest.mark.parametrize(("keep", "weight"), [(0.0, 1.0), (0.9, 0.1), (1.0, 1.0), (1.0, 0.3)])
@pytest.mark.parametrize("arrived", [True, False])
def test_bits(numel: int, keep: float, weight: float, arrived: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(numel)
    held, total, decoded = torch.randn(3, numel, generator=generator, device="cuda")
    total[numel // 2], decoded[numel // 3] = torch.inf, torch.nan
    part = decoded.clone() if arrived else None
    expected = reference.remember(held.clone(), total, part, keep, weight)
    found = error_feedback.remember(held.clone(), total.clone(), part, keep, weight)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert torch.isfinite(found).all()
