"""The exchange of tokens: sites, what replaces the functions by which megatron-core's dispatchers
communicate, and the dispatchers, which say when they do.

A dispatcher says which of its ways is under way; the functions then know whose tokens these are. What is not
tokens (probabilities, routing maps, counts) is sent by megatron-core and counted as ep.other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)

from megatron.compression.communication import Decision, collectives
from megatron.compression.communication.collectives import WithBackward
from megatron.compression.communication.site import CommSite, Run
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.tensor_parallel.layers import has_backward

OTHER = "ep.other"


class TokenSite(CommSite):
    """Tokens between the ranks of one group; ``CommSite``'s own collectives serve equal parts. ``dimension``:
    ep between experts' ranks, tp between those that share each expert."""

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        run: Run,
        layer: int | str | None,
        dimension: str = "ep",
    ) -> None:
        super().__init__(
            name, group, run, layer, fused=False
        )  # equal parts alone have fused kernels
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
        transport = self._row_transport(decision, x, traffic, "all_to_all", x.nbytes, x.nbytes)
        return collectives.all_to_all_rows(x, decision.codec, transport, to, came).wait()

    def unequal(
        self, operation: str, x: torch.Tensor, traffic: str, sizes: Sequence[int], why: str | None
    ) -> torch.Tensor:
        """all_gather: ``[sizes[r], values]`` of every rank r. reduce_scatter: the sum of ``[sum(sizes),
        values]`` over the ranks, of which ``sizes[rank]`` rows stay. ``why``: leave it exact, for this
        reason."""
        nbytes = sum(sizes) * x.shape[1:].numel() * x.element_size()
        decision = self.decide(traffic, nbytes) if why is None else Decision(None, why)
        gathers = operation == "all_gather"
        sent = x.nbytes * (self.group.size() if gathers else 1)
        transport = self._row_transport(decision, x, traffic, operation, nbytes, sent)
        collective = collectives.all_gather_rows if gathers else collectives.reduce_scatter_rows
        return collective(x, decision.codec, transport, sizes).wait()

    def _row_transport(
        self,
        decision: Decision,
        x: torch.Tensor,
        traffic: str,
        operation: str,
        plain: int,
        sent: int,
    ) -> TorchTransport:
        """What sends rows, which are counted (``plain`` bytes of the uncompressed operation, ``sent`` of the
        all-to-all without a codec), and measured when the error meter is due."""
        run, codec = self.run, decision.codec
        if codec is None:
            self.count(traffic, decision.reason, "all_to_all", sent)
            return TorchTransport(self.group)
        run.ledger.record_plain(traffic, operation, plain, self.group.size())
        if run.policy.measures(self.name, traffic):
            run.policy.meter.measure(
                self.name, traffic, x, codec, bounded=False
            )  # a rank may have no rows
        return self.transport(traffic)


Way = Mapping[dist.ProcessGroup, TokenSite]
"""The sites of a layer's way there or back, by the group that communicates."""


