"""The layers of a CAAT-Net: a model's tensor-parallel layers, told which of them reduce what."""

import itertools

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.compression.communication.ledger import Ledger
from megatron.compression.config import CaatNetSettings, CompressionConfigError
from megatron.compression.tensor_parallel.caat_net import (
    copy_to_streams,
    linear_putting_off,
    partial_row_parallel_linear,
)
from megatron.compression.tensor_parallel.caat_net_gradients import mark_rank_local, sum_after_finalizing
from megatron.compression.tensor_parallel.layers import (
    CompressedColumnParallelLinear,
    CompressedLanguageModelEmbedding,
    CompressedRowParallelLinear,
)
from megatron.compression.tensor_parallel.overlap import Handover


class PartialRowParallelLinear(CompressedRowParallelLinear):
    """Attention projection or fc2 whose first channels alone are all-reduced, forward and backward."""

    shared_channels: int
    next_weight: Handover | None = None
    """Shared with the column-parallel layer after this one: its weight gradient runs behind our exchange."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """``[s, b, h_in / W] -> [s, b, h_out]``, bias included: it is scaled with the private channels."""
        output = partial_row_parallel_linear(
            input_, self.weight, self.bias, self.site, self.shared_channels, self.next_weight
        )
        return output, None


class StreamColumnParallelLinear(CompressedColumnParallelLinear):
    """qkv, fc1 or the output layer of one rank's stream: nothing is communicated, forward or backward."""

    next_weight: Handover | None = None
    """Shared with the row-parallel layer before this one: brings our weight."""

    def _forward_impl(self, input, weight, *args, **kwargs):
        made = self.next_weight.take() if self.next_weight is not None else None
        if made is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        weight, gradient = made
        if not torch.is_grad_enabled():  # a region to be recomputed, inside a graph
            return super()._forward_impl(input, self.weight, *args, **kwargs)
        return linear_putting_off(input, weight, kwargs["bias"], gradient)


class StreamEmbedding(CompressedLanguageModelEmbedding):
    """Word and position embeddings, from which every rank's stream begins."""

    def forward(self, input_ids, position_ids, tokentype_ids=None) -> torch.Tensor:
        """Token ids ``[b, s]`` to ``[s, b, h]``; its backward has the only all-reduce of all channels."""
        return copy_to_streams(super().forward(input_ids, position_ids, tokentype_ids), self.site)


_CLASSES = {
    CompressedRowParallelLinear: PartialRowParallelLinear,
    CompressedColumnParallelLinear: StreamColumnParallelLinear,
    CompressedLanguageModelEmbedding: StreamEmbedding,
}
_ORDINARY = {partial: ordinary for ordinary, partial in _CLASSES.items()}


def bind_caat_net(chunk: torch.nn.Module, settings: CaatNetSettings, ledger: Ledger) -> None:
    """Make a model chunk a CAAT-Net of this sync fraction, or at 1 an ordinary model again. Idempotent.

    The classes add no state, so parameters and their names stay as they are.

    Args:
        chunk: a GPT model, not wrapped, whose tensor-parallel layers have their sites.
        settings: the sync fraction.
        ledger: counts the sum of the replicated parameters' gradients.

    Raises:
        CompressionConfigError: a tensor-parallel layer that has no site.
    """
    for path, module in chunk.named_modules():
        ordinary = _ORDINARY.get(type(module), type(module))
        communicates = isinstance(module, (*_CLASSES, ColumnParallelLinear, RowParallelLinear))
        if communicates and getattr(module, "site", None) is None:
            raise CompressionConfigError(f"--caat-net-sync-fraction does not cover {path}; drop the flag")
        if ordinary in _CLASSES:
            module.__class__ = _CLASSES[ordinary] if settings.enabled else ordinary
        if isinstance(module, PartialRowParallelLinear):
            module.shared_channels = settings.shared_channels(module.output_size)
        if isinstance(module, ColumnParallelLinear):
            module.disable_grad_reduce = settings.enabled
            module.allreduce_dgrad = not settings.enabled and not module.sequence_parallel
    mark_rank_local(chunk, settings.enabled)
    if settings.enabled:
        _check_layers(chunk)
        _share_handovers(chunk)
        sum_after_finalizing(chunk.config, ledger)


def _check_layers(chunk: torch.nn.Module) -> None:
    """Each layer has to have its two partial outputs: another layer would take the streams for equal."""
    for path, layer in chunk.named_modules():
        if isinstance(layer, TransformerLayer):
            partial = sum(isinstance(module, PartialRowParallelLinear) for module in layer.modules())
            if partial != 2:
                raise CompressionConfigError(
                    f"--caat-net-sync-fraction covers layers of one attention and one dense MLP, not {path}; "
                    "drop the flag, or the one that chose such a layer (--spec?)"
                )


def _share_handovers(chunk: torch.nn.Module) -> None:
    """Pair each partial output with the column-parallel layer that follows: projection, fc1; fc2, next qkv.

    The latter pair is of two layers: they are not of one graph where layers are recomputed.
    """
    layers = [layer for layer in chunk.decoder.layers if isinstance(layer, TransformerLayer)]
    pairs = [(layer.self_attention.linear_proj, layer.mlp.linear_fc1) for layer in layers]
    if chunk.config.recompute_granularity is None:
        pairs += [
            (layer.mlp.linear_fc2, following.self_attention.linear_qkv)
            for layer, following in itertools.pairwise(layers)
        ]
    for row, column in pairs:
        row.next_weight = column.next_weight = Handover(column)
