"""Where an expert layer sends tokens: the collectives of one of its two ways, there (dispatch) or back."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.communication import rows
from megatron.compression.communication.policy import Decision
from megatron.compression.communication.run import Run
from megatron.compression.communication.site import CommSite
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work


class TokenSite(CommSite):
    """Tokens between the ranks of one group; ``CommSite``'s own collectives serve equal parts.

    The error bound does not reach it: a rank may have no token to measure.

    Args:
        dimension: whose codec and traffic classes these are: ep between experts' ranks, tp between the ranks
            that share each expert (``--expert-tensor-parallel-size``).
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, run: Run, layer: int | str | None, dimension: str = "ep"
    ) -> None:
        super().__init__(name, group, run, layer)
        self.routed_bytes: int | None = None
        """Of all tokens that the group routes in a forward, the same on every rank; None: messages' own size
        is."""
        self.forward, self.backward = f"{dimension}.forward", f"{dimension}.backward"

    def decide(self, traffic: str, nbytes: int | None = None) -> Decision:
        """By ``routed_bytes`` where ranks send each other unequal parts: all must decide alike."""
        if nbytes is not None and self.routed_bytes is not None:
            nbytes = self.routed_bytes
        return super().decide(traffic, nbytes)

    def all_to_all_rows(
        self, x: torch.Tensor, traffic: str, to: Sequence[int] | None, came: Sequence[int] | None
    ) -> torch.Tensor:
        """Send ``[n, values]`` by splits in rows; see ``rows.all_to_all_rows``."""
        codec, why = self.decide(traffic)
        transport = self._row_transport(codec, why, traffic, "all_to_all", x.nbytes, x.nbytes)
        self._compare(x, traffic, codec)
        return rows.all_to_all_rows(x, codec, transport, to, came).wait()

    def all_gather_rows(
        self, x: torch.Tensor, traffic: str, sizes: Sequence[int], why: str | None = None
    ) -> torch.Tensor:
        """Gather ``[sizes[r], values]`` of every rank r.

        Args:
            why: leave it exact, for this reason (one of the ledger's kinds).
        """
        row = x.shape[1:].numel() * x.element_size()
        return self._unequal(rows.all_gather_rows, x, traffic, sizes, "all_gather", sum(sizes) * row, why)

    def reduce_scatter_rows(
        self, x: torch.Tensor, traffic: str, sizes: Sequence[int], why: str | None = None
    ) -> torch.Tensor:
        """Sum ``[sum(sizes), values]`` over the ranks and keep ``sizes[rank]`` rows. ``why`` as above."""
        return self._unequal(rows.reduce_scatter_rows, x, traffic, sizes, "reduce_scatter", x.nbytes, why)

    def _unequal(
        self,
        collective: Callable[..., Work],
        x: torch.Tensor,
        traffic: str,
        sizes: Sequence[int],
        operation: str,
        nbytes: int,
        why: str | None,
    ) -> torch.Tensor:
        codec = None
        if why is None:
            codec, why = self.decide(traffic, nbytes)
        sent = x.nbytes * (self.group.size() if operation == "all_gather" else 1)
        transport = self._row_transport(codec, why, traffic, operation, nbytes, sent)
        self._compare(x, traffic, codec)
        return collective(x, codec, transport, sizes).wait()

    def _row_transport(
        self, codec: Codec | None, why: str, traffic: str, operation: str, plain_bytes: int, sent_bytes: int
    ) -> TorchTransport:
        if codec is not None:
            self._count_plain(traffic, operation, plain_bytes)
            return self._transport(traffic)
        self._count(traffic, why, "all_to_all", sent_bytes)
        return TorchTransport(self.group)

    def _compare(self, x: torch.Tensor, traffic: str, codec: Codec | None) -> None:
        """Let the error probe see what encoding does to the rows, when it is due: each travels once."""
        probe, evaluating = self.run.probe, self.run.ledger.evaluating
        if codec is None or evaluating or not len(x):
            return
        if probe.due(self.name, traffic, self.run.policy.iteration()):
            probe.observe(self.name, traffic, x, codec.decode(codec.encode(x), x.shape[1:], x.dtype))

    def _transport(self, traffic: str, fused: bool = False) -> TorchTransport:
        """Of torch.distributed: fused kernels know equal parts alone, and one stream of collectives."""
        return super()._transport(traffic, fused)

    def _measure(self, traffic: str, tensor: torch.Tensor, codec: Codec) -> None:
        """Not bounded."""
