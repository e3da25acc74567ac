"""The collectives over symmetric memory: one kernel each, for the ranks of one host.

Results have the bits of the same collective over torch.distributed, so ranks and runs may differ in the
transport.
"""

from collections.abc import Sequence

import torch

from megatron.compression.codecs import Codec, TacoCodec
from megatron.compression.collectives.transport import OnSend, TorchTransport
from megatron.compression.collectives.work import CompressedWork, completed
from taco_kernels import Stream


class SymmetricTransport(TorchTransport):
    """Symmetric memory for a group's payloads; what it does not cover goes over torch.distributed.

    A collective runs on the current stream. It fills the device, so that a side stream would only make it and
    a GEMM wait for each other: with one, an iteration took as long (docs/end_to_end.md).

    Args:
        symmetric: ``taco_kernels.symmetric_memory.SymmetricGroup``.
        on_send: as for ``TorchTransport``. Bytes are those stored in the peers' memory, flags (eight bytes a
            tile) left out; operations are named after the exchanges that they replace.
    """

    overlaps = False

    def __init__(self, symmetric, on_send: OnSend | None = None) -> None:
        super().__init__(symmetric.group, on_send)
        self.symmetric = symmetric

    def fuses(self, codec: Codec, async_op: bool = False) -> bool:
        """Whether this transport has kernels for a codec's collectives."""
        return isinstance(codec, TacoCodec)

    def fused_all_reduce(
        self, x: torch.Tensor, codec: TacoCodec, key: int, out: torch.Tensor | None = None
    ) -> CompressedWork:
        """The whole of ``all_reduce``."""
        out = self.symmetric.all_reduce(x, codec.config, Stream(key, 0), out=out, config_out=codec.second)
        self._report_stored(self.symmetric.all_reduce_stores(x, codec.config, codec.second))
        return completed(out)

    def fused_reduce_scatter(
        self, x: torch.Tensor, codec: TacoCodec, key: int, out: torch.Tensor | None = None
    ) -> CompressedWork:
        """The whole of ``reduce_scatter``."""
        out = self.symmetric.reduce_scatter(x, codec.config, Stream(key, 0), out=out)
        self._report_stored(self.symmetric.reduce_scatter_stores(x, codec.config))
        return completed(out)

    def fused_all_gather(
        self, wire: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, codec: TacoCodec, key: int
    ) -> CompressedWork:
        """The whole of ``all_gather_encoded``."""
        out = torch.empty((self.world_size * shape[0], *shape[1:]), dtype=dtype, device=wire.device)
        self.symmetric.all_gather_encoded(wire, shape, dtype, codec.config, Stream(key, 0), out=out)
        self._report_stored(self.symmetric.all_gather_stores(shape, codec.config))
        return completed(out)

    def _report_stored(self, stores: dict[str, int]) -> None:
        if self.on_send is not None:
            for operation, sent in stores.items():
                self.on_send(operation, sent)


class CopyTransport(SymmetricTransport):
    """Symmetric memory whose copies, in collectives that run behind a GEMM, are done by copy engines.

    The codec's kernels are short and stand between the exchanges; multiprocessors are the GEMM's meanwhile.
    Collectives that something waits for at once, and those in CUDA graphs, are one kernel as ever.

    Args:
        symmetric, on_send: as for ``SymmetricTransport``.
        copies: ``taco_kernels.symmetric_memory.CopyExchanges`` of the same group.
    """

    overlaps = True

    def __init__(self, symmetric, copies, on_send: OnSend | None = None) -> None:
        super().__init__(symmetric, on_send)
        self.copies = copies

    def fuses(self, codec: Codec, async_op: bool = False) -> bool:
        """Whether the collective is to be one kernel."""
        return super().fuses(codec) and (not async_op or torch.cuda.is_current_stream_capturing())

    def all_to_all(self, wires: torch.Tensor, async_op: bool = False):
        """See ``TorchTransport``."""
        if not async_op:
            return super().all_to_all(wires)
        self._report("all_to_all", wires.numel())
        return self.copies.all_to_all(wires)

    def all_gather(self, wire: torch.Tensor, async_op: bool = False):
        """See ``TorchTransport``."""
        if not async_op:
            return super().all_gather(wire)
        self._report("all_gather", self.world_size * wire.numel())
        return self.copies.all_gather(wire)
