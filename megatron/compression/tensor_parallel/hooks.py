"""Puts tensor-parallel compression into a built model: every layer that communicates gets its site."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.objects import gather_objects
from megatron.compression.communication.site import CommSite, Run, layer_name, site_name
from megatron.compression.dimension import Dimension
from megatron.compression.errors import CompressionConfigError
from megatron.compression.patches import communication, running, symbols
from megatron.compression.tensor_parallel import halves_block
from megatron.compression.tensor_parallel.config import HALVES, TensorParallelConfig
from megatron.compression.tensor_parallel.functions import DeferredWeightGradient
from megatron.compression.tensor_parallel.layers import (
    REGIONS,
    CompressedColumnParallelLinear,
    CompressedLanguageModelEmbedding,
    CompressedLatentAttention,
    CompressedPredictionLayer,
    CompressedRowParallelLinear,
    CompressedSelfAttention,
    CompressedVocabParallelEmbedding,
)
from megatron.compression.transformer_engine.hooks import (
    TransformerEngineLayers,
    communicating,
    why_not_covered,
)

# Models name some of these classes themselves, outside the layer spec, and another entrypoint's spec names
# megatron-core's: they change class after building. The subclasses add no state. With each: the methods that
# it replaces.
_CLASSES = {
    VocabParallelEmbedding: (CompressedVocabParallelEmbedding, ("forward",)),
    ColumnParallelLinear: (CompressedColumnParallelLinear, ("_forward_impl",)),
    RowParallelLinear: (CompressedRowParallelLinear, ("forward",)),
    LanguageModelEmbedding: (CompressedLanguageModelEmbedding, ("forward",)),
    SelfAttention: (CompressedSelfAttention, ("get_query_key_value_tensors",)),
    MLASelfAttention: (CompressedLatentAttention, ("get_query_key_value_tensors",)),
    MultiTokenPredictionLayer: (CompressedPredictionLayer, ("_concat_embeddings",)),
}


class TensorParallel(Dimension):
    """Gives each tensor-parallel layer its site, which counts and compresses."""

    config: TensorParallelConfig
    broadcasts_batch = False
    """Whether tensor-parallel rank 0 sends the batch to its group, as Megatron's loop has it."""

    def __init__(self, config: TensorParallelConfig, run: Run, *more: Any) -> None:
        super().__init__(config, run, *more)
        self._engine = TransformerEngineLayers(run)

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        config, transports = self.config, self.run.transports
        running.claim(chunks, self.run)
        communication.through_regions(REGIONS)
        for chunk in chunks:
            self._attach_chunk(chunk)
            if config.halves and any(True for _ in sites_of(chunk)):
                halves_block.attach(chunk)
        if config.enabled:
            groups = dict.fromkeys(site.group for chunk in chunks for site in sites_of(chunk))
            for line in transports.prepare(
                groups
            ):  # all ranks, also those whose chunks have no site
                self.log(f"compression: {line}")
            if config.halves and not all(transports.transport(group).overlaps for group in groups):
                self.log(
                    f"compression: {HALVES} makes messages smaller and overlaps with none: over symmetric "
                    "memory a collective fills the device; drop it"
                )

    def attach_wrapped(self, chunks: list[torch.nn.Module]) -> None:
        """Refuse a part of a spec by site or layer that no site of any rank meets. Collective."""
        by_site = (
            any(";" in (text or "") for text in self.config.specs) or self.config.layers != "all"
        )
        if not by_site or parallel_state.get_tensor_model_parallel_world_size() == 1:
            return
        unmet = gather_objects(unmet_parts(chunks, self.config))
        if nowhere := sorted(set.intersection(*unmet)):
            raise CompressionConfigError(
                f"{nowhere[0]} names nothing that this model sends over tensor parallelism; drop that part"
            )

    def refusal(self, chunks: list[torch.nn.Module]) -> str | None:
        return next(
            (f"{path} {reason}" for chunk in chunks for path, reason in _uncovered(chunk)), None
        )

    def _attach_chunk(self, chunk: torch.nn.Module) -> None:
        layer_numbers = {
            path: module.layer_number
            for path, module in chunk.named_modules()
            if isinstance(module, TransformerLayer)
        }

        def names(path: str) -> tuple[str, int | str | None]:
            layer = next((path_ for path_ in layer_numbers if path.startswith(path_ + ".")), None)
            number = layer_numbers.get(layer)
            return site_name(path, number), layer_name(path, number)

        if self.config.enabled:  # else it is not counted: the audit of the first iteration says so
            for path, reason in _uncovered(chunk):
                raise CompressionConfigError(f"--tp-compression cannot compress {path}: {reason}")
        for path, module in communicating(chunk):
            if why_not_covered(module) is None:
                self._engine.follow_engine()
                self._engine.attach(module, *names(path))
        for path, module in chunk.named_modules():
            compressed, _ = _covered(module)
            if compressed is None:
                continue
            if type(module) is not compressed:
                symbols.change_class(module, compressed)
            name, layer = names(path)
            module.site = CommSite(name, module.tp_group, self.run, layer)
        for module in chunk.modules():
            _share_weight_gradient(module)
        _count_batches(chunk, self.run.ledger, self.broadcasts_batch)


