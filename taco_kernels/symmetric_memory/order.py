"""The order of a device's collectives: one after the other, whatever their groups, streams and CUDA graphs.

A kernel here waits for its peers and fills the device, so it keeps out a second one that a peer may be in.
If two ranks started the same two kernels in different orders, both would wait for ever.

Eager calls wait for the stream of the call before. The calls of one capture form a chain in the same way. A
replay is one call in the order of the eager ones, so two graphs that contain collectives never overlap.

NCCL's kernels may overlap with these in another order on each rank. Program p of a kernel waits for program p
of its peers alone: those that found room on all ranks end and leave theirs to NCCL.
"""

from functools import lru_cache

import torch

from taco_kernels.common.graph_events import GraphObserver, observe
from taco_kernels.symmetric_memory.channel import Channel


class CallOrder(GraphObserver[set[Channel]]):
    """Puts the calls of this process in order, device by device; keeps the channels that each graph uses."""

    def __init__(self) -> None:
        super().__init__(set)
        self._last: dict[int, torch.cuda.Stream] = {}  # by device, of its last eager call or replay
        self._last_captured: dict[
            int, torch.cuda.Stream
        ] = {}  # the same in the capture that began last

    def follow(self, channel: Channel) -> None:
        """What the current stream is given next runs after all earlier collectives of the device."""
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            self.captured.add(channel)
        streams, device = self._last_captured if capturing else self._last, channel.device.index
        last = streams.get(device)
        if last is None or last.cuda_stream != torch._C._cuda_getCurrentRawStream(device):
            stream = streams[device] = torch.cuda.current_stream(device)
            if last is not None:
                stream.wait_stream(last)

    def capture_begun(self, graph: torch.cuda.CUDAGraph) -> None:
        super().capture_begun(graph)
        self._last_captured = {}

    def replaying(self, content: set[Channel]) -> None:
        """Raises: SymmetricMemoryError: an earlier call gave up waiting."""
        for channel in content:
            channel.check()
            self.follow(channel)


@lru_cache
def call_order() -> CallOrder:
    """The one of this process, told of all graphs."""
    order = CallOrder()
    observe(order)
    return order
