"""The arithmetic of error feedback's memory."""

import pytest
import torch

from megatron.compression.data_parallel.error_feedback import INT8, ErrorFeedback, parse_error_feedback
from megatron.compression.errors import CompressionConfigError

PIECES = [(0, 256), (256, 640)]


def _feedback(average: float, store=None) -> ErrorFeedback:
    feedback = ErrorFeedback(average, store)
    feedback.allocate(2, PIECES, torch.device("cpu"))
    return feedback


def _random(seed: int, width: int) -> torch.Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("store", [None, INT8], ids=["fp32", "int8"])
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


@pytest.mark.parametrize("store", [None, INT8], ids=["fp32", "int8"])
def test_the_memory_is_forgotten_at_times(store) -> None:
    """Every three iterations, counted from the training's first: a resumed run forgets when it would have."""
    iteration = 0
    feedback = ErrorFeedback(0.5, store, 3, lambda: iteration)
    feedback.allocate(2, PIECES, torch.device("cpu"))
    feedback.set_values(torch.ones(2, 640))
    zeros = torch.zeros(2, 256)
    for iteration, held in ((2, True), (3, False), (4, True), (5, True), (6, False)):
        assert feedback.compensated(0, zeros).any() == held, iteration
        feedback.remember(0, _random(iteration, 256), zeros)
    assert feedback.values()[:, 256:].all(), "a piece is forgotten where it is asked for"
    with pytest.raises(ValueError, match="iteration"):
        ErrorFeedback(reset=3)


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


def test_memories_by_name() -> None:
    """none, fp32 and int8, the last two with the newest error's weight."""
    assert parse_error_feedback("none")() is None
    made = parse_error_feedback("int8:average=0.25")()
    assert (made.average, made.store) == (0.25, INT8)
    assert parse_error_feedback("fp32")().store is None
    assert parse_error_feedback("int8:average=0.25,reset=7")(lambda: 0).average == 0.25
    for text in (
        "int8:reset=-1",
        "int8:reset=x",
        "none:reset=4",
        "fp16",
        "none:average=0.5",
        "fp32:average=0",
        "fp32:average=2",
        "int8:a=1",
    ):
        with pytest.raises(CompressionConfigError, match=f"--dp-error-feedback {text}"):
            parse_error_feedback(text)
