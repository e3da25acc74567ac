"""Weight gradients that wait for an exchange to run behind.

TE computes a layer's weight gradient right where its backward comes to it: behind the all-reduce or
reduce-scatter of a column-parallel layer's input gradient runs that layer's own, and behind a row-parallel
layer's all-gather nothing. TE can also put a weight gradient aside (its ``wgrad_store``). Here that is done
for one exchange: whatever was put aside runs behind the next exchange of the backward pass.

    row-parallel     gather the output gradient  [weight gradient of the layer above]
                     input gradient; the weight gradient is put aside
    column-parallel  input gradient, sum it      [the row-parallel layer's weight gradient]
                     its own: behind the sum's second exchange, or aside with sequence parallelism

The gradient is added to ``main_grad``, in which autograd has no part, so it may come late: whatever waits is
computed before a bucket is reduced and at the end of the backward pass. Cost in memory: the inputs of one
weight gradient live that much longer.
"""

from collections import deque
from collections.abc import Callable

import torch


class WeightGradients:
    """Those that wait, in the order in which they were put aside."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, compute: Callable[[], object]) -> None:
        """Put one aside; called in a backward pass, at whose end it will have been computed."""
        if not self._waiting:
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        self._waiting.append(compute)

    def compute_one(self) -> None:
        """Launch the oldest."""
        self._waiting.popleft()()

    def flush(self) -> None:
        """Launch all."""
        while self._waiting:
            self.compute_one()


class Aside:
    """A layer's ``wgrad_store`` (TE's contract: ``delay_wgrad_compute``, ``put``) that hands on to the queue.

    Args:
        may_come_late: whether it is put aside now: TE's GEMM has to add to ``main_grad`` itself.
    """

    def __init__(self, queue: WeightGradients, may_come_late: Callable[[], bool]) -> None:
        self._queue, self._may_come_late = queue, may_come_late

    def delay_wgrad_compute(self) -> bool:
        """Whether the layer's next weight gradient is put aside."""
        return self._may_come_late()

    def put(self, tensors: list, compute: Callable) -> None:
        """TE's own call in the layer's backward."""
        self._queue.put(lambda: compute(*tensors))
