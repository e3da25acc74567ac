"""Observers of CUDA graphs, with a stand-in for torch's class."""

import pytest
import torch

from taco_kernels.common.graph_events import GraphObserver, observe


class Graph:
    """Remembers what was done with it; a capture fails if "fail" is among that."""

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
    """A class of its own for each test, since observing changes it."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (Graph,), {}))


@pytest.fixture
def log() -> Log:
    """An observer of all graphs."""
    log = Log(list)
    observe(log)
    return log


def captured(log: Log, graph: Graph) -> None:
    """Capture a graph, in which the observer adds something."""
    graph.capture_begin()
    log.captured.append("captured")
    graph.capture_end()


def test_a_graph_is_captured_with_the_arguments_that_it_was_given(log: Log) -> None:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin("pool", capture_error_mode="thread_local")
    graph.capture_end()
    assert graph.done == ["begin pool thread_local", "end"]


def test_there_is_a_content_during_a_capture_alone(log: Log) -> None:
    graph = torch.cuda.CUDAGraph()
    assert log.captured is None
    graph.capture_begin()
    assert log.captured == []
    graph.capture_end()
    assert log.captured is None


def test_a_graph_has_what_the_observer_added_in_its_capture(log: Log) -> None:
    graph = torch.cuda.CUDAGraph()
    captured(log, graph)
    assert log.contents[graph] == ["captured"]


def test_an_observer_is_told_of_a_replay_before_it(log: Log) -> None:
    graph = torch.cuda.CUDAGraph()
    captured(log, graph)
    graph.replay()
    assert log.contents[graph] == ["captured", "replay"]
    assert graph.done[-1] == "replay"


def test_an_observer_that_is_registered_twice_is_told_once(log: Log) -> None:
    observe(log)
    graph = torch.cuda.CUDAGraph()
    captured(log, graph)
    graph.replay()
    assert log.contents[graph] == ["captured", "replay"]


def test_an_observer_without_a_part_in_the_graph_is_not_told_of_replays(log: Log) -> None:
    bystander = Log(list)
    observe(bystander)
    graph = torch.cuda.CUDAGraph()
    captured(log, graph)
    graph.replay()
    assert bystander.contents[graph] == []


def test_a_graph_captured_again_has_what_its_last_capture_added(log: Log) -> None:
    graph = torch.cuda.CUDAGraph()
    captured(log, graph)
    captured(log, graph)
    assert log.contents[graph] == ["captured"]


def test_a_capture_that_fails_has_ended(log: Log) -> None:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    graph.done.append("fail")
    with pytest.raises(RuntimeError, match="capture failed"):
        graph.capture_end()
    assert log.captured is None
