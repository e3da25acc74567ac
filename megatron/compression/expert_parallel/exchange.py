"""The exchange of tokens between experts: what replaces megatron-core's sending, and when.

megatron-core's dispatchers call three functions of their module to send: ``all_to_all``,
``gather_from_sequence_parallel_region`` and ``reduce_scatter_to_sequence_parallel_region``. A patch
leads them to ``TokenExchange`` (patches/communication.py), which is given tensors and a group, but
no layer. So the dispatchers here say before each of their steps which sites are active, and which
tensor holds tokens:

    step of a dispatcher         what it sends                          how
    dispatch_preprocess          input of shared experts                as its site decides
      preprocess                 counts of tokens by expert             exact, ep.other
    token_dispatch               tokens                                 as the site decides
                                 their probabilities                    exact, ep.other
    dispatch_postprocess         the same, between the ranks that share an expert
    combine_preprocess           sums of experts' outputs, between the ranks that share an expert
    token_combine                experts' outputs                       as the site decides

Ranks of a group send each other unequal numbers of tokens, and hold sequences of different lengths.
All must decide alike whether a message is compressed, or one sends payloads where another expects
values. So a message is decided by the tokens that all ranks together route in a forward
(``RoutedTokens``), never by a rank's own part. Both directions are decided in the forward, for the
message in hand.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

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
"""Traffic class of what is no tokens: probabilities, routing maps, counts."""
_EXACT = Decision(None, "exact")
SHARED_EXPERTS = ".shared_experts"
"""How the names of shared experts' sites end."""


class RoutedTokens:
    """The tokens that all ranks of a dispatcher route in one forward, the same number on every
    rank.

    Args:
        rows: how many, over all ranks and experts; or the counts that megatron-core has gathered,
            of any shape and on any device.
        row_bytes: bytes of one token.
        ranks: number of ranks whose tokens are counted.
    """

    def __init__(self, rows: int | torch.Tensor, row_bytes: int, ranks: int) -> None:
        self._rows = rows
        self._row_bytes = row_bytes
        self._ranks = ranks

    def nbytes(self, group_size: int) -> int:
        """Return the bytes of the tokens of as many ranks, on average.

        The host waits for the count once.
        """
        if isinstance(self._rows, torch.Tensor):
            # The dispatcher has waited for the same counts just before, so this is a short wait.
            self._rows = int(self._rows.sum())
        return self._rows * self._row_bytes * group_size // self._ranks


class TokenSite(CommSite):
    """Tokens between the ranks of one group; ``CommSite``'s own messages serve equal parts.

    Args:
        name: the path of the expert layer, with dispatch or combine.
        group: the ranks that send each other tokens.
        run: the run that the model belongs to.
        layer: what ``--tp-compression-layers`` calls the layer.
        dimension: ep between experts' ranks, tp between those that share each expert.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        run: Run,
        layer: int | str | None,
        dimension: str = "ep",
    ) -> None:
        # Fused kernels have equal parts alone.
        super().__init__(name, group, run, layer, fused=False)
        self.forward = f"{dimension}.forward"
        self.backward = f"{dimension}.backward"
        self.routed: RoutedTokens | None = None
        """Of the forward that is under way; None: the group's messages are of equal parts."""

    def decide(self, traffic: str, nbytes: int) -> Decision:
        """Return how a message is sent now: by what all ranks route, where their parts are
        unequal."""
        # Without a threshold no size matters, and nobody waits for the count.
        if self.routed is not None and self.run.policy.rule(traffic).min_bytes:
            nbytes = self.routed.nbytes(self.group.size())
        return super().decide(traffic, nbytes)

    def all_to_all_rows(
        self,
        x: torch.Tensor,
        leg: "Leg",
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
    ) -> torch.Tensor:
        """Send rows to each rank and return those that have come.

        Args:
            x: ``[n, values]``, rows for rank 0 first.
            leg: how they are sent.
            send_counts: rows for each rank; None: the same number.
            recv_counts: rows from each rank; None: the same number.

        Returns: ``[sum(recv_counts), values]``, in the order of the senders.
        """
        transport = self._row_transport(leg, x, "all_to_all", x.nbytes, x.nbytes)
        codec = leg.decision.codec
        return collectives.all_to_all_rows(x, codec, transport, send_counts, recv_counts).wait()

    def gather_rows(self, x: torch.Tensor, leg: "Leg", sizes: Sequence[int]) -> torch.Tensor:
        """Return ``[sum(sizes), values]``: the ``[sizes[r], values]`` of every rank r.

        Args:
            x: this rank's ``[sizes[rank], values]``.
            leg: how they are sent.
            sizes: rows of each rank.
        """
        # An all-to-all carries the rows: to each rank all of this rank's.
        sent = x.nbytes * self.group.size()
        transport = self._row_transport(leg, x, "all_gather", _rows_bytes(x, sizes), sent)
        return collectives.all_gather_rows(x, leg.decision.codec, transport, sizes).wait()

    def reduce_scatter_rows(
        self, x: torch.Tensor, leg: "Leg", sizes: Sequence[int]
    ) -> torch.Tensor:
        """Return this rank's ``[sizes[rank], values]`` of the sum over the ranks.

        Args:
            x: ``[sum(sizes), values]``.
            leg: how they are sent.
            sizes: rows that each rank keeps.
        """
        transport = self._row_transport(leg, x, "reduce_scatter", _rows_bytes(x, sizes), x.nbytes)
        return collectives.reduce_scatter_rows(x, leg.decision.codec, transport, sizes).wait()

    def _row_transport(
        self, leg: "Leg", x: torch.Tensor, operation: str, uncompressed_bytes: int, sent: int
    ) -> TorchTransport:
        """Count and measure rows that are about to be sent, and return what carries them.

        Args:
            leg: how they are sent.
            x: ``[n, values]``; a rank may have none.
            operation: what megatron-core would call instead.
            uncompressed_bytes: size of its buffer.
            sent: size of the all-to-all that carries the rows without a codec.
        """
        run = self.run
        codec, reason = leg.decision
        if codec is None:
            self.count(leg.traffic, reason, "all_to_all", sent)
            return TorchTransport(self.group)
        run.ledger.record_plain(leg.traffic, operation, uncompressed_bytes, self.group.size())
        if run.policy.measures(self.name, leg.traffic):
            # Not bounded: a rank without rows would measure nothing, and decide otherwise.
            run.policy.meter.measure(self.name, leg.traffic, x, codec, bounded=False)
        return self.transport(leg.traffic)