def _uncovered(chunk: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """(path, why) of the layers that communicate in a way that no site covers."""
    for path, module in communicating(chunk):
        if reason := why_not_covered(module):
            yield path, reason
    for path, module in chunk.named_modules():
        if reason := _covered(module)[1]:
            yield path, reason


def _covered(module: torch.nn.Module) -> tuple[type | None, str | None]:
    """The class that compresses what a module of megatron-core's sends, or why there is none."""
    base = next((base for base in _CLASSES if isinstance(module, base)), None)
    if base is None or not _communicates(module):
        return None, None
    reason = _why_not_covered(module)
    compressed = None if reason else _compressed_class(type(module), base)
    if compressed is None:
        reason = reason or f"{type(module).__name__} has a {_CLASSES[base][1][0]} of its own"
    return compressed, reason


def unmet_parts(chunks: list[torch.nn.Module], config: TensorParallelConfig) -> set[str]:
    """The parts of the settings by site and layer that name nothing that these attached chunks send."""
    messages: list[tuple[str, int | str | None, str]] = []
    for chunk in chunks:
        for module in chunk.modules():
            site = getattr(module, "site", None)
            if isinstance(site, CommSite):
                messages += [(site.name, site.layer, one) for one in getattr(module, "traffic", ())]
            of_tokens = getattr(getattr(module, "token_dispatcher", None), "dispatch", None)
            for site in of_tokens.values() if isinstance(of_tokens, dict) else ():
                messages += [(site.name, site.layer, one) for one in (site.forward, site.backward)]
    return config.unmet_parts(messages)


def sites_of(chunk: torch.nn.Module) -> Iterator[CommSite]:
    """The sites of a chunk's layers."""
    for module in chunk.modules():
        if isinstance(getattr(module, "site", None), CommSite):
            yield module.site


@cache
def _compressed_class(cls: type, base: type) -> type | None:
    """The class that compresses what ``cls``, a subclass of megatron-core's ``base``, sends; None where the
    subclass does otherwise what ours would replace."""
    ours, replaced = _CLASSES[base]
    if issubclass(cls, ours):
        return cls
    if cls is base:
        return ours
    if any(getattr(cls, name) is not getattr(base, name) for name in replaced):
        return None
    return type(f"Compressed{cls.__name__}", (ours, cls), {"__module__": cls.__module__})


def _share_weight_gradient(module: torch.nn.Module) -> None:
    """Let a column-parallel layer defer the weight gradient of the row-parallel layer after it."""
    for first, second in (("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")):
        column, row = getattr(module, first, None), getattr(module, second, None)
        classes = (column, CompressedColumnParallelLinear), (row, CompressedRowParallelLinear)
        if all(isinstance(one, ours) and one.site is not None for one, ours in classes):
            column.deferred = row.deferred = DeferredWeightGradient(row)


def _communicates(module: torch.nn.Module) -> bool:
    ranks = module.tp_group.size()
    if getattr(module, "explicit_expert_comm", False):
        return False  # an expert: its layer's dispatcher communicates for it
    if isinstance(module, SelfAttention):
        return module.config.num_query_groups < ranks  # else its linear layers do all of it
    return ranks > 1


def _why_not_covered(module: torch.nn.Module) -> str | None:
    if getattr(module, "gtp_remat_size", 1) > 1:
        return "its weight is sharded by --gtp-weight-remat-size; drop that flag"
    if module.config.defer_embedding_wgrad_compute and isinstance(module, ColumnParallelLinear):
        return "its weight gradient is deferred; drop --defer-embedding-wgrad-compute"
    if isinstance(module, SelfAttention) and module.config.attention_output_gate:
        return (
            "it gathers its gate among ranks that share a query group; drop --attention-output-gate"
        )
    if getattr(module, "gather_output", False):
        return "it gathers its output, which is not covered"
    if isinstance(module, RowParallelLinear) and not module.input_is_parallel:
        return "it scatters its input; only parallel input is covered"
    return None


def _count_batches(chunk: torch.nn.Module, ledger: Ledger, broadcasts: bool) -> None:
    """Count what a model chunk's inputs and its loss cost, exact by design, as tp.other: the batch's
    broadcast in Megatron's loop; three fp32 all-reduces of one value a token in a vocabulary-parallel cross
    entropy, also of each further token predicted, for which the largest logits and their places are gathered
    in training."""
    group = getattr(getattr(chunk, "pg_collection", None), "tp", None)
    if group is None or group.size() == 1:
        return
    ranks, context_ranks = group.size(), getattr(chunk.config, "context_parallel_size", 1)
    record = partial(ledger.record_uncompressed, "tp.other", "exact")

    def count(module, args, kwargs, output) -> None:
        labels, last = kwargs.get("labels"), getattr(module, "post_process", True)
        if last and labels is None:  # no training: generation has no batch either
            return
        if broadcasts and group.rank() == 0:
            inputs = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            sent = (
                sum(one.nbytes for one in inputs) * context_ranks
            )  # each rank keeps its part of it
            record("broadcast", sent, ranks)
        if not last:
            return
        further = chunk.config.mtp_num_layers or 0
        for _ in range(3 * (1 + further)):
            record("all_reduce", 4 * labels.numel(), ranks)
        for width in (chunk.config.params_dtype.itemsize, 8) * further if module.training else ():
            record("all_gather", width * labels.numel() * ranks, ranks)

    chunk.register_forward_hook(count, with_kwargs=True)
