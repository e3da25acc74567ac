"""Reductions of several buckets under way at once."""

from collections import deque

from megatron.compression.collectives.work import CompressedWork


class Works:
    """Several handles as one: the pieces of a bucket, or the buckets of a group."""

    def __init__(self, works: list[CompressedWork]) -> None:
        self._works = works

    @property
    def done(self) -> bool:
        """Whether every result has been taken."""
        return all(work.done for work in self._works)

    def advance(self) -> None:
        """Move every handle on by one exchange: a later one's first runs behind an earlier one's second."""
        for work in self._works:
            work.advance()

    def wait(self) -> None:
        """Complete all of them."""
        while not self.done:
            self.advance()


class InFlight:
    """Moves older reductions on when a newer one has been started.

    During the backward pass only the hooks of later buckets give an earlier bucket the chance to start its
    second exchange and to free its buffers. ``lag`` buckets are left alone, so that the computation does not
    wait for an exchange that has just begun.
    """

    def __init__(self, lag: int = 1) -> None:
        self._lag = lag
        self._works: deque[Works] = deque()

    def add(self, works: Works) -> None:
        """Take in a reduction that has just been started."""
        for older in list(self._works)[: max(0, len(self._works) - self._lag)]:
            older.advance()
        self._works = deque(older for older in self._works if not older.done)
        self._works.append(works)

    def advance(self) -> None:
        """Move all of them on: their second exchanges run while the first one's result is waited for."""
        for works in self._works:
            works.advance()
        self._works = deque(works for works in self._works if not works.done)
