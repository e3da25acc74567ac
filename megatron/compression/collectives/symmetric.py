"""The collectives over symmetric memory: one kernel each, for the ranks of one host.

Results have the bits of the same collective over torch.distributed, so ranks and runs may differ in the
transport.
"""

import os
from collections.abc import Callable, Sequence

import torch

from megatron.compression.codecs import Codec, TacoCodec
from megatron.compression.collectives.transport import OnSend, TorchTransport
from megatron.compression.collectives.work import CompressedWork
from taco_kernels import Stream

OVERLAP = os.environ.get("TACO_OVERLAP", "side")  # development only: side, inline, collective


class SymmetricTransport(TorchTransport):
    """Symmetric memory for a group's payloads; what it does not cover goes over torch.distributed.

    Args:
        symmetric: ``taco_kernels.symmetric_memory.SymmetricGroup``.
        on_send: as for ``TorchTransport``. Bytes are those stored in the peers' memory, flags (eight bytes a
            tile) left out; operations are named after the exchanges that they replace.
    """

    def __init__(self, symmetric, on_send: OnSend | None = None) -> None:
        super().__init__(symmetric.group, on_send)
        self.symmetric = symmetric

    def fuses(self, codec: Codec, behind: bool = False) -> bool:
        """Whether this transport has kernels for a codec's collectives: not where its hops differ."""
        if not isinstance(codec, TacoCodec) or codec.second is not None:
            return False
        return not (behind and OVERLAP == "collective")

    def fused_all_reduce(
        self, x: torch.Tensor, codec: TacoCodec, key: int, behind: bool = False
    ) -> CompressedWork:
        """Start the whole of ``all_reduce``."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        random = Stream(key, 0)
        work = _start(lambda: self.symmetric.all_reduce(x, codec.config, random, out=out), behind, x)
        self._report_stored(self.symmetric.all_reduce_stores(x, codec.config))
        return CompressedWork(work, lambda: out)

    def fused_reduce_scatter(
        self, x: torch.Tensor, codec: TacoCodec, key: int, behind: bool = False
    ) -> CompressedWork:
        """Start the whole of ``reduce_scatter``."""
        shape = (x.shape[0] // self.world_size, *x.shape[1:])
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        random = Stream(key, 0)
        work = _start(lambda: self.symmetric.reduce_scatter(x, codec.config, random, out=out), behind, x)
        self._report_stored(self.symmetric.reduce_scatter_stores(x, codec.config))
        return CompressedWork(work, lambda: out)

    def fused_all_gather(
        self,
        wire: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        codec: TacoCodec,
        key: int,
        behind: bool = False,
    ) -> CompressedWork:
        """Start the whole of ``all_gather_encoded``."""
        out = torch.empty((self.world_size * shape[0], *shape[1:]), dtype=dtype, device=wire.device)
        random = Stream(key, 0)

        def gather() -> None:
            self.symmetric.all_gather_encoded(wire, shape, dtype, codec.config, random, out=out)

        work = _start(gather, behind, wire)
        self._report_stored(self.symmetric.all_gather_stores(shape, codec.config))
        return CompressedWork(work, lambda: out)

    def _report_stored(self, stores: dict[str, int]) -> None:
        if self.on_send is not None:
            for operation, sent in stores.items():
                self.on_send(operation, sent)


class _StreamWork:
    """A kernel on a side stream."""

    def __init__(self, event: torch.cuda.Event, *used: torch.Tensor) -> None:
        self._event, self._used = event, used

    def wait(self) -> None:
        """Let the current stream wait for it."""
        torch.cuda.current_stream().wait_event(self._event)
        self._used = ()  # until here the kernel may read them


_side_streams: dict[int, torch.cuda.Stream] = {}


def _start(call: Callable[[], object], behind: bool, *used: torch.Tensor) -> _StreamWork | None:
    """Run ``call`` now, or ``behind`` other work: on the device's side stream, after what the current stream
    has been given so far."""
    if not behind or OVERLAP == "inline":
        call()
        return None
    current = torch.cuda.current_stream()
    device = current.device.index
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(priority=-1)  # it gets the device as soon as a GEMM yields
    stream = _side_streams[device]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        call()
        return _StreamWork(stream.record_event(), *used)
