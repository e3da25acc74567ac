"""A run of ``--compression auto`` compares ways to train in its own iterations, and keeps what gains.

After ``WARM_UP`` iterations blocks follow each other, one for each way. Without CUDA graphs there
are two rounds of them, so that a slow drift of the machine is in every kind of block::

    all on | without A | without B | halves ... | all on | without A | without B | halves ... | decision

Tensor parallelism may go by another schedule: halves of a micro-batch, where one computes while the
other's sums travel. Halves hide the link where that is the bottleneck, and launch twice as many
kernels, so they lose where the host is. Only the run itself tells.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.compression.auto.plan import LEAST_GAIN, largest

WARM_UP = 3
"""Iterations before the first block: kernels and allocations of training."""
BLOCK = 4
"""Iterations of a block, of which the first is not timed: it begins with what the block before has
left."""
ROUNDS = 2
"""Blocks of each kind; one where each block is captured anew."""
CAPTURING = 2
"""Further iterations of a block in CUDA graphs of whole iterations, which are not timed: one without
a graph, and one in which it is captured (``graphs.WholeIterations``)."""
TENSOR = "tensor_parallel"


@dataclass(frozen=True)
class Trial:
    """A way to train: what goes uncompressed, and how tensor parallelism goes."""

    off: frozenset[str] = frozenset()
    """Dimensions that go uncompressed."""
    halves: bool = False
    """Whether halves of a micro-batch are interleaved."""
    recipe: str = ""
    """Name of tensor parallelism's recipe in place of the one that was decided; empty: that one."""


@dataclass(frozen=True)
class Timing:
    """What iterations take on the slowest rank."""

    seconds: float
    """Median of an iteration; NaN: none was timed."""
    noise: float = 0.0
    """Standard error of that median, as a part of it."""


@dataclass(frozen=True)
class Verdict:
    """What a check has shown; the same on all ranks."""

    trial: Trial
    """The way to train from now on."""
    gains: dict[str, float]
    """Part of an iteration that the compression of a dimension saves; dimensions that could not be
    timed are not in it, and stay as they were decided."""
    timings: dict[Trial, Timing]
    """Of each way that was compared."""
    extra_seconds: float
    """By how much all iterations of the check took longer than as many by ``trial``."""


def trials_of(
    dimensions: Sequence[str], halves: bool = False, overlaps: bool = True, safer: str = ""
) -> list[Trial]:
    """Return the ways to train that a run compares, in the order of their blocks.

    The last one is the most likely to stay, so that its CUDA graph is not captured again.

    Args:
        dimensions: those that are compressed.
        halves: whether halves of a micro-batch can be tried.
        overlaps: whether compressed sums leave room on the GPU for the other half's kernels.
        safer: name of a recipe of tensor parallelism that costs less loss than the decided one.
            Where the link is hidden, or the host is what iterations wait for, its additional bytes
            take no time. Empty: there is none.
    """
    trials = [Trial()] + [Trial(frozenset({dimension})) for dimension in dimensions]
    compressed = TENSOR in dimensions
    if compressed and safer:
        trials.append(Trial(recipe=safer))
    if not halves:
        return trials
    if not compressed:
        return [*trials, Trial(halves=True)]
    trials.append(Trial(frozenset({TENSOR}), halves=True))
    if overlaps:
        trials.append(Trial(halves=True))
        if safer:
            trials.append(Trial(halves=True, recipe=safer))
    return trials


def judge(
    timings: Mapping[Trial, Timing], dimensions: Sequence[str], loss_of: Callable[[Trial], float]
) -> tuple[Trial, dict[str, float]]:
    """Return the way to train that the timings speak for, and what each dimension's compression
    saves.

    Every step away from the uncompressed usual schedule has to gain ``LEAST_GAIN``, or what the
    timings are uncertain by if that is more.

    Args:
        timings: of all trials of the dimensions.
        dimensions: those that are compressed.
        loss_of: percent of validation loss that tensor parallelism costs in a trial.
    """
    off = set()
    gains = {}
    # Other dimensions are compared with everything compressed, each left out alone; tensor
    # parallelism by all trials that touch nothing else.
    everything = timings[Trial()]
    for dimension in dimensions:
        if dimension == TENSOR:
            continue
        without = timings[Trial(frozenset({dimension}))]
        gain = _gain(without, everything)
        if not math.isnan(gain):
            gains[dimension] = gain
            if gain < _margin(without, everything):
                off.add(dimension)
    best = _best_of_tensor_parallelism(timings, dimensions, loss_of)
    if TENSOR in dimensions:
        gain = _gain_of_tensor_parallelism(timings, best)
        if not math.isnan(gain):
            gains[TENSOR] = gain
    return Trial(best.off | off, best.halves, best.recipe), gains


