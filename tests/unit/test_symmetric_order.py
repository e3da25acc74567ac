"""The order of symmetric-memory collectives, with stand-ins for streams, channels and graphs."""

import pytest
import torch

from taco_kernels.symmetric_memory.order import CallOrder


class Stream:
    """Remembers whom it waits for; work itself is a number in order of issue."""

    def __init__(self, name: str, waits: list[str]) -> None:
        self.name, self.cuda_stream, self.waits = name, id(self), waits

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(f"{self.name}>{other.name}")


class Channel:
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.checked = 0

    def check(self) -> None:
        self.checked += 1


class Graph:
    """Its identity is all that the order asks for."""


class Device:
    """What runs where: ``order`` as torch's hooks and the groups would use it."""

    def __init__(self) -> None:
        self.order, self.waits, self.capturing, self.current = CallOrder(), [], False, None
        self.streams = {name: Stream(name, self.waits) for name in "abcd"}

    def call(self, stream: str, channel: Channel) -> None:
        self.current = self.streams[stream]
        self.order.follow(channel)

    def capture(self, *calls: tuple[str, Channel]) -> Graph:
        graph, self.capturing = Graph(), True
        self.order.capture_begun(graph)
        for stream, channel in calls:
            self.call(stream, channel)
        self.order.capture_ended()
        self.capturing = False
        return graph

    def replay(self, stream: str, graph: Graph) -> None:
        self.current = self.streams[stream]
        self.order.replaying(self.order.contents[graph])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda _: device.current.cuda_stream, raising=False
    )
    return device


def test_eager_calls_wait_for_the_stream_before(device: Device) -> None:
    one, other = Channel(), Channel()
    for stream, channel in (("a", one), ("a", other), ("b", one), ("b", one), ("a", other)):
        device.call(stream, channel)
    assert device.waits == ["b>a", "a>b"]


def test_calls_of_a_capture_are_a_chain_of_their_own(device: Device) -> None:
    """No wait between a captured and an eager stream, nor between two captures."""
    one, other = Channel(), Channel()
    device.call("a", one)
    device.capture(("b", one), ("c", other), ("b", one))
    device.capture(("c", one), ("d", one))
    device.call("a", one)
    assert device.waits == ["c>b", "b>c", "d>c"]


def test_a_replay_is_a_call_in_the_order(device: Device) -> None:
    one, other = Channel(), Channel()
    graph, without = device.capture(("d", one), ("d", other)), device.capture()
    device.call("a", one)
    device.replay("b", graph)
    device.replay("c", without)  # waits for nobody, nobody for it
    device.call("b", one)
    device.call("a", other)
    assert device.waits == ["b>a", "a>b"]
    assert (one.checked, other.checked) == (1, 1)  # eager calls check in collectives.py


def test_a_graph_inside_a_capture_joins_its_chain(device: Device) -> None:
    one = Channel()
    inner, outer = device.capture(("d", one)), Graph()
    device.call("a", one)
    device.capturing = True
    device.order.capture_begun(outer)
    device.call("b", one)
    device.replay("c", inner)
    device.capturing = False
    device.replay("d", outer)
    assert device.waits == ["c>b", "d>a"]
