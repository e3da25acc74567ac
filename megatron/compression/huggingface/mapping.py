"""Which Hugging Face tensors a Megatron parameter is made of, and how: pure functions on tensors.

Megatron fuses projections. Rows of linear_qkv go by query group, so that a tensor-parallel rank gets whole
groups: [q of group 0, k 0, v 0, q of group 1, k 1, v 1, ...]. Rows of linear_fc1 are the gate's, then the up
projection's; a rank gets its part of each.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.compression.huggingface.models import DenseModel, ModelError

Partition = Literal["replicated", "rows", "vocabulary", "gate and up", "columns"]


def merge_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """``q [heads * head_dim, ...]`` and ``k``, ``v [groups * head_dim, ...]``, weights or biases, by query
    group: ``[(heads + 2 groups) * head_dim, ...]``."""
    by_group = [tensor.unflatten(0, (groups, -1)) for tensor in (q, k, v)]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def split_qkv(qkv: torch.Tensor, heads: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `merge_qkv`."""
    by_group = qkv.unflatten(0, (groups, -1))
    head_dim = by_group.shape[1] // (heads // groups + 2)
    parts = by_group.split([heads // groups * head_dim, head_dim, head_dim], dim=1)
    return tuple(part.flatten(0, 1) for part in parts)


def pad_vocabulary(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Append rows of zeros up to ``rows``.

    Raises: ModelError: the table has more rows than that.
    """
    if table.shape[0] > rows:
        have = f"the model has {table.shape[0]} tokens, --padded-vocab-size only {rows}"
        raise ModelError(f"{have}; drop that flag or raise it")
    return torch.nn.functional.pad(table, (0, 0, 0, rows - table.shape[0]))


_DIMENSION = {"columns": 1, "rows": 0, "vocabulary": 0}


def shard(full: torch.Tensor, partition: Partition, rank: int, world_size: int) -> torch.Tensor:
    """The part of a parameter that a tensor-parallel rank holds."""
    if partition == "replicated":
        return full
    if partition == "gate and up":
        return torch.cat([half.chunk(world_size)[rank] for half in full.chunk(2)])
    return full.chunk(world_size, dim=_DIMENSION[partition])[rank]


def unshard(parts: list[torch.Tensor], partition: Partition) -> torch.Tensor:
    """The whole parameter from every rank's part, in order of rank."""
    if partition == "replicated":
        return parts[0]
    if partition == "gate and up":
        return torch.cat([torch.cat(half) for half in zip(*(part.chunk(2) for part in parts), strict=True)])
    return torch.cat(parts, dim=_DIMENSION[partition])


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made."""

    sources: tuple[str, ...]
    """The Hugging Face tensors."""
    partition: Partition = "replicated"
    """How tensor parallelism cuts the merged tensor; vocabulary is rows, padded first."""
    merge: Callable[..., torch.Tensor] = lambda tensor: tensor
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = lambda tensor: (tensor,)


def _layer_rules(model: DenseModel, layer: str) -> dict[str, Rule]:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    qkv = {
        kind: Rule(
            tuple(f"{attention}.{name}_proj.{kind}" for name in "qkv"),
            "rows",
            lambda q, k, v: merge_qkv(q, k, v, model.groups),
            lambda tensor: split_qkv(tensor, model.heads, model.groups),
        )
        for kind in ("weight", "bias")
    }
    norms = {
        "input_layernorm.weight": f"{layer}.input_layernorm.weight",
        "pre_mlp_layernorm.weight": f"{layer}.post_attention_layernorm.weight",
        # Transformer Engine keeps the norms in the linear layers that follow.
        "self_attention.linear_qkv.layer_norm_weight": f"{layer}.input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": f"{layer}.post_attention_layernorm.weight",
    }
    rules = {name: Rule((source,)) for name, source in norms.items()}
    rules |= {
        "self_attention.linear_qkv.weight": qkv["weight"],
        "self_attention.linear_proj.weight": Rule((f"{attention}.o_proj.weight",), "columns"),
        "mlp.linear_fc1.weight": Rule(
            (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            "gate and up",
            lambda gate, up: torch.cat((gate, up)),
            lambda tensor: tensor.chunk(2, dim=0),
        ),
        "mlp.linear_fc2.weight": Rule((f"{mlp}.down_proj.weight",), "columns"),
    }
    if model.family == "qwen2":
        rules["self_attention.linear_qkv.bias"] = qkv["bias"]
    elif model.family == "qwen3":
        for name in ("q", "k"):
            rules[f"self_attention.{name}_layernorm.weight"] = Rule((f"{attention}.{name}_norm.weight",))
    return rules


def rule_for(name: str, model: DenseModel) -> Rule:
    """How the Megatron parameter ``name`` is made: as ``named_parameters`` has it, layers numbered globally.

    Raises: ModelError: the model has no such parameter.
    """
    embedding = "model.embed_tokens.weight"
    output = embedding if model.tied else "lm_head.weight"
    unpadded = {"split": lambda table: (table[: model.vocabulary],)}
    rules = {
        "embedding.word_embeddings.weight": Rule((embedding,), "vocabulary", **unpadded),
        "output_layer.weight": Rule((output,), "vocabulary", **unpadded),
        "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
    }
    if layer := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
        name = layer[2]
        rules = _layer_rules(model, f"model.layers.{layer[1]}")
    if name not in rules:
        raise ModelError(f"a {model.family} model has no parameter {layer[0] if layer else name}")
    return rules[name]


def hugging_face_names(model: DenseModel) -> list[str]:
    """Every tensor of the Hugging Face model."""
    names = ["model.embed_tokens.weight", "model.norm.weight"] + ["lm_head.weight"] * (not model.tied)
    for layer in range(model.layers):
        for rule in _layer_rules(model, f"model.layers.{layer}").values():
            names += rule.sources
    return list(dict.fromkeys(names))
