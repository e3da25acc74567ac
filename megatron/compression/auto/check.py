"""The run checks the choice: iterations with and without each compressed dimension, in turn."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.compression.auto.decision import LEAST_GAIN
from megatron.compression.communication.ledger import DIMENSIONS

WARM_UP = 3
"""Iterations before the first turn: kernels and allocations of training."""
TURN = 4
"""Iterations of a turn, of which the first is not timed: it begins with what the turn before has left."""
ROUNDS = 2


class Check:
    """Leaves a dimension uncompressed for some iterations, times them, and decides.

    A turn has everything on, or one dimension off. Ranks switch by the iteration, which all of them know.

    Args:
        dimensions: that are compressed.
        first: the first iteration, counted from 0, that compresses anything.
        iteration: the zero-based one that all ranks are in.
        decided: called on all ranks with the gain by dimension (part of an iteration without it), and with
            the dimensions that are switched off.
    """

    def __init__(
        self,
        dimensions: Sequence[str],
        first: int,
        iteration: Callable[[], int],
        decided: Callable[[dict[str, float], set[str]], None],
    ) -> None:
        self._turns: list[str | None] = [None, *dimensions] * ROUNDS
        self._first, self._iteration, self._decided = first, iteration, decided
        self._begin: int | None = None
        self._last = 0.0
        self._times: dict[str | None, list[float]] = {turn: [] for turn in self._turns}
        self.off: set[str] = set()
        """Dimensions that stay uncompressed."""
        self.done = not dimensions

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
        place = self._iteration() - self._begin
        turn = self._turns[place // TURN] if 0 <= place < self.iterations else None
        return turn is not None and _belongs(traffic, turn)

    def on_training_log(self, iteration: int) -> None:
        """Behind each iteration, counted from 1; decides behind the last turn. Collective then."""
        if self.done:
            return
        if self._begin is None:
            self._begin = max(iteration, self._first) + WARM_UP
        place = iteration - 1 - self._begin  # of the iteration that has just ended
        if place < -1:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if 0 <= place < self.iterations and place % TURN:
            self._times[self._turns[place // TURN]].append(now - self._last)
        self._last = now
        if place + 1 >= self.iterations:
            self.done = True
            self._decide()

    def _decide(self) -> None:
        found = [statistics.median(times) if times else math.nan for times in self._times.values()]
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        medians = torch.tensor(found, dtype=torch.float64, device=device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        everything, *without = medians.tolist()
        names = [turn for turn in self._times if turn is not None]
        gains = {name: 1 - everything / seconds for name, seconds in zip(names, without, strict=True)}
        self.off = {name for name, gain in gains.items() if gain < LEAST_GAIN}
        self._decided(gains, self.off)


def _belongs(traffic: str, dimension: str) -> bool:
    return traffic.startswith(DIMENSIONS[dimension.replace("_", " ")])
