"""Makes a CAAT-Net of a built model: tells its tensor-parallel layers which of them reduce what."""

import itertools

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron.compression.caat_net.config import CaatNetConfig
from megatron.compression.caat_net.layers import (
    PartialRowParallelLinear,
    StreamColumnParallelLinear,
    StreamEmbedding,
)
from megatron.compression.communication.ledger import Ledger
from megatron.compression.dimension import Dimension
from megatron.compression.errors import SettingError
from megatron.compression.patches import running, symbols
from megatron.compression.replicated_parameters import QUERY_KEY_NORMS, sharded_without_mark
from megatron.compression.tensor_parallel.functions import DeferredWeightGradient
from megatron.compression.tensor_parallel.hooks import reason_without_site
from megatron.compression.tensor_parallel.layers import (
    CompressedColumnParallelLinear,
    CompressedLanguageModelEmbedding,
    CompressedRowParallelLinear,
)

_MARK = "sees_rank_local_data"
"""Mark of parameters that all tensor-parallel ranks hold in whole, each with the gradient of its
own stream."""

_CLASSES = {
    CompressedRowParallelLinear: PartialRowParallelLinear,
    CompressedColumnParallelLinear: StreamColumnParallelLinear,
    CompressedLanguageModelEmbedding: StreamEmbedding,
}


class CaatNet(Dimension):
    """Makes the chunks a CAAT-Net where the settings say so; after tensor parallelism is
    attached."""

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        if self.config.enabled:
            for chunk in chunks:
                attach(chunk, self.config, self.run.ledger)


def attach(chunk: torch.nn.Module, config: CaatNetConfig, ledger: Ledger) -> None:
    """Make a GPT model a CAAT-Net. Parameters and their names stay as they are.

    Args:
        chunk: not wrapped; its tensor-parallel layers have their sites.
        config: has the sync fraction.
        ledger: counts the sums of rank-local gradients.
    """
    for path, module in chunk.named_modules():
        communicates = isinstance(module, (*_CLASSES, ColumnParallelLinear, RowParallelLinear))
        if communicates and getattr(module, "site", None) is None:
            reason = reason_without_site(module)
            if reason is not None:  # it names the flag that chose such a layer
                raise SettingError(
                    "caat_net.sync_fraction", None, f"does not cover {path}: {reason}"
                )
            raise SettingError(
                "caat_net.sync_fraction", None, f"does not cover {path}", "drop the flag"
            )
        # The subclasses add no state, so a built layer can change its class.
        if type(module) in _CLASSES:
            symbols.change_class(module, _CLASSES[type(module)])
        if isinstance(module, PartialRowParallelLinear):
            module.shared_channels = config.shared_channels(module.output_size)
        if isinstance(module, ColumnParallelLinear):
            # Its input gradient is that of this rank's stream alone.
            module.disable_grad_reduce = True
            module.allreduce_dgrad = False
    _mark_rank_local(chunk)
    _check_layers(chunk)
    _share_weight_gradients(chunk)
    _sum_after_finalizing(chunk.config, ledger)


def _check_layers(chunk: torch.nn.Module) -> None:
    """Refuse layers without two partial outputs: they would treat the streams as equal."""
    for path, layer in chunk.named_modules():
        if isinstance(layer, TransformerLayer):
            partial = sum(
                isinstance(module, PartialRowParallelLinear) for module in layer.modules()
            )
            if partial != 2:
                raise SettingError(
                    "caat_net.sync_fraction",
                    None,
                    f"covers layers of one attention and one dense MLP, not {path}",
                    "drop the flag, or the one that chose such a layer (--spec?)",
                )


def _share_weight_gradients(chunk: torch.nn.Module) -> None:
    """Pair each partial output with the column-parallel layer that follows: projection, fc1; fc2,
    next qkv, which are not of one graph where layers are recomputed."""
    layers = [layer for layer in chunk.decoder.layers if isinstance(layer, TransformerLayer)]
    pairs = [(layer.self_attention.linear_proj, layer.mlp.linear_fc1) for layer in layers]
    # Two layers are two graphs where each is recomputed by itself, and a node is of one graph.
    if chunk.config.recompute_granularity is None:
        pairs += [
            (layer.mlp.linear_fc2, following.self_attention.linear_qkv)
            for layer, following in itertools.pairwise(layers)
        ]
    for row, column in pairs:
        row.following = column.following = DeferredWeightGradient(column)


def _mark_rank_local(chunk: torch.nn.Module) -> None:
    """Mark the replicated parameters of a GPT model's transformer block: norms, the final one
    included, and the biases of row-parallel layers. What is cut without Megatron's mark (the
    softmax's offsets) is no replica, and megatron-core sums the gradients of the norms of queries
    and keys itself."""
    cut = sharded_without_mark(chunk)
    for name, parameter in chunk.decoder.named_parameters():
        # Sharded parameters have gradients of their own on every rank.
        sharded = parameter in cut or getattr(parameter, "tensor_model_parallel", False)
        if not sharded and not any(norm in name for norm in QUERY_KEY_NORMS):
            setattr(parameter, _MARK, True)


def _sum_after_finalizing(config: TransformerConfig, ledger: Ledger) -> None:
    """Let ``config.finalize_model_grads_func``, which Megatron's loop keeps, sum the marked
    gradients as well. Idempotent."""
    # Several chunks of a stage share one config.
    if not isinstance(config.finalize_model_grads_func, _FinalizeAndSum):
        config.finalize_model_grads_func = _FinalizeAndSum(config.finalize_model_grads_func, ledger)


class _FinalizeAndSum:
    """megatron-core's ``finalize_model_grads``, or another function of the config's, and then the
    sum.

    The ledger is of the run that attached first: models of several runs may share a config, and the
    model's own run counts.
    """

    def __init__(self, finalize, ledger: Ledger) -> None:
        self.finalize = finalize or finalize_model_grads
        self.ledger = ledger

    def __call__(
        self, model: list[torch.nn.Module], num_tokens=None, pg_collection=None, **options
    ) -> None:
        # Data parallelism first: the sum over streams is of gradients that are reduced.
        self.finalize(model, num_tokens, pg_collection=pg_collection, **options)
        if pg_collection is None:
            group = parallel_state.get_tensor_model_parallel_group()
        else:
            group = pg_collection.tp
        run = running.run_of_model(model)
        sum_rank_local_gradients(model, group, self.ledger if run is None else run.ledger)


def sum_rank_local_gradients(
    model: list[torch.nn.Module], group: dist.ProcessGroup, ledger: Ledger
) -> None:
    """Sum the gradients of all marked parameters over the tensor-parallel group, in one all-reduce.

    Args:
        model: the chunks of this pipeline stage.
        group: the tensor-parallel ranks.
        ledger: counts the sum.
    """
    gradients = []
    for chunk in model:
        for parameter in chunk.parameters():
            if not parameter.requires_grad or not getattr(parameter, _MARK, False):
                continue
            # DDP reduces into main_grad; without it autograd's own gradient is all there is.
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                gradient = parameter.grad
            if gradient is not None:
                gradients.append(gradient.detach())
    if not gradients:
        return
    # One all-reduce: these are many small tensors.
    total = _flatten_dense_tensors(gradients)
    dist.all_reduce(total, group=group)
    ledger.record_uncompressed("tp.other", "exact", "all_reduce", total.nbytes, group.size())
    for gradient, summed in zip(gradients, _unflatten_dense_tensors(total, gradients), strict=True):
        gradient.copy_(summed)
