"""The arithmetic of error feedback's memory; run as a program, its kernel by Triton's interpreter."""

import pytest
import torch

from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from megatron.compression.data_parallel.sdp4bit import ErrorStore
from taco_kernels import error_feedback
from taco_kernels.error_feedback import reference
from tests.kernels.interpreter import output_interpreted

PIECES = [(0, 256), (256, 640)]


def _feedback(average: float, store=None) -> ErrorFeedback:
    feedback = ErrorFeedback(average, store)
    feedback.allocate(2, PIECES, torch.device("cpu"))
    return feedback


def _random(seed: int, width: int) -> torch.Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("store", [None, ErrorStore()], ids=["fp32", "int8"])
def test_the_moving_average(store) -> None:
    """LoCo: m = (1 - a) m + a lost, step by step; a second error of a row counts with the first."""
    average, feedback = 0.25, _feedback(0.25, store)
    bound = 1e-6 if store is None else 0.02
    expected = [torch.zeros(2, end - begin) for begin, end in PIECES]
    for step in range(4):
        for piece, (begin, end) in enumerate(PIECES):
            values, lost = _random(step, end - begin), _random(10 + step, end - begin)
            compensated = feedback.compensated(piece, values)
            torch.testing.assert_close(compensated, values + expected[piece], rtol=0, atol=bound)
            feedback.remember(piece, lost + values, values)
            expected[piece] = (1 - average) * expected[piece] + average * lost
            if piece == 1:
                again = _random(20 + step, end - begin)[0]
                feedback.add(piece, 1, again)
                expected[piece][1] += average * again
    torch.testing.assert_close(feedback.values(), torch.cat(expected, dim=1), rtol=0, atol=bound)


def test_values_that_are_not_finite_are_left_out() -> None:
    feedback = _feedback(1.0)
    held = _random(0, 256)
    feedback.remember(0, held, torch.zeros_like(held))
    lost = _random(1, 256)
    lost[0, 3], lost[1, 5] = torch.inf, torch.nan
    feedback.remember(0, lost, torch.zeros_like(lost))
    expected = torch.where(torch.isfinite(lost), lost, held)
    assert torch.equal(feedback.values()[:, :256], expected)
    feedback.add(0, 1, lost[1])
    expected[1] += torch.where(torch.isfinite(lost[1]), lost[1], 0.0)
    assert torch.equal(feedback.values()[:, :256], expected)


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
