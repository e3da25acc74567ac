"""The order of a device's collectives: one after the other, whatever their groups, streams and CUDA
graphs.

A kernel here waits for its peers and fills the device, so it keeps out a second one that a peer may
be in. If two ranks started the same two kernels in different orders, both would wait for ever::

    rank 0   kernel A fills the device and waits for rank 1's A    kernel B finds no room
    rank 1   kernel B fills the device and waits for rank 0's B    kernel A finds no room

Eager calls wait for the stream of the call before. The calls of one capture form a chain in the
same way, and the waits become edges of the graph. A replay is one call in the order of the eager
ones, so two graphs that contain collectives never overlap.

NCCL's kernels may overlap with these, on other streams and in parallel branches of a graph, in
another order on each rank. Program p of a kernel waits for program p of its peers alone: the
programs that found room on all ranks end and leave theirs to NCCL, which needs few multiprocessors.
"""

from functools import lru_cache

import torch

from taco_kernels.common.graph_events import GraphObserver, observe
from taco_kernels.symmetric_memory.channel import Channel


class CallOrder(GraphObserver[set[Channel]]):
    """Puts the calls of this process in order, device by device; keeps the channels that each graph
    uses."""

    def __init__(self) -> None:
        super().__init__(set)
        # By device: the stream of its last eager call or replay, ...
        self._last: dict[int, torch.cuda.Stream] = {}
        # ... and of the last call in the capture that began last. One capture runs at a time.
        self._last_captured: dict[int, torch.cuda.Stream] = {}

    def follow(self, channel: Channel) -> None:
        """Let what the current stream is given next run after all earlier collectives of the
        device."""
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            self.captured.add(channel)
            streams = self._last_captured
        else:
            streams = self._last
        device = channel.device.index
        last = streams.get(device)
        # Calls on one stream are in order already. The raw stream is asked for first, as making a
        # Stream object takes longer than all the rest.
        if last is None or last.cuda_stream != torch._C._cuda_getCurrentRawStream(device):
            stream = torch.cuda.current_stream(device)
            streams[device] = stream
            if last is not None:
                stream.wait_stream(last)

    def capture_begun(self, graph: torch.cuda.CUDAGraph) -> None:
        """Begin a chain of its own: a capture must not wait for streams that are not part of it."""
        super().capture_begun(graph)
        self._last_captured = {}

    def replaying(self, content: set[Channel]) -> None:
        """Check the channels of a graph, and put its replay in the order of the calls.

        Raises:
            SymmetricMemoryError: an earlier call on one of the channels gave up waiting.
        """
        for channel in content:
            channel.check()
            self.follow(channel)


@lru_cache
def call_order() -> CallOrder:
    """The order of this process, which is told of all graphs."""
    order = CallOrder()
    observe(order)
    return order
