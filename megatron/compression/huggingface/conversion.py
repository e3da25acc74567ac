"""Fills a built model from Hugging Face files, and writes such files from one, at any parallel sizes.

Each rank reads what its own parameters are made of. In an export, tensor-parallel rank 0 of each pipeline
stage gathers and writes its stage's tensors.
"""

import re
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.compression.huggingface import mapping
from megatron.compression.huggingface.files import TensorReader, TensorWriter
from megatron.compression.huggingface.models import DenseModel, ModelError


def import_weights(
    chunks: list[torch.nn.Module],
    model: DenseModel,
    reader: TensorReader,
    groups: ProcessGroupCollection,
) -> None:
    """Copy Hugging Face tensors into the parameters of this rank.

    Args:
        chunks: the GPT model chunks of this pipeline stage, not wrapped.
        reader: the files; tensors are cast to the parameter's dtype.
    Raises: ModelError: the files hold other tensors than the model has, or another shape.
    """
    expected = set(mapping.hugging_face_names(model))
    if unknown := sorted(reader.names() - expected - {"lm_head.weight"}):
        raise ModelError(f"{reader.folder} has tensors that a {model.family} model has not: {unknown[:5]}")
    rank, world_size = groups.tp.rank(), groups.tp.size()
    for name, parameter in _named_parameters(chunks):
        rule = mapping.rule_for(name, model)
        full = rule.merge(*(reader.read(source) for source in rule.sources))
        if rule.partition == "vocabulary":
            full = mapping.pad_vocabulary(full, parameter.shape[0] * world_size)
        part = mapping.shard(full, rule.partition, rank, world_size)
        if part.shape != parameter.shape:
            raise ModelError(
                f"{', '.join(rule.sources)}: {list(part.shape)} on this rank, but {name} is "
                f"{list(parameter.shape)}; is a flag of --qwen-model overridden?"
            )
        parameter.data.copy_(part)


def export_weights(
    chunks: list[torch.nn.Module],
    model: DenseModel,
    writer: TensorWriter | None,
    groups: ProcessGroupCollection,
    dtype: torch.dtype | None = None,
) -> None:
    """Gather this stage's parameters over the tensor-parallel group and hand them to its rank 0's writer.

    Every rank of the group calls it.

    Args:
        chunks: the GPT model chunks of this pipeline stage, not wrapped.
        writer: on tensor-parallel rank 0; None elsewhere.
        dtype: of the written tensors; None keeps the parameters'.
    """
    rank, world_size = groups.tp.rank(), groups.tp.size()
    for name, parameter in _named_parameters(chunks):
        rule = mapping.rule_for(name, model)
        if name == "output_layer.weight" and model.tied:
            continue  # a later stage's copy of the embedding
        parts = [parameter.data]
        if rule.partition != "replicated" and world_size > 1:
            parts = [torch.empty_like(parameter.data) for _ in range(world_size)] if rank == 0 else None
            dist.gather(parameter.data.contiguous(), parts, group=groups.tp, group_dst=0)
        if rank != 0:
            continue
        for source, tensor in zip(
            rule.sources, rule.split(mapping.unshard(parts, rule.partition)), strict=True
        ):
            writer.add(source, tensor if dtype is None else tensor.to(dtype))


def _named_parameters(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters with the global number of their layer in the name."""
    for chunk in chunks:
        layers = ((p, m) for p, m in chunk.named_modules() if isinstance(m, TransformerLayer))
        numbers = {path: module.layer_number - 1 for path, module in layers}
        for name, parameter in chunk.named_parameters():
            layer = re.match(r"decoder\.layers\.\d+", name)
            if layer:
                name = f"decoder.layers.{numbers[layer[0]]}{name[layer.end() :]}"
            yield name, parameter
