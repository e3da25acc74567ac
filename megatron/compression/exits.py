"""How a run ends: every rank leaves the process groups, then with the status that Megatron chose."""

import sys
from collections.abc import Callable

from megatron.compression.errors import came_through


def train_to_the_end(pretrain: Callable[[], None]) -> None:
    """Call ``pretrain()``, destroy the process groups, also after an early exit of its loop, and leave.

    Only the exit's status is kept: the exception's traceback would keep frames alive and with them the data
    loaders' workers. With --exit-signal-handler these ignore the signal that ends them when the interpreter
    does: the process would wait for them forever.

    Raises: SystemExit: where Megatron leaves early on every rank, with the same status.
    """
    left_early, status = False, None
    try:
        pretrain()
    except SystemExit as exit_:
        if not came_through(exit_, "train"):  # one rank alone may leave during set-up
            raise
        left_early, status = True, exit_.code
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if left_early:
        sys.exit(status)
