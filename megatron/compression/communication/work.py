"""The one handle of communication that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Work:
    """Communication whose first exchange is under way; ``wait`` finishes it.

    Work of several exchanges can be moved on by ``advance``, so that each of them runs behind other work:
    start it, launch a GEMM, advance it, launch another GEMM, wait. This needs no stream of its own (the
    exchanges run on the backend's), and so it overlaps with CUDA_DEVICE_MAX_CONNECTIONS=1 as well.

    Args:
        pending: the exchange in flight, with a ``wait`` of its own (torch.distributed's, or ours); None when
            it is complete.
        finish: what to do after it; returns the result, or the ``Work`` of the next exchange.
        exchanges: how many there are from here on.
    """

    def __init__(self, pending: Any, finish: Callable[[], Any] = lambda: None, exchanges: int = 1) -> None:
        self._pending, self._finish, self._exchanges = pending, finish, exchanges
        self._done, self._result = False, None

    @classmethod
    def completed(cls, result: Any = None) -> Work:
        """Work with nothing left to do."""
        work = cls(None, exchanges=0)
        work._done, work._result = True, result
        return work

    @property
    def done(self) -> bool:
        """Whether the result has been taken."""
        return self._done

    @property
    def exchanges(self) -> int:
        """How many have not been taken yet; 0 when it is done."""
        return self._exchanges

    def advance(self) -> None:
        """Take the exchange that is in flight and start the next one, if there is one."""
        if self._done:
            return
        if self._pending is not None:
            self._pending.wait()
        outcome = self._finish()
        if isinstance(outcome, Work):
            self._adopt(outcome)
        else:
            self._end(outcome)

    def wait(self) -> Any:
        """Complete it and return its result; a second call returns the same."""
        while not self._done:
            self.advance()
        return self._result

    def then(self, follow: Callable[[Any], Any]) -> Work:
        """This work with ``follow(result)`` behind its last exchange, whose result is the new result."""
        return _Followed(self, follow)

    def _adopt(self, other: Work) -> None:
        if other._done:
            self._end(other._result)
            return
        if type(other) is not Work:  # it knows better how to move on
            self._pending, self._finish, self._exchanges = None, lambda: _step(other), other.exchanges
            return
        self._pending, self._finish, self._exchanges = other._pending, other._finish, other._exchanges

    def _end(self, result: Any) -> None:
        self._done, self._result, self._exchanges = True, result, 0
        self._pending, self._finish = None, lambda: None  # nothing is kept alive


def _step(work: Work) -> Any:
    work.advance()
    return work.wait() if work.done else work


class _Followed(Work):
    def __init__(self, work: Work, follow: Callable[[Any], Any]) -> None:
        super().__init__(None)
        self._work: Work = work
        self._follow: Callable[[Any], Any] = follow

    @property
    def exchanges(self) -> int:
        return 0 if self._done else max(1, self._work.exchanges)

    def advance(self) -> None:
        if self._done:
            return
        if not self._work.done:
            self._work.advance()
        if self._work.done:
            self._end(self._follow(self._work.wait()))
            self._work, self._follow = self, lambda result: result  # nothing is kept alive


class _Joined(Work):
    def __init__(self, works: Sequence[Work], result: Any) -> None:
        super().__init__(None)
        self._works, self._filled = works, result
        if not works:
            self._end(result)

    @property
    def done(self) -> bool:
        return all(work.done for work in self._works)

    @property
    def exchanges(self) -> int:
        return max((work.exchanges for work in self._works), default=0)

    def advance(self) -> None:
        for work in self._works:
            work.advance()

    def wait(self) -> Any:
        while not self.done:
            self.advance()
        return self._filled


def join(works: Sequence[Work], result: Any = None) -> Work:
    """Several works as one; each ``advance`` moves all of them on by one exchange, in their order, so that
    one's kernels run behind the others' exchanges.

    Args:
        result: what ``wait`` returns: the tensor that they fill between them.
    """
    return _Joined(works, result)
