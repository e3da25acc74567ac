"""Who is told when a CUDA graph is captured and replayed.

All graphs of a training run are ``torch.cuda.CUDAGraph``: those of a whole iteration, of single layers, of
Transformer Engine and of torch.compile. So its methods tell the observers, and no caller has to.
"""

from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

import torch


class GraphObserver[Content]:
    """Keeps what each graph contains, which ``new`` makes when a capture begins, and is told of its
    replays."""

    def __init__(self, new: Callable[[], Content]) -> None:
        self._new = new
        self.captured: Content | None = None
        """Of the graph that is being captured; None: none is. One capture runs at a time."""
        self.contents: WeakKeyDictionary[torch.cuda.CUDAGraph, Content] = WeakKeyDictionary()

    def capture_begun(self, graph: torch.cuda.CUDAGraph) -> None:
        """The current stream captures into ``graph`` from now on."""
        self.captured = self.contents[graph] = self._new()

    def capture_ended(self) -> None:
        """The capture is over, also one that failed."""
        self.captured = None

    def replaying(self, content: Content) -> None:
        """A graph with this content, which is not empty, is about to be replayed on the current stream, which
        may be capturing another graph."""


_observers: dict[type, list[GraphObserver]] = {}
"""Of each class that has been changed."""


def observe(observer: GraphObserver) -> None:
    """Tell ``observer`` of all captures and replays from now on. Idempotent."""
    graphs = torch.cuda.CUDAGraph
    if graphs not in _observers:
        _observers[graphs] = []
        originals = {name: getattr(graphs, name) for name in _METHODS}
        _change(graphs, _observers[graphs])
        for name, original in originals.items():
            setattr(getattr(graphs, name), _OURS, original)
    if observer not in _observers[graphs]:
        _observers[graphs].append(observer)


def ignore(observer: GraphObserver) -> None:
    """Tell ``observer`` of nothing more. The last one leaves the methods of the class as they were."""
    graphs = torch.cuda.CUDAGraph
    observers = _observers.get(graphs)
    if observers is None:
        return
    if observer in observers:
        observers.remove(observer)
    methods = {name: getattr(graphs, name) for name in _METHODS}
    # Where somebody else has put a wrapper over ours, both are left alone.
    if not observers and all(_is_ours(method) for method in methods.values()):
        for name, method in methods.items():
            setattr(graphs, name, getattr(method, _OURS))
        del _observers[graphs]


def _is_ours(method: Callable) -> bool:
    """Return whether a method is a replacement itself: a wrapper over one has copied its attributes."""
    return getattr(method, _OURS, None) is getattr(method, "__wrapped__", method)


_METHODS = ("capture_begin", "capture_end", "replay")
_OURS = "_observed_original"
"""Attribute of a replaced method: the original."""


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
                observer.capture_ended()

    @wraps(replay)
    def replayed(graph) -> None:
        for observer in observers:
            if content := observer.contents.get(graph):
                observer.replaying(content)
        replay(graph)

    graphs.capture_begin, graphs.capture_end, graphs.replay = capture_begin, capture_end, replayed
