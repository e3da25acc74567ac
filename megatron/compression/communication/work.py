"""The one handle of communication that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Work:
    """Communication whose first exchange is under way; ``wait`` finishes it.

    Work of several exchanges can be moved on by ``advance``, so that each of them overlaps with other work:
    start it, launch a GEMM, advance it, launch another GEMM, wait. This needs no stream of its own (the
    exchanges run on the backend's), and so it overlaps with CUDA_DEVICE_MAX_CONNECTIONS=1 as well.

    Args:
        pending: the exchange in flight, with a ``wait`` of its own (torch.distributed's, or ours); None when
            it is complete.
        finish: what to do after it; returns the result, or the ``Work`` of the next exchange. None: nothing.
        exchanges: how many there are from here on.
    """

    def __init__(self, pending: Any, finish: Callable[[], Any] | None = None, exchanges: int = 1) -> None:
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
        """Wait for the exchange that is in flight and start the next one, if there is one."""
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
            self._pending, self._finish, self._left = next_one._pending, next_one._finish, next_one._left
        else:  # it knows better how to move on
            self._pending, self._finish, self._left = None, lambda: _step(next_one), next_one.exchanges

    def wait(self) -> Any:
        """Complete it and return its result; a second call returns the same."""
        while not self._done:
            self.advance()
        return self._result

    def then(self, follow: Callable[[Any], Any]) -> Work:
        """This work with ``follow(result)`` after its last exchange, whose result is the new result."""
        return _Followed(self, follow)


def _step(work: Work) -> Any:
    work.advance()
    return work.wait() if work.done else work


class _Followed(Work):
    def __init__(self, work: Work, follow: Callable[[Any], Any]) -> None:
        super().__init__(None)
        self._work: Work | None = work
        self._follow: Callable[[Any], Any] | None = follow

    @property
    def exchanges(self) -> int:
        return 0 if self._work is None else max(1, self._work.exchanges)

    def advance(self) -> None:
        if self._work is None or self._follow is None:
            return
        if not self._work.done:
            self._work.advance()
        if self._work.done:
            self._done, self._result = True, self._follow(self._work.wait())
            self._work = self._follow = None  # nothing is kept alive


class _Joined(Work):
    def __init__(self, works: Sequence[Work], result: Any) -> None:
        super().__init__(None)
        self._works, self._filled = works, result

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
    one's kernels overlap with the others' exchanges.

    Args:
        result: what ``wait`` returns: the tensor that they fill between them.
    """
    return _Joined(works, result)