class TokenExchange:
    """Exchanges of all dispatchers of this process, whichever run they are of: sites know their own."""

    def __init__(self) -> None:
        self._way: Way | None = None
        self._tokens: torch.Tensor | None = None
        self._exact = False

    @contextmanager
    def under_way(
        self, way: Way, tokens: torch.Tensor | None = None, exact: bool = False
    ) -> Iterator[None]:
        """While a dispatcher's own method runs, compress ``tokens`` (None: everything; ``exact``:
        nothing)."""
        before = self._way, self._tokens, self._exact
        self._way, self._tokens, self._exact = way, tokens, exact
        try:
            yield
        finally:
            self._way, self._tokens, self._exact = before

    def all_to_all(
        self,
        original: Callable,
        group: dist.ProcessGroup,
        x: torch.Tensor,
        came: Sequence[int] | None = None,
        to: Sequence[int] | None = None,
        use_nccl_stream: bool = False,
    ) -> torch.Tensor:
        """For ``all_to_all``: ``x [n, ...]`` in rows."""
        site = self._site(group)
        if site is None:
            return original(group, x, came, to, use_nccl_stream)
        came, to = _numbers(came), _numbers(to)
        if self._compresses(site, x, x.nbytes):
            return WithBackward.apply(
                x,
                lambda x: site.all_to_all_rows(x, site.forward, to, came),
                lambda gradient: site.all_to_all_rows(gradient, site.backward, came, to),
            )
        rows = len(x) if came is None else sum(came)
        received = rows * x.shape[1:].numel() * x.element_size()
        self._count(site, x, ("all_to_all", x.nbytes), ("all_to_all", received))
        return original(group, x, came, to, use_nccl_stream)

    def gather(
        self,
        original: Callable,
        x: torch.Tensor,
        tensor_parallel_output_grad: bool = True,
        group: dist.ProcessGroup | None = None,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """For ``gather_from_sequence_parallel_region``: ``[n, ...]`` of every rank; gradients are summed."""
        return self._exchange(
            ("all_gather", "reduce_scatter"),
            x,
            group,
            output_split_sizes,
            lambda: original(
                x, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer
            ),
        )

    def reduce_scatter(
        self,
        original: Callable,
        x: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """For ``reduce_scatter_to_sequence_parallel_region``: this rank's part; gradients are gathered."""
        return self._exchange(
            ("reduce_scatter", "all_gather"),
            x,
            group,
            input_split_sizes,
            lambda: original(x, group, input_split_sizes, use_global_buffer),
        )

    def _exchange(
        self,
        operations: tuple[str, str],
        x: torch.Tensor,
        group: dist.ProcessGroup | None,
        sizes: Sequence[int] | None,
        plain: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """The first of two operations, and the second in the backward; ``plain`` is megatron-core's call."""
        site, (there, back) = self._site(group), operations
        if site is None:
            return plain()
        if sizes is not None:
            forward, backward, why = _traffic(site, self._sends_tokens(x))
            rows = _numbers(sizes)
            return WithBackward.apply(
                x,
                lambda x: site.unequal(there, x, forward, rows, why),
                lambda gradient: site.unequal(back, gradient, backward, rows, why),
            )
        nbytes = x.nbytes * (group.size() if there == "all_gather" else 1)
        if self._compresses(site, x, nbytes):
            return WithBackward.apply(
                x,
                lambda x: site.message(site.forward, there, nbytes).start(x).wait(),
                lambda gradient: site.message(site.backward, back, nbytes).start(gradient).wait(),
            )
        self._count(site, x, (there, nbytes), (back, nbytes))
        return plain()

    def _site(self, group: dist.ProcessGroup | None) -> TokenSite | None:
        if self._way is None or group is None or group.size() == 1:
            return None
        return self._way.get(group)

    def _sends_tokens(self, x: torch.Tensor) -> bool:
        return not self._exact and (self._tokens is None or x is self._tokens)

    def _compresses(self, site: TokenSite, x: torch.Tensor, nbytes: int) -> bool:
        return self._sends_tokens(x) and site.compresses(nbytes, site.forward, site.backward)

    def _count(
        self, site: TokenSite, x: torch.Tensor, there: tuple[str, int], back: tuple[str, int]
    ) -> None:
        """Count what megatron-core sends itself: now, and in the backward that will come."""
        forward, backward, why = _traffic(site, self._sends_tokens(x))
        site.count(forward, why or site.decide(forward, there[1]).reason, *there)
        if has_backward(x):
            site.count(backward, why or site.decide(backward, back[1]).reason, *back)


TOKEN_EXCHANGE = TokenExchange()
"""The one through which dispatchers send: they call functions of a module, which stand there once."""


def _traffic(site: TokenSite, tokens: bool) -> tuple[str, str, str | None]:
    """Traffic classes of forward and backward, and why they are exact (None: the policy says)."""
    return (site.forward, site.backward, None) if tokens else (OTHER, OTHER, "exact")


def _numbers(sizes: Sequence[int] | None) -> list[int] | None:
    """Splits as plain numbers; megatron-core has them as numpy's or torch's, on the host."""
    return None if sizes is None else [int(size) for size in sizes]


class CompressedAlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """An all-to-all between experts' ranks; between those that share an expert, a gather and a sum."""

    dispatch: Way
    combine: Way

    def dispatch_preprocess(self, hidden_states: torch.Tensor, *args, **kwargs) -> tuple:
        """The gather of shared experts that run together with the dispatcher."""
        for site in (*self.dispatch.values(), *self.combine.values()):
            site.routed_bytes = (
                hidden_states.nbytes * self.config.moe_router_topk * site.group.size()
            )
        with TOKEN_EXCHANGE.under_way(self.dispatch):
            return super().dispatch_preprocess(hidden_states, *args, **kwargs)

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Counts of tokens, exact."""
        with TOKEN_EXCHANGE.under_way(self.dispatch, exact=True):
            return super().preprocess(routing_map)

    def token_dispatch(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[n, h]`` compressed, their probabilities exact."""
        with TOKEN_EXCHANGE.under_way(self.dispatch, tokens):
            return super().token_dispatch(tokens, probs)

    def dispatch_postprocess(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple:
        """As ``token_dispatch``, between the ranks that share an expert."""
        with TOKEN_EXCHANGE.under_way(self.dispatch, tokens):
            return super().dispatch_postprocess(tokens, probs)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum between the ranks that share an expert."""
        with TOKEN_EXCHANGE.under_way(self.combine):
            return super().combine_preprocess(hidden_states)

    def token_combine(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Experts' outputs ``[n, h]`` on their way back."""
        with TOKEN_EXCHANGE.under_way(self.combine):
            return super().token_combine(hidden_states, *args, **kwargs)


class CompressedAllGatherTokenDispatcher(MoEAllGatherTokenDispatcher):
    """A gather of all tokens there, a sum of the experts' outputs back."""

    dispatch: Way
    combine: Way

    def token_dispatch(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[n, h]`` compressed, probabilities and routing map exact."""
        with TOKEN_EXCHANGE.under_way(self.dispatch, tokens):
            return super().token_dispatch(tokens, probs)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum of experts' outputs ``[ranks * n, h]``."""
        with TOKEN_EXCHANGE.under_way(self.combine):
            return super().token_combine(hidden_states)
