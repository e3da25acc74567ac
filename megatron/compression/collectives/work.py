"""Handles of collectives that are under way."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


class CompressedWork:
    """A collective whose first exchange is under way; ``wait`` finishes it.

    A collective of several exchanges can be moved on by ``advance``, so that each of them runs behind other
    work: start it, launch a GEMM, advance it, launch another GEMM, wait. This needs no stream of its own (the
    exchanges run on the backend's), and so it overlaps with CUDA_DEVICE_MAX_CONNECTIONS=1 as well.

    Args:
        work: the exchange in flight, or None when it is complete.
        finish: what to do after it; returns the result, or the handle of the next exchange.
        exchanges: how many there are from here on.
    """

    exchanges: int
    """How many have not been taken yet; 0 when it is done."""

    def __init__(
        self,
        work: dist.Work | None,
        finish: Callable[[], torch.Tensor | CompressedWork],
        exchanges: int = 1,
    ) -> None:
        self.exchanges = exchanges
        self._work = work
        self._finish = finish
        self._result: torch.Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether the result has been taken."""
        return self._result is not None

    def advance(self) -> None:
        """Take the exchange that is in flight and start the next one, if there is one."""
        if self._result is not None:
            return
        if self._work is not None:
            self._work.wait()
        outcome = self._finish()
        if isinstance(outcome, CompressedWork):
            self._work, self._finish, self._result = outcome._work, outcome._finish, outcome._result
            self.exchanges = outcome.exchanges
        else:
            self._work, self._finish, self._result = None, None, outcome
            self.exchanges = 0

    def wait(self) -> torch.Tensor:
        """Complete the collective and return its result; a second call returns the same tensor."""
        while self._result is None:
            self.advance()
        return self._result


def completed(result: torch.Tensor) -> CompressedWork:
    """A handle of a collective with nothing left to do."""
    return CompressedWork(None, lambda: result)


class ParallelWork(CompressedWork):
    """Several collectives under way at once; each ``advance`` moves all of them on by one exchange.

    Args:
        works: in the order in which they were started.
        result: what they fill between them.
    """

    def __init__(self, works: list[CompressedWork], result: torch.Tensor) -> None:
        self._works = works
        self._filled = result

    @property
    def done(self) -> bool:
        """Whether all of them are."""
        return all(work.done for work in self._works)

    @property
    def exchanges(self) -> int:
        """Those of the one that has most left."""
        return max((work.exchanges for work in self._works), default=0)

    def advance(self) -> None:
        """One exchange of each, in turn: one's codec kernels run behind the others' exchanges."""
        for work in self._works:
            work.advance()

    def wait(self) -> torch.Tensor:
        """Complete all of them."""
        while not self.done:
            self.advance()
        return self._filled
