"""Times the flex dispatcher against alltoall, for ``--compression auto`` with experts.

Flex sends tokens inside its own kernels, so its messages cannot be timed by themselves. What is
timed is a layer's dispatcher as a whole: tokens to their experts and back, and their gradients. The
experts themselves compute nothing meanwhile, and nothing overlaps.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron.compression.auto.messages import Workload, activations
from megatron.compression.auto.sender import normal_values
from megatron.compression.auto.stopwatch import Stopwatch
from megatron.compression.config import CompressionConfig
from megatron.compression.expert_parallel import flex
from megatron.compression.expert_parallel.hooks import alltoall_in_place_of, flex_layers
from megatron.compression.names import argument


@dataclass(frozen=True)
class Comparison:
    """What one layer's tokens and their gradients take, to experts and back, in seconds."""

    backend: str
    """What sends flex's: deepep, hybridep or ncclep."""
    by_flex: float
    by_alltoall: float
    """Uncompressed."""

    def cost_of_alltoall(self, work: Workload) -> float:
        """Return the seconds by which an iteration is longer with alltoall; negative: shorter.

        Args:
            work: what an iteration sends by alltoall.
        """
        # Two legs of gradients belong to one round trip.
        legs = sum(message.count for message in work.messages if message.traffic == "ep.backward")
        return (self.by_alltoall - self.by_flex) * legs / 2

    def describe(self) -> str:
        """Return the line for the log, with references to settings."""
        dispatcher = argument("moe_token_dispatcher_type")
        return (
            f"{dispatcher} {flex.FLEX} ({self.backend}) was compared with {flex.ALLTOALL}: a "
            f"layer's tokens and their gradients take {1e3 * self.by_flex:.4g} ms by "
            f"{self.backend} and {1e3 * self.by_alltoall:.4g} ms by {flex.ALLTOALL}, uncompressed"
        )


def may_leave_flex(args: Namespace, config: CompressionConfig) -> bool:
    """Return whether auto decides about experts whose tokens flex sends, and could switch it."""
    undecided = "expert_parallel" in config.auto
    return undecided and flex.sends_by_flex(args) and not flex.has_settings_of_its_own(args)


def compare_dispatchers(
    args: Namespace, chunks: list[torch.nn.Module], watch: Stopwatch
) -> Comparison:
    """Time a layer's dispatcher, and one of alltoall in its place. Collective over all ranks.

    Args:
        args: Megatron's arguments.
        chunks: the model chunks of this pipeline stage, built with flex.
        watch: times them.
    """
    layers = flex_layers(chunks)
    seconds = []
    for name in (flex.FLEX, flex.ALLTOALL):
        call = _nothing
        if layers:  # a stage may have none
            dispatcher = layers[0].token_dispatcher
            if name == flex.ALLTOALL:
                dispatcher = alltoall_in_place_of(layers[0])
            call = _round_trip(layers[0], dispatcher, args, watch.device)
        seconds.append(watch.seconds(call))
    return Comparison(flex.backend_of(args), *seconds)


def _nothing() -> None:
    """Stands for a round trip on a rank whose stage has no experts."""


def _round_trip(
    layer: MoELayer, dispatcher: MoETokenDispatcher, args: Namespace, device: torch.device
) -> Callable[[], None]:
    """Return what sends a micro-batch's tokens to their experts and back, then their gradients.

    Args:
        layer: the layer.
        dispatcher: what sends them.
        args: Megatron's arguments.
        device: where tokens are.
    """
    tokens, samples, width = activations(args)
    tokens *= samples
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    width = args.moe_latent_size or width
    hidden = normal_values((tokens, width), args.params_dtype, device).requires_grad_()
    gradients = torch.ones_like(hidden)
    # Every expert has as many tokens, as with a router that is balanced.
    chosen = torch.arange(tokens * args.moe_router_topk, device=device) % args.num_experts
    routing = torch.zeros((tokens, args.num_experts), dtype=torch.bool, device=device)
    routing.scatter_(1, chosen.view(tokens, -1), True)
    probabilities = (routing.float() / args.moe_router_topk).requires_grad_()

    def call() -> None:
        # Shared experts that run while tokens travel would be computed, and get gradients.
        shared_experts = dispatcher.shared_experts
        dispatcher.shared_experts = None
        try:
            sent, probs = dispatcher.dispatch_preprocess(hidden, routing, probabilities)
            received, probs = dispatcher.token_dispatch(sent, probs)
            inputs, _, probs = dispatcher.dispatch_postprocess(received, probs)
            # An expert's output is weighted by its probability, so both have gradients.
            outputs = inputs * probs.unsqueeze(-1).to(inputs.dtype)
            returned = dispatcher.token_combine(dispatcher.combine_preprocess(outputs))
            dispatcher.combine_postprocess(returned).view_as(hidden).backward(gradients)
        finally:
            dispatcher.shared_experts = shared_experts

    return call
