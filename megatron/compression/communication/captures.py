"""CUDA graphs: what is counted while one is captured is sent by each of its replays.

A count in a capture is kept with the graph and made at every replay, in the replay's phase (training or
evaluation). That holds for graphs of whole iterations, of layers, of Transformer Engine and of loops of one's
own: all are ``torch.cuda.CUDAGraph``.
"""

import atexit
from collections import Counter
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from taco_kernels.common.graph_events import GraphObserver, observe

Count = tuple[Callable[..., None], tuple]
"""What counts, and its arguments; it also takes ``times``."""


class Captures(GraphObserver):
    """The graph that is being captured, and those that can be replayed."""

    def __init__(self) -> None:
        self.counts: Counter[Count] | None = None
        """Of the graph that is being captured, each with how often; None: none is. Whoever counts adds to it
        in place: a method would be a Python frame in each message."""
        self._of: WeakKeyDictionary[torch.cuda.CUDAGraph, Counter[Count]] = WeakKeyDictionary()
        self._watched: set[type] = set()

    def watch(self) -> None:
        """Count from now on; called by everything that counts."""
        if not self._watched:
            atexit.register(self.release)
        if torch.cuda.CUDAGraph not in self._watched:
            self._watched.add(torch.cuda.CUDAGraph)
            observe(self)

    def capture_begun(self, graph: torch.cuda.CUDAGraph) -> None:
        self.counts = self._of[graph] = Counter()

    def capture_ended(self, graph: torch.cuda.CUDAGraph) -> None:
        self.counts = None

    def replaying(self, graph: torch.cuda.CUDAGraph) -> None:
        for (count, given), times in self._of.get(graph, Counter()).items():
            count(*given, times=times)

    def release(self) -> None:
        """Free every graph; none can be replayed afterwards.

        Before process groups are destroyed: NCCL waits for the graphs that hold its kernels.
        """
        for graph in list(self._of):
            graph.reset()
        self._of.clear()


captures = Captures()
"""The process's: one capture runs at a time."""
