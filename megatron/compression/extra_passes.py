"""Forward passes beside training's, which leave no trace in it.

``no_trace`` surrounds such passes: random states, gathers of weights, Megatron's checks and timers
are afterwards what they were before. ``RecordedStep`` follows one training step of Megatron's loop and
passes its last micro-batches forward again, by the schedule of the step.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config

from megatron.compression.patches import loop


class RandomStates:
    """The random states of this rank, as they are when it is made: Python's, numpy's, torch's, the
    device's, and those of Megatron's tracker."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state()
        self._tracked: dict[str, torch.Tensor] = {}
        """By the names of Megatron's tracker, such as ``model-parallel-rng``."""
        for name, state in get_cuda_rng_tracker().get_states().items():
            # In runs with CUDA graphs a state is a generator, which graphs hold.
            if isinstance(state, torch.Generator):
                state = state.get_state()
            self._tracked[name] = state

    def restore(self) -> None:
        """Put all of them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        torch.cuda.set_rng_state(self._device)
        tracker = get_cuda_rng_tracker()
        states = tracker.get_states()
        for name, tracked in self._tracked.items():
            if isinstance(states[name], torch.Generator):
                # In place: a captured graph goes on with this generator.
                states[name].set_state(tracked)
            else:
                states[name] = tracked
        if states:
            tracker.set_states(states)


@contextmanager
def no_trace(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Run forward passes in the body without gradients, and leave training as it was before.

    The weights must be complete, as after a training step's passes and before its optimizer step.

    Args:
        chunks: the model chunks of this pipeline stage, as they are wrapped.
    """
    states = RandomStates()
    with ExitStack() as stack:
        stack.callback(states.restore)
        stack.enter_context(torch.no_grad())
        stack.enter_context(_without_hooks_of_schedules(chunks))
        stack.enter_context(_without_weight_gathers(chunks))
        stack.enter_context(_prediction_losses_kept())
        stack.enter_context(loop.without_checks_of_results())
        yield


@contextmanager
def _without_hooks_of_schedules(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Take timers, and what starts reductions and gathers, from the model's configuration."""
    config = get_model_config(chunks[0])
    names = ("timers", "no_sync_func", "grad_sync_func", "param_sync_func")
    values = {name: getattr(config, name) for name in names}
    for name in names:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, value in values.items():
            setattr(config, name, value)


@contextmanager
def _without_weight_gathers(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Take DDP's hooks off, which gather weights before a forward (``--overlap-param-gather``).

    After a backward pass DDP counts the weights as not gathered, so that a forward would gather
    them once more; compressed, that would add the last update twice.
    """
    hooked = [chunk for chunk in chunks if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


@contextmanager
def _prediction_losses_kept() -> Iterator[None]:
    """Keep the sums of multi-token prediction's losses, which each forward adds to for the log."""
    tracker = MTPLossLoggingHelper.tracker
    before = dict(tracker)
    for name, value in tracker.items():
        # Forward passes add to tensors in place.
        if isinstance(value, torch.Tensor):
            before[name] = value.clone()
    try:
        yield
    finally:
        for name in list(tracker):
            if name not in before:
                del tracker[name]
            elif isinstance(before[name], torch.Tensor):
                # In place: a captured graph adds to this tensor.
                tracker[name].copy_(before[name])
            else:
                tracker[name] = before[name]


class _Recorder:
    """An iterator that keeps what it gives."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.items: list[Any] = []

    def __iter__(self) -> "_Recorder":
        return self

    def __next__(self) -> Any:
        item = next(self.source)
        # A copy of the dictionary, since a forward step may take values out of it.
        self.items.append(copy.copy(item))
        return item


class RecordedStep:
    """A training step of Megatron's loop whose last micro-batches can pass forward again.

    As a context it surrounds the step and records its micro-batches:

        with RecordedStep(arguments, micro_batches=1, shape) as step:
            train_step(...)          # somewhere in it: step.forward()

    Args:
        arguments: of Megatron's ``train_step``, by name.
        micro_batches: how many pass forward again; the interleaved schedule needs several.
        shape: further arguments of the schedule: lengths of sequences, the size of a micro-batch.
    """

    def __init__(
        self, arguments: dict[str, Any], micro_batches: int, shape: dict[str, int | None]
    ) -> None:
        self.micro_batches = micro_batches
        self._arguments = arguments
        self._shape = shape
        data = arguments["data_iterator"]
        self._has_chunks = isinstance(data, list)
        self._iterators = data if self._has_chunks else [data]
        self._recorders: dict[int, _Recorder] = {}
        """By the identity of Megatron's iterator, which may be that of several chunks."""

    def __enter__(self) -> "RecordedStep":
        for iterator in self._iterators:
            # A stage that reads no data has none.
            if iterator is not None and id(iterator) not in self._recorders:
                recorder = _Recorder(iterator.iterable)
                self._recorders[id(iterator)] = recorder
                iterator.iterable = recorder
        return self

    def __exit__(self, *error: object) -> None:
        for iterator in self._iterators:
            if iterator is not None and id(iterator) in self._recorders:
                iterator.iterable = self._recorders.pop(id(iterator)).source

    def forward(self) -> list[torch.Tensor]:
        """Pass the last micro-batches forward; the step's passes have ended.

        Returns:
            A loss for each, on the last pipeline stage; nothing elsewhere. A loss is one value, or
            the sum over tokens and their number, as the model's loss function logs it.
        """
        arguments = self._arguments
        batches: Any = [self._last_of(iterator) for iterator in self._iterators]
        reports = _eager(arguments["forward_backward_func"])(
            forward_step_func=arguments["forward_step_func"],
            data_iterator=batches if self._has_chunks else batches[0],
            model=arguments["model"],
            num_microbatches=self.micro_batches,
            forward_only=True,
            # Not the first of an iteration: weights that are kept in fp8 stay as they are.
            first_val_step=False,
            pg_collection=arguments.get("pg_collection"),
            p2p_communicator=arguments.get("p2p_communicator"),
            **self._shape,
        )
        # The language model's loss comes first.
        return [next(iter(report.values())) for report in reports]

    def _last_of(self, iterator: Any) -> Iterator[Any] | None:
        """Return the last micro-batches that an iterator has given; None: the stage reads none."""
        if iterator is None:
            return None
        # A micro-batch may take several reads; tensor-parallel rank 0 alone reads at all.
        items = self._recorders[id(iterator)].items
        reads_of_one = len(items) // get_num_microbatches()
        last = items[len(items) - reads_of_one * self.micro_batches :]
        return iter([copy.copy(item) for item in last])


def _eager(forward_backward: Callable) -> Callable:
    """Return the schedule itself where a wrapper captures and replays it (``--cuda-graph-impl
    full_iteration``)."""
    return getattr(forward_backward, "forward_backward_func", forward_backward)
