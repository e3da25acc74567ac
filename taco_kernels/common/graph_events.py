"""Who is told when a CUDA graph is captured and replayed.

All graphs of a training run are ``torch.cuda.CUDAGraph``: those of a whole iteration, of single layers, of
Transformer Engine and of torch.compile. So its methods tell the observers, and no caller has to.
"""

from functools import wraps

import torch


class GraphObserver:
    """What an observer may override. A graph can be held weakly, and is the key for what it contains."""

    def capture_begun(self, graph: torch.cuda.CUDAGraph) -> None:
        """The current stream captures into ``graph`` from now on. One capture runs at a time."""

    def capture_ended(self, graph: torch.cuda.CUDAGraph) -> None:
        """The capture is over, also one that failed."""

    def replaying(self, graph: torch.cuda.CUDAGraph) -> None:
        """``graph`` is about to be replayed on the current stream, which may be capturing another graph."""


_observers: dict[type, list[GraphObserver]] = {}
"""Of each class that has been changed."""


def observe(observer: GraphObserver) -> None:
    """Tell ``observer`` of all captures and replays from now on."""
    graphs = torch.cuda.CUDAGraph
    if graphs not in _observers:
        _observers[graphs] = []
        _change(graphs, _observers[graphs])
    _observers[graphs].append(observer)


def _change(graphs: type, observers: list[GraphObserver]) -> None:
    begin, end, replay = graphs.capture_begin, graphs.capture_end, graphs.replay

    @wraps(begin)
    def capture_begin(graph, *args, **kwargs) -> None:
        begin(graph, *args, **kwargs)
        for observer in observers:
            observer.capture_begun(graph)

    @wraps(end)
    def capture_end(graph) -> None:
        try:
            end(graph)
        finally:
            for observer in observers:
                observer.capture_ended(graph)

    @wraps(replay)
    def replayed(graph) -> None:
        for observer in observers:
            observer.replaying(graph)
        replay(graph)

    graphs.capture_begin, graphs.capture_end, graphs.replay = capture_begin, capture_end, replayed