def _best_of_tensor_parallelism(
    timings: Mapping[Trial, Timing], dimensions: Sequence[str], loss_of: Callable[[Trial], float]
) -> Trial:
    """Return the trial by whose schedule and codec tensor parallelism goes."""
    base = Trial()
    if TENSOR in dimensions:
        base = Trial(frozenset({TENSOR}))
    # Other dimensions stay as in the base: those trials differ by tensor parallelism alone.
    trials = [trial for trial in timings if trial.off <= base.off]
    # Not timed at all, since Megatron has skipped their iterations: as it was decided.
    if math.isnan(timings[base].seconds + timings[Trial()].seconds):
        return Trial()
    # From what costs no loss to what costs the most: a later one has to be clearly faster than the
    # one that stands. So the result is at most the margin behind the fastest.
    trials.sort(key=lambda trial: (loss_of(trial), trial.halves))
    best = base
    for trial in trials:
        if _gain(timings[best], timings[trial]) >= _margin(timings[best], timings[trial]):
            best = trial
    return best


def _gain_of_tensor_parallelism(timings: Mapping[Trial, Timing], best: Trial) -> float:
    """Return what the best way saves of an iteration as usual, or what the fastest codec would save
    of the best way where that is uncompressed."""
    if TENSOR not in best.off:
        return _gain(timings[Trial(frozenset({TENSOR}))], timings[best])
    compressed = [timing for trial, timing in timings.items() if not trial.off]
    return _gain(timings[best], min(compressed, key=lambda timing: timing.seconds))


def _gain(old: Timing, new: Timing) -> float:
    """Return the part of an iteration that the new way saves; NaN where one was not timed."""
    return 1 - new.seconds / old.seconds


def _margin(old: Timing, new: Timing) -> float:
    """Return the least gain that counts: what is worth it, and what the timings can tell."""
    return max(LEAST_GAIN, 2 * math.hypot(old.noise, new.noise))


def timing_of(seconds: Sequence[float]) -> Timing:
    """Return the median of an iteration's times, and how far it may be off."""
    if not seconds:
        return Timing(math.nan)
    median = statistics.median(seconds)
    # The median's standard error for normal noise; by the median deviation, so that one iteration
    # with a checkpoint or an evaluation in it does not count.
    deviation = 1.48 * statistics.median(abs(value - median) for value in seconds)
    return Timing(median, 1.25 * deviation / math.sqrt(len(seconds)) / median)


