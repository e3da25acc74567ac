"""Puts tensor-parallel compression into a built model: every layer that communicates gets its
site."""

from collections.abc import Callable, Iterator
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
from megatron.compression.communication.site import (
    CommSite,
    Run,
    enclosing_layer,
    layer_name,
    site_name,
)
from megatron.compression.dimension import Dimension
from megatron.compression.errors import CompressionConfigError, SettingError
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

# Models name some of these classes themselves, outside the layer spec, and another entrypoint's
# spec names megatron-core's: they change class after building. The subclasses add no state. With
# each: the methods that it replaces.
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
        # Patched functions find the run by the model that they are called for.
        running.claim(chunks, self.run)
        communication.through_regions(REGIONS)
        for chunk in chunks:
            self._attach_chunk(chunk)
            if self.config.halves and any(True for _ in sites_of(chunk)):
                halves_block.attach(chunk)
        if self.config.enabled:
            self._prepare_transports(chunks)

    def _prepare_transports(self, chunks: list[torch.nn.Module]) -> None:
        """Set up what carries payloads, and log it.

        Collective: also ranks whose chunks have no site call.
        """
        transports = self.run.transports
        groups = dict.fromkeys(site.group for chunk in chunks for site in sites_of(chunk))
        for line in transports.prepare(groups):
            self.log(f"compression: {line}")
        overlaps = all(transports.transport(group).overlaps for group in groups)
        if self.config.halves and not overlaps:
            self.log(
                f"compression: {HALVES} gains nothing here: over symmetric memory a collective "
                "fills the GPU, so nothing overlaps with it; drop it"
            )

    def attach_wrapped(self, chunks: list[torch.nn.Module]) -> None:
        """Refuse a part of a spec by site or layer that no site of any rank meets. Collective."""
        by_site = any(spec is not None and ";" in spec for spec in self.config.specs)
        by_layer = self.config.layers != "all"
        if not by_site and not by_layer:
            return
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            return
        # Another pipeline stage may have what this one lacks.
        unmet_by_rank = gather_objects(unmet_parts(chunks, self.config))
        unmet = sorted(set.intersection(*unmet_by_rank))
        if unmet:
            raise CompressionConfigError(
                f"{unmet[0]} names nothing that this model sends over tensor parallelism; "
                "drop that part"
            )

    def refusal(self, chunks: list[torch.nn.Module]) -> str | None:
        for chunk in chunks:
            for path, reason in _uncovered(chunk):
                return f"{path} {reason}"
        return None

    def _attach_chunk(self, chunk: torch.nn.Module) -> None:
        """Give every layer of a chunk that communicates its class and its site."""
        layer_numbers = {
            path: module.layer_number
            for path, module in chunk.named_modules()
            if isinstance(module, TransformerLayer)
        }

        def names(path: str) -> tuple[str, int | str | None]:
            number = enclosing_layer(path, layer_numbers)
            return site_name(path, number), layer_name(path, number)

        # Without compression such a layer is not counted: the audit of the first iteration says so.
        if self.config.enabled:
            for path, reason in _uncovered(chunk):
                raise SettingError(
                    self.config.path("compression"), None, f"cannot compress {path}: {reason}"
                )
        for path, module in communicating(chunk):
            # Transformer Engine's layers keep their classes: their collectives are replaced.
            if why_not_covered(module) is None:
                self._engine.follow_engine()
                self._engine.attach(module, *names(path))
        for path, module in chunk.named_modules():
            compressed, _ = _covered(module)
            if compressed is None:
                continue
            # A layer of ours may come from the layer spec already.
            if type(module) is not compressed:
                symbols.change_class(module, compressed)
            name, layer = names(path)
            module.site = CommSite(name, module.tp_group, self.run, layer)
        for module in chunk.modules():
            _share_weight_gradient(module)
        _count_batches(chunk, self.run.ledger, self.broadcasts_batch)


