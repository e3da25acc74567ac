"""Makes a CAAT-Net of a built model: tells its tensor-parallel layers which of them reduce what."""

import itertools

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.compression import patches
from megatron.compression.caat_net.config import CaatNetConfig
from megatron.compression.caat_net.gradients import mark_rank_local, sum_after_finalizing
from megatron.compression.caat_net.layers import (
    PartialRowParallelLinear,
    StreamColumnParallelLinear,
    StreamEmbedding,
)
from megatron.compression.communication.ledger import Ledger
from megatron.compression.dimension import Dimension
from megatron.compression.errors import CompressionConfigError
from megatron.compression.tensor_parallel.layers import (
    CompressedColumnParallelLinear,
    CompressedLanguageModelEmbedding,
    CompressedRowParallelLinear,
)
from megatron.compression.tensor_parallel.overlap import DeferredWeightGradient

_CLASSES = {
    CompressedRowParallelLinear: PartialRowParallelLinear,
    CompressedColumnParallelLinear: StreamColumnParallelLinear,
    CompressedLanguageModelEmbedding: StreamEmbedding,
}


class CaatNet(Dimension):
    """Makes the chunks a CAAT-Net where the settings say so; after tensor parallelism is attached."""

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        if self.config.enabled:
            for chunk in chunks:
                attach(chunk, self.config, self.run.ledger)


def attach(chunk: torch.nn.Module, config: CaatNetConfig, ledger: Ledger) -> None:
    """Make a model chunk a CAAT-Net of this sync fraction. Parameters and their names stay as they are.

    Args:
        chunk: a GPT model, not wrapped, whose tensor-parallel layers have their sites.
    Raises: CompressionConfigError: a tensor-parallel layer that has no site.
    """
    for path, module in chunk.named_modules():
        communicates = isinstance(module, (*_CLASSES, ColumnParallelLinear, RowParallelLinear))
        if communicates and getattr(module, "site", None) is None:
            raise CompressionConfigError(f"--caat-net-sync-fraction does not cover {path}; drop the flag")
        if type(module) in _CLASSES:
            patches.change_class(module, _CLASSES[type(module)])
        if isinstance(module, PartialRowParallelLinear):
            module.shared_channels = config.shared_channels(module.output_size)
        if isinstance(module, ColumnParallelLinear):
            module.disable_grad_reduce, module.allreduce_dgrad = True, False
    mark_rank_local(chunk)
    _check_layers(chunk)
    _share_weight_gradients(chunk)
    sum_after_finalizing(chunk.config, ledger)


def _check_layers(chunk: torch.nn.Module) -> None:
    """Each layer has two partial outputs: another kind of layer would treat the streams as equal."""
    for path, layer in chunk.named_modules():
        if isinstance(layer, TransformerLayer):
            partial = sum(isinstance(module, PartialRowParallelLinear) for module in layer.modules())
            if partial != 2:
                raise CompressionConfigError(
                    f"--caat-net-sync-fraction covers layers of one attention and one dense MLP, not {path}; "
                    "drop the flag, or the one that chose such a layer (--spec?)"
                )


def _share_weight_gradients(chunk: torch.nn.Module) -> None:
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
        row.following = column.following = DeferredWeightGradient(column)