class Check:
    """Times blocks of iterations, one way to train after the other, and decides.

    Ranks switch by the iterations that they have logged, which are the same on all of them, so
    nothing is sent to agree on a switch.

    Args:
        trials: from ``trials_of``; a single one means that there is nothing to compare.
        dimensions: those that are compressed.
        first: the first iteration, counted from 0, that compresses anything.
        take: called on all ranks with the way to train from the next iteration on.
        decided: called on all ranks with the result, after ``take`` of it.
        loss_of: percent of validation loss that tensor parallelism costs in a trial.
        graph_warm_up: iterations that Megatron runs before it captures its first CUDA graph, which
            is that of the first block; 0: there are no graphs.
        capturing: further iterations of a block, in which a CUDA graph is captured; replays are
            timed.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        dimensions: Sequence[str],
        first: int,
        take: Callable[[Trial], None],
        decided: Callable[[Verdict], None],
        loss_of: Callable[[Trial], float] = lambda trial: 0.0,
        graph_warm_up: int = 0,
        capturing: int = 0,
    ) -> None:
        self._dimensions = dimensions
        self._warm_up = max(WARM_UP, graph_warm_up)
        """Iterations before the first block, after the first one."""
        self._first = first
        self._take = take
        self._decided = decided
        self._loss_of = loss_of
        self._untimed = 1 + capturing
        self._block_length = BLOCK + capturing
        self._rounds = _rounds(capturing)
        self._trials = list(trials)
        self._set_blocks()
        self._starts_at: int | None = None
        """The number of logged iterations, skipped ones included, from which on blocks run."""
        self._position: int | None = None
        """Iterations since the first block began; None: it has not."""
        self._last_iteration = 0
        self._last_time = 0.0
        self._began = 0.0

    def _set_blocks(self) -> None:
        """Lay out a block for each way in every round."""
        trials = self._trials
        self._blocks = trials * self._rounds
        self._times: dict[Trial, list[float]] = {trial: [] for trial in trials}
        """Seconds of timed iterations."""
        self._slowdown: dict[Trial, float] = {trial: 0.0 for trial in trials}
        """Seconds of the untimed iterations of a block, the last one of its kind."""
        self.done = len(trials) < 2
        self.iterations = 0
        """Of all blocks."""
        if not self.done:
            self.iterations = self._block_length * len(self._blocks)

    @property
    def count(self) -> int:
        """The number of ways to train that are compared."""
        return len(self._trials)

    @property
    def tries_halves(self) -> bool:
        """True where halves are still to be compared."""
        return self._position is None and any(trial.halves for trial in self._trials)

    def leave_out_halves(self) -> None:
        """Compare whole micro-batches only; before the first block, on all ranks."""
        self._trials = [trial for trial in self._trials if not trial.halves]
        self._set_blocks()

    def is_due(self, iteration: int) -> bool:
        """Return whether the warm-up has ended with this iteration, counted from 1, or before."""
        if self._starts_at is None:
            self._starts_at = max(iteration, self._first) + self._warm_up
        return iteration >= self._starts_at

    def on_training_log(self, iteration: int) -> None:
        """Time the iteration that has just ended, counted from 1; decide after the last block.

        The decision is collective over all ranks.
        """
        if self.done or not self.is_due(iteration):
            return
        # Without it the clock would tell when kernels were launched.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._position is None:
            # The warm-up has ended.
            self._began = now
            self._position = 0
            self._take(self._blocks[0])
        else:
            self._note(iteration, now)
        self._last_iteration = iteration
        self._last_time = now

    def _note(self, iteration: int, now: float) -> None:
        """Note the time of an iteration of a block, and begin the next block after the last one."""
        position = self._position or 0
        block, index = divmod(position, self._block_length)
        trial = self._blocks[block]
        seconds = now - self._last_time
        # Between two that do not follow each other Megatron has skipped some (--iterations-to-skip).
        if iteration == self._last_iteration + 1:
            if index >= self._untimed:
                self._times[trial].append(seconds)
            elif index == 0:
                self._slowdown[trial] = seconds
            else:
                self._slowdown[trial] += seconds
        self._position = position + 1
        if self._position == self.iterations:
            self._decide(now)
        elif index + 1 == self._block_length:
            self._take(self._blocks[block + 1])

    def _decide(self, now: float) -> None:
        """Compare the slowest rank's medians, and go by the best way."""
        local = [timing_of(self._times[trial]) for trial in self._times]
        # All ranks go the same way, so all decide by the slowest one's times.
        seconds = largest(*(timing.seconds for timing in local))
        noise = largest(*(timing.noise for timing in local))
        timings = {
            trial: Timing(*values)
            for trial, *values in zip(self._times, seconds, noise, strict=True)
        }
        trial, gains = judge(timings, self._dimensions, self._loss_of)
        (extra,) = largest(self._extra_seconds(now - self._began, trial, timings))
        self.done = True
        self._take(trial)
        self._decided(Verdict(trial, gains, timings, extra))

    def _extra_seconds(
        self, elapsed: float, trial: Trial, timings: Mapping[Trial, Timing]
    ) -> float:
        """Return by how much the check took longer than as many iterations of its result.

        Args:
            elapsed: seconds of all its blocks.
            trial: its result.
            timings: of each way that was compared.
        """
        # The timed way that is nearest to the result: dimensions other than tensor parallelism are
        # switched off one by one, never together.
        tensor = Trial(trial.off & {TENSOR}, trial.halves, trial.recipe)
        chosen = timings.get(trial, timings.get(tensor, timings[Trial()]))
        extra = elapsed - self.iterations * chosen.seconds
        # Where the last block was another way, the CUDA graph is captured once more.
        if self._blocks[-1] != trial:
            again = self._slowdown.get(trial, self._slowdown[Trial()])
            extra += again - self._untimed * chosen.seconds
        return max(0.0, extra)


def most_iterations(dimensions: int, graph_warm_up: int = 0, capturing: int = 0) -> int:
    """Return the most iterations that a check takes, with those before it.

    Args:
        dimensions: how many have ranks.
        graph_warm_up: as of ``Check``.
        capturing: as of ``Check``; 0: there are no CUDA graphs.
    """
    trials = trials_of([TENSOR, *map(str, range(dimensions - 1))], halves=True, safer="safer")
    blocks = _rounds(capturing) * len(trials)
    # The first iteration counts for itself: kernels are compiled in it.
    return 1 + max(WARM_UP, graph_warm_up) + blocks * (BLOCK + capturing)


def _rounds(capturing: int) -> int:
    """Return how many blocks each way has."""
    # A second capture of the same way would cost more than a drift of the machine.
    return 1 if capturing else ROUNDS