def _uncovered(chunk: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (path, reason) of the layers that communicate in a way that no site covers."""
    for path, module in communicating(chunk):
        if reason := why_not_covered(module):
            yield path, reason
    for path, module in chunk.named_modules():
        if reason := _covered(module)[1]:
            yield path, reason


def _covered(module: torch.nn.Module) -> tuple[type | None, str | None]:
    """Return the class that compresses what a module sends and None, or None and the reason why
    none does.

    Both are None where the module is no layer of megatron-core's that communicates.
    """
    base = next((base for base in _CLASSES if isinstance(module, base)), None)
    if base is None or not _communicates(module):
        return None, None
    if reason := _why_not_covered(module):
        return None, reason
    compressed = _compressed_class(type(module), base)
    if compressed is None:
        _, replaced_methods = _CLASSES[base]
        return None, f"{type(module).__name__} has a {replaced_methods[0]} of its own"
    return compressed, None


def reason_without_site(module: torch.nn.Module) -> str | None:
    """Return why a layer of megatron-core's that communicates can have no site of ours, or None."""
    return _covered(module)[1]


def unmet_parts(chunks: list[torch.nn.Module], config: TensorParallelConfig) -> set[str]:
    """Return the parts of the settings by site and layer that name nothing that these attached
    chunks send."""
    messages: list[tuple[str, int | str | None, str]] = []
    for chunk in chunks:
        for module in chunk.modules():
            site = getattr(module, "site", None)
            if isinstance(site, CommSite):
                for traffic in getattr(module, "traffic", ()):
                    messages.append((site.name, site.layer, traffic))
            # Ranks that share an expert send each other tokens as tensor parallelism's settings
            # say.
            token_sites = getattr(getattr(module, "token_dispatcher", None), "dispatch", None)
            if isinstance(token_sites, dict):
                for site in token_sites.values():
                    messages.append((site.name, site.layer, site.forward))
                    messages.append((site.name, site.layer, site.backward))
    return config.unmet_parts(messages)


def sites_of(chunk: torch.nn.Module) -> Iterator[CommSite]:
    """Yield the sites of a chunk's layers."""
    for module in chunk.modules():
        if isinstance(getattr(module, "site", None), CommSite):
            yield module.site


@cache
def _compressed_class(cls: type, base: type) -> type | None:
    """Return the class that compresses what ``cls``, a subclass of megatron-core's ``base``, sends.

    None where the subclass does otherwise what ours would replace.
    """
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
        column = getattr(module, first, None)
        row = getattr(module, second, None)
        if not isinstance(column, CompressedColumnParallelLinear) or column.site is None:
            continue
        if isinstance(row, CompressedRowParallelLinear) and row.site is not None:
            # One object for both: the column-parallel layer makes its node, the other one fills it.
            column.deferred = row.deferred = DeferredWeightGradient(row)


def _communicates(module: torch.nn.Module) -> bool:
    """Return whether a layer of megatron-core's sends anything itself."""
    ranks = module.tp_group.size()
    # The layer's dispatcher moves tokens to where their expert is.
    if getattr(module, "explicit_expert_comm", False):
        return False  # an expert: its layer's dispatcher communicates for it
    if isinstance(module, SelfAttention):
        return module.config.num_query_groups < ranks  # else its linear layers do all of it
    return ranks > 1


def _why_not_covered(module: torch.nn.Module) -> str | None:
    """Return why our class would not do what a layer does, or None."""
    if getattr(module, "gtp_remat_size", 1) > 1:
        return "its weight is sharded by --gtp-weight-remat-size; drop that flag"
    if module.config.defer_embedding_wgrad_compute and isinstance(module, ColumnParallelLinear):
        return "its weight gradient is deferred; drop --defer-embedding-wgrad-compute"
    if isinstance(module, SelfAttention) and module.config.attention_output_gate:
        return (
            "it gathers its gate among ranks that share a query group; drop --attention-output-gate"
        )
    # From megatron-core 0.20 on; our products come out in their input's type.
    output_dtype = getattr(module, "output_dtype", None)
    if output_dtype not in (None, module.config.params_dtype):
        return (
            f"its output is {str(output_dtype).removeprefix('torch.')}; drop --output-logit-dtype "
            "(logit_dtype of the model)"
        )
    if getattr(module, "gather_output", False):
        return "it gathers its output, which is not covered"
    if isinstance(module, RowParallelLinear) and not module.input_is_parallel:
        return "it scatters its input; only parallel input is covered"
    return None


def _count_batches(chunk: torch.nn.Module, ledger: Ledger, broadcasts: bool) -> None:
    """Count what a model chunk's inputs and its loss cost, exact by design, as tp.other.

    That is the batch's broadcast in Megatron's loop, and three fp32 all-reduces of one value a
    token in a vocabulary-parallel cross entropy. Each further token predicted has its own cross
    entropy, for which in training the largest logits and their indices are gathered.

    Args:
        chunk: counted when its forward ends.
        ledger: counts.
        broadcasts: tensor-parallel rank 0 sends the batch to its group.
    """
    group = getattr(getattr(chunk, "pg_collection", None), "tp", None)
    if group is None or group.size() == 1:
        return
    ranks = group.size()
    record = partial(ledger.record_uncompressed, "tp.other", "exact")

    def count(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        labels = kwargs.get("labels")
        has_loss = getattr(module, "post_process", True)
        if has_loss and labels is None:  # no training: generation has no batch either
            return
        if broadcasts and group.rank() == 0:
            record("broadcast", _batch_bytes(chunk, [*args, *kwargs.values()]), ranks)
        if has_loss:
            _count_loss(chunk, record, labels.numel(), ranks, module.training)

    chunk.register_forward_hook(count, with_kwargs=True)


def _batch_bytes(chunk: torch.nn.Module, inputs: list) -> int:
    """Return the bytes of a batch, of which each context-parallel rank keeps its part."""
    local = sum(tensor.nbytes for tensor in inputs if isinstance(tensor, torch.Tensor))
    return local * getattr(chunk.config, "context_parallel_size", 1)


def _count_loss(
    chunk: torch.nn.Module,
    record: Callable[[str, int, int], None],
    tokens: int,
    ranks: int,
    training: bool,
) -> None:
    """Count the collectives of a forward's losses.

    Args:
        chunk: the last one of the model.
        record: counts (operation, buffer bytes, ranks).
        tokens: of the batch.
        ranks: that share the vocabulary.
        training: further tokens' accuracies are logged.
    """
    further = chunk.config.mtp_num_layers or 0
    for _ in range(3 * (1 + further)):
        record("all_reduce", 4 * tokens, ranks)
    if training:
        for _ in range(further):
            record("all_gather", chunk.config.params_dtype.itemsize * tokens * ranks, ranks)
            record("all_gather", 8 * tokens * ranks, ranks)  # int64 indices
