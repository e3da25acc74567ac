"""Gives every tensor-parallel layer of a built model its site."""

from functools import partial

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import print_rank_0

from megatron.compression.collectives import TransportError
from megatron.compression.communication.ledger import Ledger
from megatron.compression.config import CompressionConfigError
from megatron.compression.runtime import CompressionRuntime
from megatron.compression.tensor_parallel.attention import CompressedSelfAttention
from megatron.compression.tensor_parallel.caat_net_layers import bind_caat_net
from megatron.compression.tensor_parallel.layers import (
    CompressedColumnParallelLinear,
    CompressedLanguageModelEmbedding,
    CompressedRowParallelLinear,
    CompressedVocabParallelEmbedding,
)
from megatron.compression.tensor_parallel.overlap import Handover
from megatron.compression.tensor_parallel.site import TensorParallelSite, layer_name, site_name
from megatron.compression.torch_native.attention import SDPACoreAttention

# GPTModel names the classes of its embeddings and output layer itself, outside the layer spec, and attention
# communicates only at some sizes, so these change class after building. The subclasses add no state.
_CLASS_AFTER_BUILDING = {
    VocabParallelEmbedding: CompressedVocabParallelEmbedding,
    ColumnParallelLinear: CompressedColumnParallelLinear,
    RowParallelLinear: CompressedRowParallelLinear,
    LanguageModelEmbedding: CompressedLanguageModelEmbedding,
    SelfAttention: CompressedSelfAttention,
}


def bind_compression(model: list[torch.nn.Module], runtime: CompressionRuntime) -> list[torch.nn.Module]:
    """Give each tensor-parallel layer of each model chunk its site (a ``ModelConfig.pre_wrap_hooks`` entry).

    Args:
        model: the chunks of this pipeline stage, before they are wrapped.
        runtime: what the sites share.

    Returns:
        The same chunks. (Collective over all ranks of the job where compression is on.)

    Raises:
        CompressionConfigError: compression is on and a layer communicates in a way that no site covers.
    """
    for chunk in model:
        _bind_chunk(chunk, runtime)
        if runtime.config.caat_net.enabled:
            bind_caat_net(chunk, runtime.config.caat_net, runtime.ledger)
    if runtime.tensor_parallel_codec is not None:
        _prepare_transports(model, runtime)
    return model


def _prepare_transports(model: list[torch.nn.Module], runtime: CompressionRuntime) -> None:
    """All ranks come here, also those whose chunks have no site."""
    sites = [getattr(module, "site", None) for chunk in model for module in chunk.modules()]
    groups = dict.fromkeys(site.group for site in sites if site is not None)
    try:
        lines = runtime.transports.prepare(groups)
    except TransportError as error:
        raise CompressionConfigError(str(error)) from None
    for line in lines:
        print_rank_0(f"compression: {line}")
    chunks = runtime.config.tensor_parallel.taco_overlap_chunks
    if chunks > 1 and not all(runtime.transports.transport(group).overlaps for group in groups):
        print_rank_0(
            f"compression: --taco-overlap-chunks {chunks} makes messages smaller and hides none: over "
            "symmetric memory a collective fills the device; drop it, or use --taco-transport copies"
        )


def _bind_chunk(chunk: torch.nn.Module, runtime: CompressionRuntime) -> None:
    layer_numbers = {
        path: module.layer_number
        for path, module in chunk.named_modules()
        if isinstance(module, TransformerLayer)
    }
    for path, module in chunk.named_modules():
        if not isinstance(module, tuple(_CLASS_AFTER_BUILDING)) or not _communicates(module):
            continue
        if reason := _why_not_covered(module):
            if runtime.tensor_parallel_codec is not None:
                raise CompressionConfigError(f"--taco cannot compress {path}: {reason}")
            continue
        if type(module) in _CLASS_AFTER_BUILDING:
            module.__class__ = _CLASS_AFTER_BUILDING[type(module)]
        layer = next((path_ for path_ in layer_numbers if path.startswith(path_ + ".")), None)
        number = layer_numbers.get(layer)
        name = site_name(path, number)
        module.site = TensorParallelSite(name, module.tp_group, runtime, layer_name(path, number))
    for module in chunk.modules():
        _share_handover(module)
        if isinstance(module, SDPACoreAttention):
            module.on_exchange = partial(_count_context, runtime.ledger)
    chunk.register_forward_hook(_LossTraffic(chunk, runtime), with_kwargs=True)


def _count_context(ledger: Ledger, channel: str, operation: str, nbytes: int, ranks: int) -> None:
    ledger.record_uncompressed(channel, "exact", operation, nbytes, ranks)


def _share_handover(module: torch.nn.Module) -> None:
    """Pair a column-parallel layer with the row-parallel one that takes its output."""
    for first, second in (("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")):
        column, row = getattr(module, first, None), getattr(module, second, None)
        if getattr(column, "site", None) is not None and getattr(row, "site", None) is not None:
            column.handover = row.handover = Handover(row)


def _communicates(module: torch.nn.Module) -> bool:
    ranks = module.tp_group.size()
    if isinstance(module, SelfAttention):
        return module.config.num_query_groups < ranks  # else its linear layers do all of it
    return ranks > 1


def _why_not_covered(module: torch.nn.Module) -> str | None:
    if getattr(module, "explicit_expert_comm", False):
        return "it is an expert of a mixture; drop --num-experts"
    if getattr(module, "gtp_remat_size", 1) > 1:
        return "its weight is sharded by --gtp-weight-remat-size; drop that flag"
    if module.config.defer_embedding_wgrad_compute and isinstance(module, ColumnParallelLinear):
        return "its weight gradient is deferred; drop --defer-embedding-wgrad-compute"
    if isinstance(module, SelfAttention) and module.config.attention_output_gate:
        return "it gathers its gate among ranks that share a query group; drop --attention-output-gate"
    if getattr(module, "gather_output", False):
        return "it gathers its output, which is not covered"
    if isinstance(module, RowParallelLinear) and not module.input_is_parallel:
        return "it scatters its input; only parallel input is covered"
    return None


class _LossTraffic:
    """Counts the vocabulary-parallel cross entropy: three fp32 all-reduces of one value a token.

    They (maximum, target logit, sum of exponentials) decide the loss and are left exact.
    """

    reductions = 3

    def __init__(self, chunk: torch.nn.Module, runtime: CompressionRuntime) -> None:
        self.runtime = runtime
        group = getattr(chunk, "pg_collection", None)
        self.world_size = group.tp.size() if group is not None else 1

    def __call__(self, module, args, kwargs, output) -> None:
        labels = kwargs.get("labels")
        if labels is None or not getattr(module, "post_process", True):
            return
        for _ in range(self.reductions):
            self.runtime.ledger.record_uncompressed(
                "tp.other", "exact", "all_reduce", 4 * labels.numel(), self.world_size
            )
