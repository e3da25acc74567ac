"""The order of symmetric-memory collectives, with stand-ins for streams, channels and graphs."""

import pytest
import torch

from taco_kernels.symmetric_memory.order import CallOrder


class Stream:
    """Remembers whom it waits for; work itself is a number in order of issue."""

    def __init__(self, name: str, waits: list[str]) -> None:
        self.name = name
        self.cuda_stream = id(self)
        self.waits = waits

    def wait_stream(self, stream: "Stream") -> None:
        self.waits.append(f"{self.name}>{stream.name}")


class Channel:
    """Counts how often it is asked whether a call gave up waiting."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.checked = 0

    def check(self) -> None:
        self.checked += 1


class Graph:
    """Its identity is all that the order asks for."""


class Device:
    """What runs on which stream: ``order`` as torch's hooks and the groups would use it."""

    def __init__(self) -> None:
        self.order = CallOrder()
        self.capturing = False
        self.current: Stream | None = None
        self.waits: list[str] = []
        """Every wait, "b>a" where stream b waits for stream a."""
        self.streams = {name: Stream(name, self.waits) for name in "abcd"}

    def call(self, stream: str, channel: Channel) -> None:
        """A collective on a stream, captured or eager."""
        self.current = self.streams[stream]
        self.order.follow(channel)

    def capture(self, *calls: tuple[str, Channel]) -> Graph:
        """A graph of these calls."""
        graph = Graph()
        self.capturing = True
        self.order.capture_begun(graph)
        for stream, channel in calls:
            self.call(stream, channel)
        self.order.capture_ended()
        self.capturing = False
        return graph

    def replay(self, stream: str, graph: Graph) -> None:
        """A replay on a stream, which may be capturing."""
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
    """Whatever their channels; on the same stream they are in order already."""
    first = Channel()
    second = Channel()
    for stream, channel in (("a", first), ("a", second), ("b", first), ("b", first), ("a", second)):
        device.call(stream, channel)
    assert device.waits == ["b>a", "a>b"]


def test_calls_of_a_capture_are_a_chain_of_their_own(device: Device) -> None:
    """No wait between a captured and an eager stream, nor between two captures."""
    first = Channel()
    second = Channel()
    device.call("a", first)
    device.capture(("b", first), ("c", second), ("b", first))
    device.capture(("c", first), ("d", first))
    device.call("a", first)
    assert device.waits == ["c>b", "b>c", "d>c"]


def test_a_replay_is_a_call_in_the_order(device: Device) -> None:
    first = Channel()
    second = Channel()
    graph = device.capture(("d", first), ("d", second))
    device.call("a", first)
    device.replay("b", graph)
    device.call("b", first)
    device.call("a", second)
    assert device.waits == ["b>a", "a>b"]


def test_a_replay_checks_the_channels_of_its_graph(device: Device) -> None:
    """Eager calls are checked in collectives.py."""
    first = Channel()
    second = Channel()
    graph = device.capture(("d", first), ("d", second))
    device.call("a", first)
    device.replay("b", graph)
    assert (first.checked, second.checked) == (1, 1)


def test_a_graph_without_collectives_waits_for_nobody(device: Device) -> None:
    channel = Channel()
    graph = device.capture()
    device.call("a", channel)
    device.replay("c", graph)
    device.call("b", channel)
    assert device.waits == ["b>a"]


def test_a_graph_inside_a_capture_joins_its_chain(device: Device) -> None:
    channel = Channel()
    inner = device.capture(("d", channel))
    outer = Graph()
    device.call("a", channel)
    device.capturing = True
    device.order.capture_begun(outer)
    device.call("b", channel)
    device.replay("c", inner)
    device.capturing = False
    device.replay("d", outer)
    assert device.waits == ["c>b", "d>a"]
