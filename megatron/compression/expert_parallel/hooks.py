"""Puts the exchange of tokens into a built model: every expert layer's dispatcher gets its
sites."""

from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.compression.communication.site import Run, enclosing_layer, layer_name, site_name
from megatron.compression.dimension import Dimension
from megatron.compression.errors import SettingError
from megatron.compression.expert_parallel import flex
from megatron.compression.expert_parallel.exchange import (
    OTHER,
    SHARED_EXPERTS,
    TOKEN_EXCHANGE,
    CompressedAllGatherTokenDispatcher,
    CompressedAlltoAllTokenDispatcher,
    Sites,
    TokenSite,
)
from megatron.compression.patches import communication, running, symbols

_CLASSES = {
    MoEAlltoAllTokenDispatcher: CompressedAlltoAllTokenDispatcher,
    MoEAllGatherTokenDispatcher: CompressedAllGatherTokenDispatcher,
}


class ExpertParallel(Dimension):
    """Gives each expert layer's dispatcher its sites: counted without compression, compressed with
    it."""

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        if self.config.enabled:
            self._replace_flex_dispatchers(chunks)
        groups = [group for chunk in chunks for group in self._attach_chunk(chunk)]
        if self.config.enabled:
            lines = self.run.transports.prepare(dict.fromkeys(groups), fused=False)
            for line in dict.fromkeys(lines):  # several groups travel alike
                self.log(f"compression: experts: {line}")

    def refusal(self, chunks: list[torch.nn.Module]) -> str | None:
        """Return why a dispatcher's tokens could not be compressed, or None."""
        # Without compression such a dispatcher is not counted: the audit of the first iteration
        # says so.
        for chunk in chunks:
            for path, module in chunk.named_modules():
                if not isinstance(module, MoELayer):
                    continue
                dispatcher: MoETokenDispatcher = module.token_dispatcher
                several = dispatcher.ep_size * dispatcher.tp_size > 1
                if isinstance(dispatcher, MoEFlexTokenDispatcher):
                    # Another one takes its place where experts' ranks send each other tokens.
                    continue
                if several and _compressed_class(type(dispatcher)) is None:
                    return (
                        f"{path}: {type(dispatcher).__name__} sends in a way of its own; "
                        "use --moe-token-dispatcher-type alltoall or allgather, "
                        "or drop --ep-compression"
                    )
        return None

    def _replace_flex_dispatchers(self, chunks: list[torch.nn.Module]) -> None:
        """Give layers that were built with flex dispatchers of alltoall, and log it.

        Front ends that see the settings first have switched them, and nothing is left to do here.

        Raises:
            SettingError: settings of a layer that flex alone has.
        """
        layers = flex_layers(chunks)
        if not layers:
            return
        for layer in layers:
            flex.refuse_settings_of_flex(layer.config, self.config.path("compression"))
        backend = flex.backend_of(layers[0].config)
        # Schedules and experts read the dispatcher's type from the config of their own module.
        for chunk in chunks:
            for module in chunk.modules():
                config = getattr(module, "config", None)
                if getattr(config, "moe_token_dispatcher_type", None) == flex.FLEX:
                    flex.switch_to_alltoall(config)
        for layer in layers:
            layer.token_dispatcher = alltoall_in_place_of(layer)
        self.log(
            f"compression: experts: the flex dispatcher ({backend}) is switched to alltoall, since "
            "it sends tokens inside its kernels. Leave experts uncompressed to keep flex"
        )

    def _attach_chunk(self, chunk: torch.nn.Module) -> Iterator[dist.ProcessGroup]:
        """Attach the expert layers of a chunk, and yield the groups over which they send tokens."""
        layer_numbers = {}
        experts = {}
        for path, module in chunk.named_modules():
            if isinstance(module, TransformerLayer):
                layer_numbers[path] = module.layer_number
            if isinstance(module, MoELayer):
                experts[path] = module
        if experts:
            running.claim([chunk], self.run)
            communication.skip_in_layer_graphs()
            communication.through_token_exchange(TOKEN_EXCHANGE)
            communication.on_router_reduction(_count_router_sum)
        for path, module in experts.items():
            # The router sums tokens by expert itself, in each forward.
            _follow_router(module.router, self.run)
            dispatcher = module.token_dispatcher
            compressed = _compressed_class(type(dispatcher))
            if compressed is None:
                if self.config.enabled and (reason := self.refusal([chunk])):
                    raise SettingError(
                        self.config.path("compression"), None, f"cannot compress {reason}"
                    )
                continue
            number = enclosing_layer(path, layer_numbers)
            name = site_name(path, number)
            layer = layer_name(path, number)
            symbols.change_class(dispatcher, compressed)
            dispatcher.dispatch = self._sites(dispatcher, f"{name}.dispatch", layer)
            dispatcher.combine = self._sites(dispatcher, f"{name}.combine", layer)
            # Over all its ranks the all-to-all dispatcher sends counts of tokens alone.
            counts_group = None
            if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
                counts_group = dispatcher.tp_ep_group
            yield from (group for group in dispatcher.dispatch if group is not counts_group)

    def _sites(self, dispatcher: MoETokenDispatcher, name: str, layer: int | str | None) -> Sites:
        """Return the sites of a dispatcher's step, by group.

        Args:
            dispatcher: only the all-to-all one has tensor parallelism of its own.
            name: of the layer and the step.
            layer: what ``--tp-compression-layers`` calls the layer.
        """
        sites = {dispatcher.tp_ep_group: TokenSite(name, dispatcher.tp_ep_group, self.run, layer)}
        if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            sites[dispatcher.tp_group] = TokenSite(name, dispatcher.tp_group, self.run, layer, "tp")
            sites[dispatcher.ep_group] = TokenSite(name, dispatcher.ep_group, self.run, layer)
            # Shared experts that run together with the dispatcher, which sends for them.
            if dispatcher.shared_experts is not None:
                group = dispatcher.shared_experts.tp_group
                sites[group] = TokenSite(name + SHARED_EXPERTS, group, self.run, layer, "tp")
        # Ranks that are alone in a group send nothing.
        return {group: site for group, site in sites.items() if group.size() > 1}


