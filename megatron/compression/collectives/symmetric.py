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

    def __init__(self, symmetric, on_send: OnSend | None = None) -> None:
        super().__init__(symmetric.group, on_send)
        self.symmetric = symmetric

    def fuses(self, codec: Codec) -> bool:
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
