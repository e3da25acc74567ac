"""The arithmetic of error feedback's memory; run as a program, its kernel by Triton's interpreter."""

import pytest
import torch

from taco_kernels import error_feedback
from taco_kernels.error_feedback import reference
from tests.kernels.interpreter import output_interpreted


def test_what_cannot_be_remembered_is_refused() -> None:
    held = torch.zeros(4)
    with pytest.raises(ValueError, match=r"total is torch\.float32"):
        error_feedback.remember(held, torch.zeros(5), torch.zeros(5), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"decoded is torch\.bfloat16"):
        error_feedback.remember(held, held, held.bfloat16(), 0.0, 1.0)


def test_the_kernel_has_the_bits_of_the_reference() -> None:
    assert output_interpreted(__file__) == "8 cases"


def main() -> None:
    """Newest error, moving average, second error; with and without what has arrived; a part of a tile."""
    from taco_kernels.error_feedback import launch

    cases = 0
    for keep, weight in ((0.0, 1.0), (0.9, 0.1), (1.0, 1.0), (1.0, 0.25)):
        for arrived in (True, False):
            generator = torch.Generator().manual_seed(cases)
            held, total, decoded = torch.randn(3, 2, 2500, generator=generator)
            total[0, 3], total[1, 7] = torch.inf, torch.nan
            decoded[0, 9], decoded[1, 2400] = -torch.inf, torch.nan
            part = decoded if arrived else None
            expected = reference.remember(held.clone(), total, part, keep, weight)
            found = launch.remember(held.clone(), total, part, keep, weight)
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (keep, weight, arrived)
            assert torch.isfinite(found).all()
            cases += 1
    print(f"{cases} cases")


if __name__ == "__main__":
    main()
