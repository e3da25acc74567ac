"""What pipeline stages send each other."""

import functools
from collections.abc import Callable

from megatron.compression.patches.symbols import replace


def around_schedules(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before()`` and ``after()`` around each forward-backward pass over pipeline stages.

    Why: Megatron may repeat an iteration's pass (``--rerun-mode``), which its number alone does not tell.
    Not reached: passes that raise get no ``after``; one stage.
    """
    from megatron.core.pipeline_parallel import schedules

    def wrap(schedule):
        def wrapper(*args, **kwargs):
            before()
            result = schedule(*args, **kwargs)
            after()
            return result

        return wrapper

    for name in ("without_interleaving", "with_interleaving"):
        replace(schedules, f"forward_backward_pipelining_{name}", ("forward_step_func", "forward_only"), wrap)


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
