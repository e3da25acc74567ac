"""Observers of CUDA graphs, with a stand-in for torch's class."""

import pytest
import torch

from taco_kernels.common.graph_events import GraphObserver, observe


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


class Log(GraphObserver):
    def capture_begun(self, graph) -> None:
        graph.done.append("told of begin")

    def capture_ended(self, graph) -> None:
        graph.done.append("told of end")

    def replaying(self, graph) -> None:
        graph.done.append("told of replay")


def test_observers_are_told_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (Graph,), {}))
    observe(GraphObserver())  # overrides nothing
    observe(Log())
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin("pool", capture_error_mode="thread_local")
    graph.capture_end()
    graph.replay()
    told = ["begin pool thread_local", "told of begin", "end", "told of end", "told of replay", "replay"]
    assert graph.done == told


def test_a_capture_that_fails_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (Graph,), {}))
    observe(Log())
    graph = torch.cuda.CUDAGraph()
    graph.done.append("fail")
    with pytest.raises(RuntimeError, match="capture failed"):
        graph.capture_end()
    assert graph.done[-1] == "told of end"
