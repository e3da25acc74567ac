"""megatron-core's token dispatchers, which say when they communicate."""

import torch
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)

from megatron.compression.expert_parallel.exchange import TOKEN_EXCHANGE, Way


class CompressedAlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """An all-to-all between experts' ranks; between those that share an expert, a gather and a sum."""

    dispatch: Way
    combine: Way

    def dispatch_preprocess(self, hidden_states: torch.Tensor, *args, **kwargs) -> tuple:
        """The gather of shared experts that run together with the dispatcher."""
        for site in (*self.dispatch.values(), *self.combine.values()):
            site.routed_bytes = hidden_states.nbytes * self.config.moe_router_topk * site.group.size()
        with TOKEN_EXCHANGE.under_way(self.dispatch):
            return super().dispatch_preprocess(hidden_states, *args, **kwargs)

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Counts of tokens, exact."""
        with TOKEN_EXCHANGE.under_way(self.dispatch, exact=True):
            return super().preprocess(routing_map)

    def token_dispatch(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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

    def token_dispatch(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[n, h]`` compressed, probabilities and routing map exact."""
        with TOKEN_EXCHANGE.under_way(self.dispatch, tokens):
            return super().token_dispatch(tokens, probs)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum of experts' outputs ``[ranks * n, h]``."""
        with TOKEN_EXCHANGE.under_way(self.combine):
            return super().token_combine(hidden_states)
