"""The collectives over symmetric memory: one kernel each, for the ranks of one host.

Results have the bits of the same collective over torch.distributed, so ranks and runs may differ in the
transport.
"""

import torch

from megatron.compression.codecs import Codec
from megatron.compression.communication.transport import OnSend, TorchTransport
from megatron.compression.communication.work import Work


class SymmetricTransport(TorchTransport):
    """Symmetric memory for the payloads of codecs that have a ``fused_config``; torch.distributed for others.

    A collective runs on the current stream. It fills the device, so that a side stream would only make it and
    a GEMM wait for each other.

    Args:
        symmetric: ``taco_kernels.symmetric_memory.SymmetricGroup``.
        on_send: as for ``TorchTransport``. Bytes are those stored in the peers' memory, flags (eight bytes a
            tile) left out; operations are named after the exchanges that they replace.
    """

    overlaps = False

    def __init__(self, symmetric, on_send: OnSend | None = None) -> None:
        super().__init__(symmetric.group, on_send)
        self.symmetric = symmetric

    def fuses(self, codec: Codec) -> bool:
        """The codec says so, of both hops and with the same groups."""
        first, second = (hop.fused_config for hop in codec.hops)
        if first is None or second is None:
            return False
        return (first.group_size, first.hadamard) == (second.group_size, second.hadamard)

    def fused_all_reduce(self, x: torch.Tensor, codec: Codec, out: torch.Tensor | None = None) -> Work:
        """The whole of ``all_reduce``."""
        first, second = (hop.fused_config for hop in codec.hops)
        second = None if second == first else second
        out = self.symmetric.all_reduce(x, first, out=out, config_out=second)
        self._report_stored(self.symmetric.all_reduce_stores(x, first, second))
        return Work.completed(out)

    def fused_reduce_scatter(self, x: torch.Tensor, codec: Codec, out: torch.Tensor | None = None) -> Work:
        """The whole of ``reduce_scatter``."""
        out = self.symmetric.reduce_scatter(x, codec.fused_config, out=out)
        self._report_stored(self.symmetric.reduce_scatter_stores(x, codec.fused_config))
        return Work.completed(out)

    def fused_all_gather(
        self,
        payload: torch.Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        codec: Codec,
        out: torch.Tensor | None = None,
    ) -> Work:
        """The whole of ``all_gather_encoded``."""
        if out is None:
            out = torch.empty((self.world_size * shape[0], *shape[1:]), dtype=dtype, device=payload.device)
        self.symmetric.all_gather_encoded(payload, shape, dtype, codec.fused_config, out=out)
        self._report_stored(self.symmetric.all_gather_stores(shape, codec.fused_config))
        return Work.completed(out)

    def _report_stored(self, stores: dict[str, int]) -> None:
        if self.on_send is not None:
            for operation, sent in stores.items():
                self.on_send(operation, sent)
