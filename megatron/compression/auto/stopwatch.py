"""Times what all ranks do at once, eager or in a CUDA graph."""

import statistics
import time
from collections.abc import Callable

import torch

from megatron.compression.auto.plan import device_of_rank, largest
from megatron.compression.communication.objects import gather_objects

TRIALS = 5
"""Trials whose median counts; 2 where a call takes long."""
TRIAL_SECONDS = 0.01
"""A trial repeats a call until it takes about so long."""
MOST_REPEATS = 50
LONG_CALL = 0.05
"""Seconds from which on a call is tried twice only."""
VERY_LONG_CALL = 0.5
"""Seconds from which on the first timed call counts."""
CAPTURED_CALLS = 4
"""Calls in a CUDA graph that is timed."""


class Stopwatch:
    """Times calls. Every method is collective and gives the same on all ranks: the slowest rank's
    time."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.device = device_of_rank()
        self.not_captured: set[str] = set()
        """Why calls that were to be timed in a CUDA graph were timed eager."""

    def elapsed(self) -> float:
        """Return the seconds since this stopwatch was made."""
        return largest(time.perf_counter() - self._began)[0]

    def seconds(self, call: Callable[[], object], in_graph: bool = False) -> float:
        """Return the seconds that one call takes, on the slowest rank.

        They are the median of a few trials, after two calls to warm up. If the second one already
        took ``VERY_LONG_CALL``, its time is the result.

        Args:
            call: sends or computes something; called by all ranks together.
            in_graph: time replays of a CUDA graph of it, if it can be captured. The graph holds
                ``CAPTURED_CALLS`` calls.
        """
        call()
        self._synchronize()
        calls_a_run = 1
        if in_graph and (replay := self._captured(call)) is not None:
            call = replay
            calls_a_run = CAPTURED_CALLS
        # The second call warms up too. How often to repeat follows from its time on the slowest
        # rank, so that all ranks repeat alike.
        second_call = largest(self._time(call, 1))[0]
        if second_call > VERY_LONG_CALL:
            return second_call / calls_a_run
        repeats = round(TRIAL_SECONDS / max(second_call, 1e-9))
        repeats = max(1, min(MOST_REPEATS, repeats))
        trials = TRIALS if second_call < LONG_CALL else 2
        median = statistics.median(self._time(call, repeats) for _ in range(trials))
        return largest(median)[0] / calls_a_run

    def _captured(self, call: Callable[[], object]) -> Callable[[], None] | None:
        """Return what replays ``CAPTURED_CALLS`` calls; None: some rank cannot capture them."""
        stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        failure = None
        try:
            # As Megatron captures. The outer context gives the stream back where a capture fails,
            # which would leave its own stream the current one.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                for _ in range(CAPTURED_CALLS):
                    call()
        except Exception as error:  # of CUDA, of NCCL or of what refuses by itself
            failure = str(error).partition("\n")[0] or type(error).__name__
        reason = first_reason(failure)
        if reason is None:
            return graph.replay
        self.not_captured.add(reason)
        return None

    def _time(self, call: Callable[[], object], repeats: int) -> float:
        """Return this rank's seconds for one call: the mean of ``repeats`` calls, to the device's
        end."""
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        self._synchronize()
        return (time.perf_counter() - began) / repeats

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def first_reason(reason: str | None) -> str | None:
    """Return the reason of the first rank that has one, or None. Collective over all ranks of the
    job."""
    reasons = gather_objects(reason)
    return next((text for text in reasons if text), None)
