"""Observers of CUDA graphs, with a stand-in for torch's class."""

import pytest
import torch

from taco_kernels.common.graph_events import GraphObserver, ignore, observe


class Graph:
    def __init__(self) -> None:
        self.done: list[str] = []

    def capture_begin(self, pool=None, capture_error_mode="global") -> None:
        self.done.append(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        self.done.append("end")
        if "fail" in self.done:
            raise RuntimeError("capture failed")

    def replay(self) -> None:
        self.done.append("replay")


class Log(GraphObserver[list[str]]):
    """Keeps with a graph what it was told."""

    def replaying(self, content: list[str]) -> None:
        content.append("replay")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (Graph,), {}))


def test_an_observer_is_told_once_and_keeps_what_it_adds_in_a_capture() -> None:
    log, empty = Log(list), Log(list)
    for observer in (empty, log, log):
        observe(observer)
    graph = torch.cuda.CUDAGraph()
    assert log.captured is None
    graph.capture_begin("pool", capture_error_mode="thread_local")
    log.captured.append("captured")
    graph.capture_end()
    assert log.captured is None and graph.done == ["begin pool thread_local", "end"]
    graph.replay()
    assert log.contents[graph] == ["captured", "replay"] and graph.done[-1] == "replay"
    assert empty.contents[graph] == [], "nothing in the graph is its own"


def test_a_graph_captured_again_has_what_its_last_capture_added() -> None:
    observe(log := Log(list))
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        graph.capture_begin()
        log.captured.append("captured")
        graph.capture_end()
    assert log.contents[graph] == ["captured"]


def test_a_capture_that_fails_has_ended() -> None:
    observe(log := Log(list))
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    graph.done.append("fail")
    with pytest.raises(RuntimeError, match="capture failed"):
        graph.capture_end()
    assert log.captured is None


def test_the_class_is_as_it_was_when_nobody_observes() -> None:
    """After the last of two observers."""
    names = ("capture_begin", "capture_end", "replay")
    methods = [getattr(torch.cuda.CUDAGraph, name) for name in names]
    first, second = Log(list), Log(list)
    for observer in (first, second):
        observe(observer)
    ignore(first)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    assert first.captured is None and second.captured == []
    ignore(second)
    for name, method in zip(names, methods, strict=True):
        assert getattr(torch.cuda.CUDAGraph, name) is method
    ignore(second)


def test_what_others_have_put_over_ours_is_left_alone(monkeypatch) -> None:
    log = Log(list)
    observe(log)
    ours = torch.cuda.CUDAGraph.replay

    def theirs(graph) -> None:
        ours(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", theirs)
    ignore(log)
    assert torch.cuda.CUDAGraph.replay is theirs
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    graph.replay()
    assert graph.done[-1] == "replay" and log.captured is None