def flex_layers(chunks: list[torch.nn.Module]) -> list[MoELayer]:
    """Return the layers whose tokens the flex dispatcher sends to other ranks' experts."""
    return [
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, MoELayer)
        and isinstance(module.token_dispatcher, MoEFlexTokenDispatcher)
        and module.token_dispatcher.ep_size > 1
    ]


def alltoall_in_place_of(layer: MoELayer) -> MoEAlltoAllTokenDispatcher:
    """Return a dispatcher of alltoall over the groups of a layer's own one."""
    replaced = layer.token_dispatcher
    groups = Namespace(ep=replaced.ep_group, expt_tp=replaced.tp_group, tp_ep=replaced.tp_ep_group)
    dispatcher = MoEAlltoAllTokenDispatcher(
        layer.num_local_experts,
        layer.local_expert_indices,
        config=layer.config,
        pg_collection=groups,
    )
    # Shared experts that run while tokens travel are started by the dispatcher.
    if replaced.shared_experts is not None:
        dispatcher.set_shared_experts(replaced.shared_experts)
    return dispatcher


_routing: list[Run] = []
"""Runs of the routers that run now, the innermost last."""


def _follow_router(router: torch.nn.Module, run: Run) -> None:
    """Note while a router runs whose it is: it sums tokens by a function that gets no module."""

    @communication.eager_only
    def begin(module: torch.nn.Module, args: tuple) -> None:
        _routing.append(run)

    def end(module: torch.nn.Module, args: tuple, output: object) -> None:
        _routing.pop()

    router.register_forward_pre_hook(begin)
    router.register_forward_hook(end, always_call=True)


def _count_router_sum(nbytes: int, ranks: int) -> None:
    if _routing:
        _routing[-1].ledger.record_uncompressed(OTHER, "exact", "all_reduce", nbytes, ranks)


def _compressed_class(cls: type) -> type | None:
    """Return the class that a dispatcher becomes; None: it sends in a way of its own."""
    for original, compressed in _CLASSES.items():
        if cls in (original, compressed):
            return compressed
    return None
