"""Handles of collectives that are under way."""

from collections.abc import Callable

import torch
import torch.distributed as dist


class CompressedWork:
    """A collective whose first exchange is under way; ``wait`` finishes it.

    Args:
        work: the exchange in flight, or None when it is complete.
        finish: what remains to do after it; returns the result.
    """

    def __init__(self, work: dist.Work | None, finish: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self._finish = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Complete the collective and return its result; a second call returns the same tensor."""
        if self._result is None:
            if self._work is not None:
                self._work.wait()
            self._result = self._finish()
            self._work = self._finish = None
        return self._result


def completed(result: torch.Tensor) -> CompressedWork:
    """A handle of a collective with nothing left to do."""
    return CompressedWork(None, lambda: result)