class Leg(NamedTuple):
    """One direction of an exchange: tokens in the forward, or their gradients in the backward."""

    traffic: str
    """Its traffic class."""
    decision: Decision
    """How it is sent."""


Sites = Mapping[dist.ProcessGroup, TokenSite]
"""The sites of a layer's dispatch or combine, by the group that communicates."""


class TokenExchange:
    """Exchanges of all dispatchers of this process, whichever run they are of: sites know their
    own."""

    def __init__(self) -> None:
        self._sites: Sites | None = None
        self._tokens: torch.Tensor | None = None
        self._exact = False
        self.gathered: torch.Tensor | None = None
        """What the last exact gather gave: the counts of tokens, where a dispatcher has gathered
        them."""

    @contextmanager
    def under_way(
        self, sites: Sites, tokens: torch.Tensor | None = None, exact: bool = False
    ) -> Iterator[None]:
        """Send by these sites while a dispatcher's own method runs.

        Args:
            sites: of the dispatcher's step.
            tokens: the tensor that is compressed; None: whatever is sent.
            exact: nothing is compressed.
        """
        # Steps nest: dispatch_preprocess calls preprocess.
        before = self._sites, self._tokens, self._exact
        self._sites, self._tokens, self._exact = sites, tokens, exact
        try:
            yield
        finally:
            self._sites, self._tokens, self._exact = before

    def all_to_all(
        self,
        original: Callable,
        group: dist.ProcessGroup,
        x: torch.Tensor,
        recv_counts: Sequence[int] | None = None,
        send_counts: Sequence[int] | None = None,
        use_nccl_stream: bool = False,
    ) -> torch.Tensor:
        """Send rows to each rank, in place of megatron-core's ``all_to_all``.

        Args:
            original: megatron-core's function.
            group: the ranks.
            x: ``[n, ...]``.
            recv_counts: rows from each rank; None: the same number.
            send_counts: rows for each rank; None: the same number.
            use_nccl_stream: for ``original``.

        Returns: the rows that have come, in the order of the senders.
        """
        site = self._site(group)
        if site is None:
            return original(group, x, recv_counts, send_counts, use_nccl_stream)
        # Known on both ends: megatron-core has gathered the counts of tokens by expert.
        recv_counts, send_counts = _plain_numbers(recv_counts), _plain_numbers(send_counts)
        forward, backward = self._legs(site, x, x.nbytes)
        if _compressed(forward, backward):
            return WithBackward.apply(
                x,
                lambda x: site.all_to_all_rows(x, forward, send_counts, recv_counts),
                lambda gradient: site.all_to_all_rows(gradient, backward, recv_counts, send_counts),
            )
        # The backward sends the gradients of what has come.
        received = x.nbytes if recv_counts is None else _rows_bytes(x, recv_counts)
        _count(site, forward, "all_to_all", x.nbytes)
        if has_backward(x):
            _count(site, backward, "all_to_all", received)
        return original(group, x, recv_counts, send_counts, use_nccl_stream)

    def gather(
        self,
        original: Callable,
        x: torch.Tensor,
        tensor_parallel_output_grad: bool = True,
        group: dist.ProcessGroup | None = None,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """Gather every rank's rows, in place of ``gather_from_sequence_parallel_region``.

        Args:
            original: megatron-core's function.
            x: this rank's ``[n, ...]``.
            tensor_parallel_output_grad: for ``original``.
            group: the ranks.
            output_split_sizes: rows of each rank; None: the same number.
            use_global_buffer: for ``original``.

        Returns: the rows of all ranks; their gradients are summed.
        """
        site = self._site(group)

        def uncompressed() -> torch.Tensor:
            return original(
                x, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer
            )

        if site is None:
            return uncompressed()
        if output_split_sizes is None:
            nbytes = x.nbytes * site.group.size()
            result = self._equal(site, "all_gather", "reduce_scatter", x, nbytes, uncompressed)
            if self._exact:
                self.gathered = result
            return result
        # Always by our exchange: an all-gather of unequal parts is one broadcast a rank on NCCL,
        # and gloo refuses it.
        sizes = _plain_numbers(output_split_sizes)
        forward, backward = self._legs(site, x, _rows_bytes(x, sizes))
        return WithBackward.apply(
            x,
            lambda x: site.gather_rows(x, forward, sizes),
            lambda gradient: site.reduce_scatter_rows(gradient, backward, sizes),
        )

    def reduce_scatter(
        self,
        original: Callable,
        x: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """Sum over the ranks, in place of ``reduce_scatter_to_sequence_parallel_region``.

        Args:
            original: megatron-core's function.
            x: ``[n, ...]``, the rows of rank 0 first.
            group: the ranks.
            input_split_sizes: rows that each rank keeps; None: the same number.
            use_global_buffer: for ``original``.

        Returns: this rank's rows of the sum; their gradients are gathered.
        """
        site = self._site(group)

        def uncompressed() -> torch.Tensor:
            return original(x, group, input_split_sizes, use_global_buffer)

        if site is None:
            return uncompressed()
        if input_split_sizes is None:
            return self._equal(site, "reduce_scatter", "all_gather", x, x.nbytes, uncompressed)
        sizes = _plain_numbers(input_split_sizes)
        forward, backward = self._legs(site, x, _rows_bytes(x, sizes))
        return WithBackward.apply(
            x,
            lambda x: site.reduce_scatter_rows(x, forward, sizes),
            lambda gradient: site.gather_rows(gradient, backward, sizes),
        )

    def _equal(
        self,
        site: TokenSite,
        operation: str,
        operation_back: str,
        x: torch.Tensor,
        nbytes: int,
        uncompressed: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Gather or reduce-scatter equal parts.

        Args:
            site: sends and counts.
            operation: of the forward.
            operation_back: of the backward.
            x: the forward's tensor.
            nbytes: size of both messages over all ranks.
            uncompressed: megatron-core's own call, forward and backward.
        """
        forward, backward = self._legs(site, x, nbytes)
        if not _compressed(forward, backward):
            _count(site, forward, operation, nbytes)
            if has_backward(x):
                _count(site, backward, operation_back, nbytes)
            return uncompressed()

        def send(x: torch.Tensor) -> torch.Tensor:
            message = site.message(forward.traffic, operation, nbytes, forward.decision)
            return message.start(x).wait()

        def send_back(gradient: torch.Tensor) -> torch.Tensor:
            message = site.message(backward.traffic, operation_back, nbytes, backward.decision)
            return message.start(gradient).wait()

        return WithBackward.apply(x, send, send_back)

    def _site(self, group: dist.ProcessGroup | None) -> TokenSite | None:
        if self._sites is None or group is None or group.size() == 1:
            return None
        return self._sites.get(group)

    def _legs(self, site: TokenSite, x: torch.Tensor, nbytes: int) -> tuple[Leg, Leg]:
        """Decide how ``x`` is sent, and its gradient in the backward."""
        # Probabilities and routing maps go through the same functions in the same step.
        holds_tokens = not self._exact and (self._tokens is None or x is self._tokens)
        if not holds_tokens:
            return Leg(OTHER, _EXACT), Leg(OTHER, _EXACT)
        forward = Leg(site.forward, site.decide(site.forward, nbytes))
        backward = Leg(site.backward, site.decide(site.backward, nbytes))
        return forward, backward


TOKEN_EXCHANGE = TokenExchange()
"""The one through which dispatchers send: they call functions of a module, which stand there
once."""


def _compressed(forward: Leg, backward: Leg) -> bool:
    """Return whether a codec encodes either direction; else megatron-core sends both itself."""
    return forward.decision.codec is not None or backward.decision.codec is not None


def _count(site: TokenSite, leg: Leg, operation: str, nbytes: int) -> None:
    """Count what megatron-core sends itself."""
    site.count(leg.traffic, leg.decision.reason, operation, nbytes)


def _rows_bytes(x: torch.Tensor, sizes: Sequence[int]) -> int:
    """Return the bytes of as many rows as ``sizes`` add up to, each like those of ``x``."""
    return sum(sizes) * x.shape[1:].numel() * x.element_size()


def _plain_numbers(sizes: Sequence[int] | None) -> list[int] | None:
    """Return splits as plain numbers; megatron-core has them as numpy's or torch's, on the host."""
    return None if sizes is None else [int(size) for size in sizes]


class CompressedAlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """An all-to-all between experts' ranks; between those that share an expert, a gather and a
    sum."""

    dispatch: Sites
    combine: Sites

    def dispatch_preprocess(self, hidden_states: torch.Tensor, *args, **kwargs) -> tuple:
        """Count tokens by expert, and gather the input of shared experts that run with the
        dispatcher."""
        ranks = self.tp_ep_group.size()
        # As if all ranks had as many tokens; preprocess corrects it where counts are gathered.
        rows = hidden_states.shape[:-1].numel() * self.config.moe_router_topk * ranks
        self._note_routed(rows, hidden_states.shape[-1] * hidden_states.element_size())
        with TOKEN_EXCHANGE.under_way(self.dispatch):
            return super().dispatch_preprocess(hidden_states, *args, **kwargs)

    def _note_routed(self, rows: int | torch.Tensor, row_bytes: int) -> None:
        """Tell the sites how many tokens all ranks route; not those of shared experts, which get
        equal parts."""
        self._row_bytes = row_bytes
        # One object for all sites, so that the host reads the count once a forward.
        routed = RoutedTokens(rows, row_bytes, self.tp_ep_group.size())
        for site in (*self.dispatch.values(), *self.combine.values()):
            if not site.name.endswith(SHARED_EXPERTS):
                site.routed = routed

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Count tokens by expert, on all ranks, exactly."""
        TOKEN_EXCHANGE.gathered = None
        with TOKEN_EXCHANGE.under_way(self.dispatch, exact=True):
            tokens_per_expert = super().preprocess(routing_map)
        # This rank's tokens say nothing of the others', whose sequences may be longer:
        # megatron-core gathers the counts of all, unless experts are padded to a capacity, which
        # needs equal lengths.
        counts, TOKEN_EXCHANGE.gathered = TOKEN_EXCHANGE.gathered, None
        if counts is not None:
            self._note_routed(counts, self._row_bytes)
        return tokens_per_expert

    def token_dispatch(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens ``[n, h]``, and their probabilities exactly."""
        with TOKEN_EXCHANGE.under_way(self.dispatch, tokens):
            return super().token_dispatch(tokens, probs)

    def dispatch_postprocess(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple:
        """Gather tokens and probabilities between the ranks that share an expert."""
        with TOKEN_EXCHANGE.under_way(self.dispatch, tokens):
            return super().dispatch_postprocess(tokens, probs)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum outputs between the ranks that share an expert."""
        with TOKEN_EXCHANGE.under_way(self.combine):
            return super().combine_preprocess(hidden_states)

    def token_combine(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Send experts' outputs ``[n, h]`` back."""
        with TOKEN_EXCHANGE.under_way(self.combine):
            return super().token_combine(hidden_states, *args, **kwargs)


class CompressedAllGatherTokenDispatcher(MoEAllGatherTokenDispatcher):
    """A gather of all tokens there, a sum of the experts' outputs back."""

    dispatch: Sites
    combine: Sites

    def token_dispatch(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather tokens ``[n, h]``, and probabilities and the routing map exactly."""
        with TOKEN_EXCHANGE.under_way(self.dispatch, tokens):
            return super().token_dispatch(tokens, probs)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum experts' outputs ``[ranks * n, h]``."""
        with TOKEN_EXCHANGE.under_way(self.combine):
            return super().token_combine(hidden_states)
