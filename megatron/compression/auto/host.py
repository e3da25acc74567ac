"""Does the GPU wait for the host? Times layers twice: launched by the host, and run by the GPU alone.

In the first micro-batch of an iteration nothing is queued, so the clock at two layers' beginnings
tells what launching the layers between them takes::

    host   | launches layer 1 | launches layer 2 | ...      time between marks = the host's
    GPU    |  1  |            |  2  |                       waits in between

An iteration later the GPU sleeps first. Everything is launched when it wakes, and its own clock
tells what the layers take without waiting::

    host   | layer 1 | layer 2 | ...
    GPU    sleeps ..................| 1 | 2 | ...           time between events = the GPU's
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.hooks import RemovableHandle

SPAN = 4
"""Layers that are timed together. What they launch has to fit into the device's queue of about a
thousand kernels, or the host would wait for the GPU."""
CYCLES = 2e9
"""Of a GPU's clock in a second, at most: a sleep that is longer than needed does no harm."""
ITERATIONS = 3
"""Iterations of the watch, after the first one, in which kernels are compiled: one to settle, one
for the host, one for the GPU."""


class Gpu:
    """The current CUDA device, as far as the watch uses it."""

    def sleep(self, seconds: float) -> None:
        """Have the current stream do nothing for so long, or somewhat longer."""
        torch.cuda._sleep(int(seconds * CYCLES))

    def event(self) -> Any:
        """Return an event of the current stream, recorded now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait until everything has been done."""
        torch.cuda.synchronize()


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer."""

    host_forward: float = 0.0
    """What the host takes to launch it."""
    gpu_forward: float = 0.0
    """What the GPU takes to run it when everything has been launched."""
    host_backward: float = 0.0
    gpu_backward: float = 0.0

    @property
    def host(self) -> float:
        """The host's seconds of both directions."""
        return self.host_forward + self.host_backward

    @property
    def gpu(self) -> float:
        """The GPU's seconds of both directions."""
        return self.gpu_forward + self.gpu_backward

    @property
    def waited(self) -> float:
        """The seconds that the GPU waits for the host."""
        # Direction by direction: where the GPU is the slower one it does not make up for the other.
        forward = max(0.0, self.host_forward - self.gpu_forward)
        backward = max(0.0, self.host_backward - self.gpu_backward)
        return forward + backward


class HostWatch:
    """Watches a few layers of this rank for ``ITERATIONS`` iterations.

    Args:
        chunks: the model chunks of this pipeline stage.
        gpu: the device.
        clock: the host's, in seconds.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        gpu: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._gpu = Gpu() if gpu is None else gpu
        self._clock = clock
        layers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, TransformerLayer)
        ]
        self.layers = len(layers)
        """Of all chunks."""
        # Not from the first layer on, before which the embedding is launched, if there are enough.
        first = 1 if self.layers > 2 else 0
        last = min(first + SPAN, self.layers - 1)
        self._span = last - first
        self._handles: list[RemovableHandle] = []
        if self._span > 0:
            for name, layer in (("first", layers[first]), ("last", layers[last])):
                self._handles.append(
                    layer.register_forward_pre_hook(self._hook(name), with_kwargs=True)
                )
        self._iteration = 0
        """Iterations that have ended."""
        self._marks: dict[str, float] = {}
        """The host's clock at the first time that this iteration came to a mark."""
        self._events: dict[str, Any] = {}
        self._host: dict[str, float] = {}
        """Seconds of the span by direction, to launch it."""
        self._ended = 0.0
        self.iteration_seconds = 0.0
        """What the iteration took in which the host was timed."""
        self.times: LayerTimes | None = None
        """The result; None: not there yet, or layers were not called one by one."""

    def iteration_ended(self) -> bool:
        """Go on to the next iteration; return whether this was the last one to watch."""
        self._iteration += 1
        if self._span > 0 and self._iteration > 1:
            self._gpu.synchronize()
            now = self._clock()
            if self._iteration == ITERATIONS:
                self._host = self._spans(self._marks, lambda begin, end: end - begin)
                self.iteration_seconds = now - self._ended
            elif self._iteration == ITERATIONS + 1:
                self._finish()
            self._ended = now
        self._marks = {}
        if self._iteration <= ITERATIONS:
            return False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return True

    def _finish(self) -> None:
        """Work out the times of a layer."""
        gpu = self._spans(self._events, lambda begin, end: 1e-3 * begin.elapsed_time(end))
        # Layers that are not called one by one leave no marks, as in halves of a micro-batch.
        if "forward" not in self._host or "forward" not in gpu:
            return
        seconds = {
            "host_forward": self._host["forward"] / self._span,
            "gpu_forward": gpu["forward"] / self._span,
        }
        # Recomputed layers have no backward of their own here; what is known counts.
        if "backward" in self._host and "backward" in gpu:
            seconds["host_backward"] = self._host["backward"] / self._span
            seconds["gpu_backward"] = gpu["backward"] / self._span
        self.times = LayerTimes(**seconds)

    @staticmethod
    def _spans(marks: dict[str, Any], between: Callable[[Any, Any], float]) -> dict[str, float]:
        """Return the seconds between the marks at both ends of the span, by direction."""
        spans = {}
        if "first forward" in marks and "last forward" in marks:
            spans["forward"] = between(marks["first forward"], marks["last forward"])
        # Backward comes to the last layer first.
        if "first backward" in marks and "last backward" in marks:
            spans["backward"] = between(marks["last backward"], marks["first backward"])
        return spans

    def _hook(self, name: str) -> Callable[..., None]:
        """Return what marks the beginning of a layer's forward and the end of its backward."""

        def before(module: torch.nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            if f"{name} forward" in self._marks:
                return  # a further micro-batch, or the layer is recomputed
            self._mark(f"{name} forward", "first forward")
            hidden = arguments[0] if arguments else named.get("hidden_states")
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                # Its gradient is the last thing that the layer's backward computes.
                hidden.register_hook(lambda gradient: self._mark_backward(name))

        return before

    def _mark_backward(self, name: str) -> None:
        if f"{name} backward" not in self._marks:
            self._mark(f"{name} backward", "last backward")

    def _mark(self, mark: str, beginning: str) -> None:
        """Note the host's clock; in the last iteration record an event, after a sleep where the span
        begins.

        Args:
            mark: which end of the span in which direction.
            beginning: the mark with which the span begins in that direction.
        """
        self._marks[mark] = self._clock()
        if self._iteration != ITERATIONS:
            return
        direction = mark.partition(" ")[2]
        if mark == beginning and direction in self._host:
            # Twice what launching takes: the clock may be slower than CYCLES says, not faster.
            self._gpu.sleep(2 * self._host[direction])
        self._events[mark] = self._gpu.event()
