"""Puts the exchange of tokens into a built model: every expert layer's dispatcher gets its sites."""

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.compression import patches
from megatron.compression.communication.run import Run
from megatron.compression.communication.site import layer_name, site_name
from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.config import ExpertParallelConfig
from megatron.compression.expert_parallel.dispatchers import (
    CompressedAllGatherTokenDispatcher,
    CompressedAlltoAllTokenDispatcher,
)
from megatron.compression.expert_parallel.exchange import OTHER, TokenExchange, Way
from megatron.compression.expert_parallel.site import TokenSite

_CLASSES = {
    MoEAlltoAllTokenDispatcher: CompressedAlltoAllTokenDispatcher,
    MoEAllGatherTokenDispatcher: CompressedAllGatherTokenDispatcher,
}


class Experts:
    """The expert layers of one run: counted without compression, compressed with it."""

    def __init__(self, config: ExpertParallelConfig, run: Run) -> None:
        self.config, self.run = config, run
        self._exchange = TokenExchange()

    def attach(self, chunks: list[torch.nn.Module], say: Callable[[str], None] = print) -> None:
        """Give each expert layer's dispatcher its sites. Collective over all ranks where compression is on.

        Raises: CompressionConfigError: compression is on and a layer sends tokens in another way.
        """
        sites = [site for chunk in chunks for site in self._attach_chunk(chunk)]
        if self.config.enabled:
            for line in self.run.transports.prepare(dict.fromkeys(site.group for site in sites), fused=False):
                say(f"compression: experts: {line}")

    def _attach_chunk(self, chunk: torch.nn.Module) -> list[TokenSite]:
        layers = {
            path: module for path, module in chunk.named_modules() if isinstance(module, TransformerLayer)
        }
        attached: list[TokenSite] = []
        for path, module in chunk.named_modules():
            if not isinstance(module, MoELayer):
                continue
            dispatcher = module.token_dispatcher
            compressed = next(
                (ours for one, ours in _CLASSES.items() if type(dispatcher) in (one, ours)), None
            )
            if compressed is None:
                if self.config.enabled and dispatcher.ep_size * dispatcher.tp_size > 1:
                    kind = type(dispatcher).__name__
                    raise CompressionConfigError(
                        f"--ep-compression cannot compress {path}: {kind} sends in a way of its own; use "
                        "--moe-token-dispatcher-type alltoall or allgather, or drop --ep-compression"
                    )
                continue  # not counted: the audit of the first iteration says so
            if not attached:
                patches.through_token_exchange(self._exchange)
                patches.on_router_reduction(self._count_router)
            owner = next((one for one in layers if path.startswith(one + ".")), None)
            number = layers[owner].layer_number if owner is not None else None
            patches.change_class(dispatcher, compressed)
            dispatcher.exchange = self._exchange
            for way in ("dispatch", "combine"):
                name = f"{site_name(path, number)}.{way}"
                sites = self._way(dispatcher, name, layer_name(path, number))
                setattr(dispatcher, way, sites)
                attached += sites.values()
        return attached

    def _way(self, dispatcher, name: str, layer: int | str | None) -> Way:
        """Sites by group; only the all-to-all has tensor parallelism of its own."""
        sites = {dispatcher.tp_ep_group: TokenSite(name, dispatcher.tp_ep_group, self.run, layer)}
        if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            sites[dispatcher.tp_group] = TokenSite(name, dispatcher.tp_group, self.run, layer, "tp")
            sites[dispatcher.ep_group] = TokenSite(name, dispatcher.ep_group, self.run, layer)
            if dispatcher.shared_experts is not None:  # they run beside the dispatcher, which sends for them
                group = dispatcher.shared_experts.tp_group
                sites[group] = TokenSite(f"{name}.shared_experts", group, self.run, layer, "tp")
        return {group: site for group, site in sites.items() if group.size() > 1}

    def _count_router(self, nbytes: int, ranks: int) -> None:
        self.run.ledger.record_uncompressed(OTHER, "exact", "all_reduce", nbytes, ranks)
