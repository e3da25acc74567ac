"""What pipeline stages send each other."""

import functools
from collections.abc import Callable
from typing import Any

from megatron.compression.patches.symbols import follow, replace


def after_schedules(after: Callable[[], None]) -> None:
    """Call ``after()`` behind each forward-backward pass over pipeline stages.

    Why: what a pass has sent must have arrived when it returns. Not reached: passes that raise; one stage.
    """
    from megatron.core.pipeline_parallel import schedules

    def run(result: Any, given: dict) -> None:
        after()

    for name in ("without_interleaving", "with_interleaving"):
        follow(schedules, f"forward_backward_pipelining_{name}", ("forward_step_func", "forward_only"), run)


def through_pipeline_exchange(exchange: Callable) -> None:
    """Have ``exchange(communicator, original, **arguments)`` send what pipeline stages send each other.

    Why: all schedules go through ``P2PCommunicator._communicate``, and the training loop passes no
    communicator of its own to them. Not reached: the exchange of shapes under ``--variable-seq-lengths``
    (24 bytes a tensor).
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def wrap(communicate):
        def wrapper(self, **kwargs):
            return exchange(self, functools.partial(communicate, self), **kwargs)

        return wrapper

    expected = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape")
    replace(P2PCommunicator, "_communicate", (*expected, "wait_on_reqs"), wrap)
