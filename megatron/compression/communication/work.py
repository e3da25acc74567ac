"""The one handle of communication that is under way, and several of them that move on together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Work:
    """Communication whose first exchange is under way; ``wait`` finishes it.

    Work of several exchanges is a chain: what follows an exchange (``finish``) starts the next one
    and returns its ``Work``. ``advance`` takes one step along the chain, so that each exchange
    overlaps with other work. An all-reduce over a codec:

        host        start      GEMM      advance            GEMM       wait
        link        [ all-to-all       ]                    [ all-gather         ]
        device      encode                decode, sum, encode          decode

    Args:
        pending: the exchange in flight, with a ``wait`` of its own (torch.distributed's, or ours);
            None when it is complete.
        finish: what to do after it; returns the result, or the ``Work`` of the next exchange. None:
            nothing.
        exchanges: how many there are from here on.
    """

    def __init__(
        self, pending: Any, finish: Callable[[], Any] | None = None, exchanges: int = 1
    ) -> None:
        # One of two states: under way (pending, finish, exchanges left), or done (result, and
        # nothing else).
        self._pending = pending
        self._finish = finish
        self._exchanges = exchanges
        self._done = False
        self._result: Any = None

    @classmethod
    def completed(cls, result: Any = None) -> Work:
        """Return work with nothing left to do."""
        work = cls(None, None, 0)
        work._done = True
        work._result = result
        return work

    @property
    def done(self) -> bool:
        """True once the result is there."""
        return self._done

    @property
    def exchanges(self) -> int:
        """Number of exchanges that have not been waited for yet; 0 when it is done."""
        return self._exchanges

    def advance(self) -> None:
        """Wait for the exchange that is in flight and start the next one, if any."""
        if self._done:
            return
        if self._pending is not None:
            self._pending.wait()
        # Decodes, and may start the next exchange.
        result = None if self._finish is None else self._finish()
        if not isinstance(result, Work):
            self._done = True
            self._result = result
            self._exchanges = 0
            # Nothing is kept alive: both hold tensors.
            self._pending = None
            self._finish = None
        elif type(result) is Work:
            # This work becomes the next one, whose exchange is in flight: the chain does not grow.
            self._done = result._done
            self._result = result._result
            self._pending = result._pending
            self._finish = result._finish
            self._exchanges = result._exchanges
        else:
            # A subclass knows better how to move on: each step is left to it.
            self._pending = None
            self._finish = lambda: _step(result)
            self._exchanges = result.exchanges

    def wait(self) -> Any:
        """Complete it and return its result; a second call returns the same."""
        while not self._done:
            self.advance()
        return self._result

    def then(self, follow: Callable[[Any], Any]) -> Work:
        """Return this work with ``follow(result)`` after its last exchange.

        What ``follow`` returns is the new result; a ``Work`` goes on as further exchanges.
        """
        return _Together([self], lambda: follow(self.wait()))


def _step(work: Work) -> Any:
    """Advance ``work``, and return it, or its result when it is done."""
    work.advance()
    return work.wait() if work.done else work


class _Together(Work):
    """Works that move on together, and what follows the last of them.

    Args:
        works: each ``advance`` moves all of them on, in this order.
        finish: called when all are done; returns the result, or a ``Work`` that goes on.
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], Any]) -> None:
        super().__init__(None, finish)
        self._works = works

    @property
    def exchanges(self) -> int:
        if self._done:
            return 0
        # ``finish`` is still to come when all works are done.
        return max(1, *(work.exchanges for work in self._works))

    def advance(self) -> None:
        if self._finish is None:
            return
        for work in self._works:
            work.advance()
        if not all(work.done for work in self._works):
            return
        self._result = self._finish()
        if isinstance(self._result, Work):
            # From here on its exchanges are what ``advance`` moves on, and its result is ours.
            self._works = [self._result]
            self._finish = self._result.wait
            return
        self._done = True
        # Works and ``finish`` hold payloads, whose memory is free from here on.
        self._works = ()
        self._finish = None


def join(works: Sequence[Work], result: Any = None) -> Work:
    """Return several works as one.

    Each ``advance`` moves all of them on by one exchange, in their order, so that one's kernels
    overlap with the others' exchanges.

    Args:
        works: started already.
        result: what ``wait`` returns.
    """
    if all(work.done for work in works):
        return Work.completed(result)
    return _Together(works, lambda: result)


class InFlight:
    """Reductions of buckets that are under way, of one kind: dense buckets, or experts'.

    The hooks of later buckets start an earlier one's second exchange; the newest is left alone, so
    that the computation does not wait for an exchange that has just begun. The order in which
    second exchanges start has to be the same on all ranks of a group. Within a kind it is the order
    of the buckets. Between kinds it is not: an expert without tokens is ready at another time. So
    each kind has its own.
    """

    def __init__(self) -> None:
        self._works: list[Work] = []

    def add(self, work: Work) -> None:
        """Add a reduction that has just been started, and advance all but the newest of the
        others."""
        self.advance(self._works[:-1])
        self._works.append(work)

    def advance(self, works: list[Work] | None = None) -> None:
        """Advance these, or all: their second exchanges run while the first one's result is waited
        for."""
        for work in self._works if works is None else works:
            work.advance()
        self._works = [work for work in self._works if not work.done]

    def wait(self) -> None:
        """Complete all of them. Exchanges start in the order of the reductions, the same on all
        ranks."""
        while self._works:
            self.advance()
