"""Who is told when a CUDA graph is captured and replayed.

All graphs of a training run are ``torch.cuda.CUDAGraph``: those of a whole iteration, of single
layers, of Transformer Engine and of torch.compile. So its methods tell the observers, and no caller
has to::

    capture_begin -> observer.capture_begun(graph)      content = new(), filled while capturing
    capture_end   -> observer.capture_ended()
    replay        -> observer.replaying(content)        before the graph is replayed
"""

from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

import torch


class GraphObserver[Content]:
    """Keeps what each graph contains, and is told of its replays.

    ``new`` makes the content of a capture that begins, to be filled in place. A subclass overrides
    ``replaying``.
    """

    def __init__(self, new: Callable[[], Content]) -> None:
        self._new = new
        self.captured: Content | None = None
        """Content of the graph that is being captured, None outside. One capture runs at a time."""
        self.contents: WeakKeyDictionary[torch.cuda.CUDAGraph, Content] = WeakKeyDictionary()
        """Content of every graph that still exists."""

    def capture_begun(self, graph: torch.cuda.CUDAGraph) -> None:
        """Note that the current stream captures into ``graph`` from now on."""
        self.captured = self._new()
        self.contents[graph] = self.captured

    def capture_ended(self) -> None:
        """Note that the capture is over, also one that failed."""
        self.captured = None

    def replaying(self, content: Content) -> None:
        """Act before a graph with this content, which is not empty, is replayed.

        The replay is on the current stream, which may be capturing another graph.
        """


_observers: dict[type, list[GraphObserver]] = {}
"""Observers of each class of graphs whose methods have been replaced."""
_METHODS = ("capture_begin", "capture_end", "replay")
_OURS = "_observed_original"
"""Attribute of a replaced method: the original."""


def observe(observer: GraphObserver) -> None:
    """Tell ``observer`` of all captures and replays from now on. A second call changes nothing."""
    graphs = torch.cuda.CUDAGraph
    if graphs not in _observers:
        _observers[graphs] = []
        originals = {name: getattr(graphs, name) for name in _METHODS}
        _replace_methods(graphs, _observers[graphs])
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
    """Return True if a method is a replacement itself: a wrapper over one has copied its
    attributes."""
    return getattr(method, _OURS, None) is getattr(method, "__wrapped__", method)


def _replace_methods(graphs: type, observers: list[GraphObserver]) -> None:
    """Let capture_begin, capture_end and replay of a class tell the observers in a list that may
    grow."""
    begin = graphs.capture_begin
    end = graphs.capture_end
    replay = graphs.replay

    @wraps(begin)
    def capture_begin(graph, *args, **kwargs) -> None:
        begin(graph, *args, **kwargs)
        for observer in observers:
            observer.capture_begun(graph)

    @wraps(end)
    def capture_end(graph) -> None:
        try:
            end(graph)
        finally:  # a capture that fails is over, too
            for observer in observers:
                observer.capture_ended()

    @wraps(replay)
    def observed_replay(graph) -> None:
        for observer in observers:
            if content := observer.contents.get(graph):
                observer.replaying(content)
        replay(graph)

    graphs.capture_begin = capture_begin
    graphs.capture_end = capture_end
    graphs.replay = observed_replay
