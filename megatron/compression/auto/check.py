"""The run checks the choice: iterations with and without each compressed dimension, and by each schedule of
tensor parallelism, in turn."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.compression.auto.decision import LEAST_GAIN
from megatron.compression.communication.ledger import DIMENSIONS

WARM_UP = 3
"""Iterations before the first turn: kernels and allocations of training."""
TURN = 4
"""Iterations of a turn, of which the first is not timed: it begins with what the turn before has left."""
ROUNDS = 2


@dataclass(frozen=True)
class Verdict:
    """What the turns have shown, on all ranks."""

    gains: dict[str, float]
    """By dimension, of an iteration without it; by schedule, of one without that. What could not be timed is
    left out, and stays as it was decided."""
    off: set[str]
    """Dimensions that stay uncompressed."""
    schedule: str | None
    """That tensor parallelism takes; None: none of them."""


class Check:
    """Leaves a dimension uncompressed, or takes a schedule, for some iterations, times them, and decides.

    A turn has everything on, one dimension off, or one schedule. Ranks switch by the iteration, which all of
    them know.

    Args:
        dimensions: that are compressed.
        schedules: of tensor parallelism, which then is one of the dimensions.
        first: the first iteration, counted from 0, that compresses anything.
        iteration: the zero-based one that all ranks are in.
        take: takes a schedule, or None, for the next iterations.
        may_take: whether there is room to try schedules, the same on all ranks; asked before the first turn.
        decided: called on all ranks.
    """

    def __init__(
        self,
        dimensions: Sequence[str],
        schedules: Sequence[str],
        first: int,
        iteration: Callable[[], int],
        take: Callable[[str | None], object],
        may_take: Callable[[], bool],
        decided: Callable[[Verdict], None],
    ) -> None:
        self._dimensions = dimensions
        self._plan(schedules)
        self._first, self._iteration, self._take, self._decided = first, iteration, take, decided
        self._may_take: Callable[[], bool] | None = may_take
        """None: it has been asked."""
        self._begin: int | None = None
        self._place: int | None = None
        """Of the last iteration seen; Megatron skips those of --iterations-to-skip."""
        self._last = 0.0
        self._schedule: str | None = None
        self.off: set[str] = set()
        """Dimensions that stay uncompressed."""
        self.done = not dimensions

    def _plan(self, schedules: Sequence[str]) -> None:
        self._schedules = schedules
        self._turns: list[str | None] = [None, *self._dimensions, *schedules] * ROUNDS
        self._times: dict[str | None, list[float]] = {turn: [] for turn in self._turns}

    @property
    def iterations(self) -> int:
        """That the turns take."""
        return TURN * len(self._turns)

    def left_out(self, traffic: str) -> bool:
        """Whether a traffic class goes uncompressed now, for ``Policy.left_out``."""
        if any(_belongs(traffic, dimension) for dimension in self.off):
            return True
        if self.done or self._begin is None:
            return False
        turn = self._turn(self._iteration() - self._begin)
        return turn in self._dimensions and _belongs(traffic, turn)

    def on_training_log(self, iteration: int) -> None:
        """Behind each iteration, counted from 1; decides behind the last turn. Collective then."""
        if self.done:
            return
        if self._begin is None:
            self._begin = max(iteration, self._first) + WARM_UP
        place = iteration - 1 - self._begin  # of the iteration that has just ended
        if place < -1:
            return
        if self._may_take is not None:
            if self._schedules and not self._may_take():
                self._plan(())
            self._may_take = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if 0 <= place < self.iterations and place % TURN and self._place == place - 1:
            self._times[self._turns[place // TURN]].append(now - self._last)
        self._last, self._place = now, place
        turn = self._turn(place + 1)
        self._switch(turn if turn in self._schedules else None)
        if place + 1 >= self.iterations:
            self.done = True
            self._decide()

    def _switch(self, schedule: str | None) -> None:
        if schedule != self._schedule:
            self._schedule = schedule
            self._take(schedule)

    def _turn(self, place: int) -> str | None:
        """Of an iteration, counted from the first turn's."""
        return self._turns[place // TURN] if 0 <= place < self.iterations else None

    def _decide(self) -> None:
        found = [statistics.median(times) if times else math.nan for times in self._times.values()]
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        medians = torch.tensor(found, dtype=torch.float64, device=device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        seconds = dict(zip(self._times, medians.tolist(), strict=True))
        everything = seconds[None]
        gains = {name: 1 - seconds[name] / everything for name in self._schedules}
        schedule = max((name for name in gains if gains[name] >= LEAST_GAIN), key=gains.get, default=None)
        for name in self._dimensions:
            with_it = seconds[schedule] if name == "tensor_parallel" else everything
            gains[name] = 1 - with_it / seconds[name]
        gains = {name: gain for name, gain in gains.items() if not math.isnan(gain)}
        self.off = {name for name in self._dimensions if gains.get(name, 1.0) < LEAST_GAIN}
        schedule = None if "tensor_parallel" in self.off else schedule
        self._switch(schedule)
        self._decided(Verdict(gains, self.off, schedule))


def _belongs(traffic: str, dimension: str) -> bool:
    return traffic.startswith(DIMENSIONS[dimension.replace("_", " ")])
