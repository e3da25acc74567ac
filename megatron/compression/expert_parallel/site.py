"""Where an expert layer sends tokens: the collectives of one of its two ways, there (dispatch) or back."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.communication import Decision, collectives
from megatron.compression.communication.site import CommSite, Run
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work


class TokenSite(CommSite):
    """Tokens between the ranks of one group; ``CommSite``'s own collectives serve equal parts.

    Args:
        dimension: whose codec and traffic classes these are: ep between experts' ranks, tp between the ranks
            that share each expert (``--expert-tensor-parallel-size``).
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, run: Run, layer: int | str | None, dimension: str = "ep"
    ) -> None:
        super().__init__(name, group, run, layer, fused=False)  # equal parts alone have fused kernels
        self.routed_bytes: int | None = None
        """Of all tokens that the group routes in a forward, the same on every rank; None: messages' own size
        is."""
        self.forward, self.backward = f"{dimension}.forward", f"{dimension}.backward"

    def decide(self, traffic: str, nbytes: int) -> Decision:
        """By ``routed_bytes`` where ranks send each other unequal parts: all must decide alike."""
        if self.routed_bytes is not None:
            nbytes = self.routed_bytes
        return super().decide(traffic, nbytes)

    def all_to_all_rows(
        self, x: torch.Tensor, traffic: str, to: Sequence[int] | None, came: Sequence[int] | None
    ) -> torch.Tensor:
        """Send ``[n, values]`` by splits in rows; see ``collectives.all_to_all_rows``."""
        decision = self.decide(traffic, x.nbytes)
        transport = self._row_transport(decision, traffic, "all_to_all", x.nbytes, x.nbytes)
        self._measure(x, traffic, decision.codec)
        return collectives.all_to_all_rows(x, decision.codec, transport, to, came).wait()

    def all_gather_rows(
        self, x: torch.Tensor, traffic: str, sizes: Sequence[int], why: str | None = None
    ) -> torch.Tensor:
        """Gather ``[sizes[r], values]`` of every rank r.

        Args:
            why: leave it exact, for this reason (one of the ledger's kinds).
        """
        row = x.shape[1:].numel() * x.element_size()
        return self._unequal(
            collectives.all_gather_rows, x, traffic, sizes, "all_gather", sum(sizes) * row, why
        )

    def reduce_scatter_rows(
        self, x: torch.Tensor, traffic: str, sizes: Sequence[int], why: str | None = None
    ) -> torch.Tensor:
        """Sum ``[sum(sizes), values]`` over the ranks and keep ``sizes[rank]`` rows. ``why`` as above."""
        return self._unequal(
            collectives.reduce_scatter_rows, x, traffic, sizes, "reduce_scatter", x.nbytes, why
        )

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
        decision = self.decide(traffic, nbytes) if why is None else Decision(None, why)
        sent = x.nbytes * (self.group.size() if operation == "all_gather" else 1)
        transport = self._row_transport(decision, traffic, operation, nbytes, sent)
        self._measure(x, traffic, decision.codec)
        return collective(x, decision.codec, transport, sizes).wait()

    def _row_transport(
        self, decision: Decision, traffic: str, operation: str, plain_bytes: int, sent_bytes: int
    ) -> TorchTransport:
        """What carries rows, which are counted."""
        if decision.codec is None:
            self.count(traffic, decision.why, "all_to_all", sent_bytes)
            return TorchTransport(self.group)
        self.run.ledger.record_plain(traffic, operation, plain_bytes, self.group.size())
        return self.transport(traffic)

    def _measure(self, x: torch.Tensor, traffic: str, codec: Codec | None) -> None:
        """Let the error meter see the rows, when it is due. A rank may have none, so they have no bound."""
        meter = self.run.policy.meter
        if codec is None or not meter.interval or self.run.ledger.evaluating:
            return
        if meter.due(self.name, traffic, self.run.policy.iteration()):
            meter.measure(self.name, traffic, x, codec, bounded=False)
