"""The one handle of communication that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Work:
    """Communication whose first exchange is under way; ``wait`` finishes it.

    ``advance`` moves work of several exchanges on, so that each overlaps with other work: start it, launch a
    GEMM, advance it, launch another GEMM, wait.

    Args:
        pending: the exchange in flight, with a ``wait`` of its own (torch.distributed's, or ours); None when
            it is complete.
        finish: what to do after it; returns the result, or the ``Work`` of the next exchange. None: nothing.
        exchanges: how many there are from here on.
    """

    def __init__(
        self, pending: Any, finish: Callable[[], Any] | None = None, exchanges: int = 1
    ) -> None:
        self._pending, self._finish, self._left = pending, finish, exchanges
        self._done, self._result = False, None

    @classmethod
    def completed(cls, result: Any = None) -> Work:
        """Work with nothing left to do."""
        work = cls(None, None, 0)
        work._done, work._result = True, result
        return work

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return self._done

    @property
    def exchanges(self) -> int:
        """How many have not been waited for yet; 0 when it is done."""
        return self._left

    def advance(self) -> None:
        """Wait for the exchange that is in flight and start the next one, if any."""
        if self._done:
            return
        if self._pending is not None:
            self._pending.wait()
        next_one = None if self._finish is None else self._finish()
        if not isinstance(next_one, Work):
            self._done, self._result, self._left = True, next_one, 0
            self._pending = self._finish = None  # nothing is kept alive
        elif type(next_one) is Work:
            self._done, self._result = next_one._done, next_one._result
            self._pending, self._finish, self._left = (
                next_one._pending,
                next_one._finish,
                next_one._left,
            )
        else:  # it knows better how to move on
            self._pending, self._finish, self._left = (
                None,
                lambda: _step(next_one),
                next_one.exchanges,
            )

    def wait(self) -> Any:
        """Complete it and return its result; a second call returns the same."""
        while not self._done:
            self.advance()
        return self._result

    def then(self, follow: Callable[[Any], Any]) -> Work:
        """This work with ``follow(result)`` after its last exchange, whose result is the new result; where it
        is a ``Work``, that goes on."""
        return _Together([self], lambda: follow(self.wait()))


def _step(work: Work) -> Any:
    work.advance()
    return work.wait() if work.done else work


class _Together(Work):
    """Works that move on together, and what follows the last of them."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], Any]) -> None:
        super().__init__(None, finish)
        self._works = works

    @property
    def exchanges(self) -> int:
        return 0 if self._done else max(1, *(work.exchanges for work in self._works))

    def advance(self) -> None:
        if self._finish is None:
            return
        for work in self._works:
            work.advance()
        if all(work.done for work in self._works):
            self._result = self._finish()
            if isinstance(self._result, Work):
                self._works, self._finish = [self._result], self._result.wait
                return
            self._done, self._works, self._finish = True, (), None  # nothing is kept alive


def join(works: Sequence[Work], result: Any = None) -> Work:
    """Several works as one, whose ``wait`` returns ``result``; each ``advance`` moves all of them on by one
    exchange, in their order, so that one's kernels overlap with the others' exchanges."""
    if all(work.done for work in works):
        return Work.completed(result)
    return _Together(works, lambda: result)
