"""Compression in a training loop of one's own over megatron-core, without megatron.training:

    compression = attach(model_chunks, CompressionConfig(...))   # before they are wrapped
    chunks = [DistributedDataParallel(...) for chunk in model_chunks]
    compression.attach_wrapped(chunks)                           # after
    ... forward_backward_func(...); optimizer.step(); compression.step()
    compression.close()                                          # if the process goes on without it

A process may have several models, each with a ``compression`` of its own.
"""

from collections.abc import Callable

import torch

from megatron.compression import repetition
from megatron.compression.config import CompressionConfig
from megatron.compression.dimension import print_on_first_rank
from megatron.compression.errors import SettingError, spelled
from megatron.compression.names import PYTHON_NAMES
from megatron.compression.patches import gaps
from megatron.compression.session import Host, Session


class OwnLoop(Host):
    """A loop of one's own, by what ``attach`` was given."""

    def __init__(
        self,
        iteration: Callable[[], int] | None,
        train_iters: int | None,
        log: Callable[[str], None],
        broadcasts_batch: bool,
    ) -> None:
        self.iteration = iteration
        self.broadcasts_batch = broadcasts_batch
        self._train_iters = train_iters
        self._log = log

    def log(self, line: str) -> None:
        self._log(line)

    def train_iters(self) -> int | None:
        return self._train_iters


def attach(
    chunks: list[torch.nn.Module],
    config: CompressionConfig,
    *,
    iteration: Callable[[], int] | None = None,
    train_iters: int | None = None,
    log: Callable[[str], None] = print_on_first_rank,
    broadcasts_batch: bool = False,
) -> Session:
    """Compress what megatron-core models send, in a loop of one's own.

    Args:
        chunks: the model chunks of this pipeline stage, built by megatron-core and not wrapped.
        config: what is compressed, and how.
        iteration: returns the zero-based training iteration; None: calls of ``step`` are counted.
        train_iters: how long the run is, in iterations, where it is known.
        log: prints a line; called on every rank. By default the first rank prints.
        broadcasts_batch: tensor-parallel rank 0 sends the batch to its group, which is counted
            then.

    Returns:
        The session of this model. Its ``attach_wrapped`` takes the chunks once they are wrapped by
        DistributedDataParallel; ``step`` is to be called after each iteration.

    Raises:
        CompressionConfigError: a layer communicates in a way that is not covered; settings left
            open.
    """
    host = OwnLoop(iteration, train_iters, log, broadcasts_batch)
    with spelled(PYTHON_NAMES):
        _refuse_what_needs_megatrons_loop(config)
        gaps.make_torch_optimizers_resumable()
        session = Session(config, host).open()
        try:
            session.attach_model(chunks)
        except BaseException:
            # Nothing of a refused model stays: the loop may go on without compression.
            session.close()
            raise
    for chunk in chunks:
        # The hook also keeps the session as long as the chunk lives.
        chunk.register_forward_pre_hook(session.refuse_missing_calls)
    return session


def _refuse_what_needs_megatrons_loop(config: CompressionConfig) -> None:
    for path in ("auto", "error_bound", "report"):
        if getattr(config, path):
            raise SettingError(
                path, None, "needs Megatron's loop and arguments, which enable() gets", "drop it"
            )
    if config.local_steps.enabled:
        raise SettingError(
            "local_steps.data_centres",
            config.local_steps.data_centres,
            "needs Megatron's loop, which enable() is for: rounds begin and end with its steps",
            "drop it",
        )
    repetition.refuse_stages(config, "only Megatron's training loop repeats passes")
