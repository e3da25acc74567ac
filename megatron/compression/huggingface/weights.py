"""The weights of a built model from and to Hugging Face files, in one process on CPUs.

Megatron fuses projections. Rows of linear_qkv go by query group, so that a tensor-parallel rank
gets whole groups: [q of group 0, k 0, v 0, q of group 1, k 1, v 1, ...]. Rows of linear_fc1 are the
gate's, then the up projection's.
"""

from pathlib import Path

import torch

from megatron.compression.errors import InputError, first_line, require_extra
from megatron.compression.files import read_json
from megatron.compression.huggingface.models import DenseModel

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
"""Megatron's parameter of a layer -> the Hugging Face tensors that it is made of."""
_LAYER_OF_FAMILY = {
    "qwen2": {
        "self_attention.linear_qkv.bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
    },
    "qwen3": {
        f"self_attention.{name}_layernorm.weight": (f"self_attn.{name}_norm.weight",)
        for name in "qk"
    },
    "llama": {},
}
"""Parameters of a layer that one family alone has."""


def sources(model: DenseModel) -> dict[str, tuple[str, ...]]:
    """Return the Hugging Face tensors of each Megatron parameter of a model in one stage."""
    tensors: dict[str, tuple[str, ...]] = {
        "embedding.word_embeddings.weight": ("model.embed_tokens.weight",)
    }
    # The model is in one stage, so Megatron's layer numbers are Hugging Face's.
    rules = _LAYER | _LAYER_OF_FAMILY[model.family]
    for layer in range(model.layers):
        for parameter, suffixes in rules.items():
            names = tuple(f"model.layers.{layer}.{suffix}" for suffix in suffixes)
            tensors[f"decoder.layers.{layer}.{parameter}"] = names
    tensors["decoder.final_layernorm.weight"] = ("model.norm.weight",)
    if not model.tied:
        tensors["output_layer.weight"] = ("lm_head.weight",)
    return tensors


def merge(tensors: list[torch.Tensor], model: DenseModel) -> torch.Tensor:
    """Return the Megatron parameter of its Hugging Face tensors, weights ``[rows, ...]`` or biases.

    Args:
        tensors: three are q, k and v; two are gate and up; one is the parameter itself.
        model: whose query groups order the rows of q, k and v.
    """
    # [group, rows, ...] of each, side by side along the rows of a group.
    if len(tensors) == 3:
        by_group = [tensor.unflatten(0, (model.groups, -1)) for tensor in tensors]
        return torch.cat(by_group, dim=1).flatten(0, 1)
    return torch.cat(tensors)


def split(parameter: torch.Tensor, count: int, model: DenseModel) -> list[torch.Tensor]:
    """Return the Hugging Face tensors of a Megatron parameter: the inverse of ``merge``.

    Args:
        parameter: ``[rows, ...]``, without padding of the vocabulary.
        count: 3 for q, k and v; 2 for gate and up; 1.
        model: whose query groups order the rows of q, k and v.
    """
    if count == 3:
        # A group has several heads of queries and one each of keys and values.
        rows_of_q = model.heads // model.groups * model.head_dim
        sizes = [rows_of_q, model.head_dim, model.head_dim]
        by_group = parameter.unflatten(0, (model.groups, -1)).split(sizes, dim=1)
        return [tensor.flatten(0, 1) for tensor in by_group]
    if count == 2:
        return list(parameter.chunk(2))
    return [parameter]


def read(chunk: torch.nn.Module, model: DenseModel, folder: Path) -> None:
    """Copy a folder's tensors into a model of one process, each cast to its parameter's dtype.

    Args:
        chunk: the whole model, built by Megatron.
        model: its sizes.
        folder: holds safetensors files, with an index if there are several.

    Raises:
        InputError: a file is missing, or the folder has other tensors than the model.
    """
    require_extra("safetensors", "huggingface", f"reading {folder}")
    from safetensors import safe_open

    files = {name: safe_open(folder / name, "pt") for name in _weight_files(folder)}
    # Files are opened lazily: a tensor is read when it is asked for.
    file_of = {tensor: file for file in files.values() for tensor in file.keys()}
    if model.tied:
        file_of.pop("lm_head.weight", None)  # some folders store the embedding twice
    expected = sources(model)
    expected_tensors = {tensor for tensors in expected.values() for tensor in tensors}
    if different := sorted(expected_tensors.symmetric_difference(file_of)):
        raise InputError(
            f"{folder} and a {model.family} model differ in tensors: {', '.join(different[:5])}"
        )
    for name, parameter in chunk.named_parameters():
        tensors = [file_of[tensor].get_tensor(tensor) for tensor in expected[name]]
        parameter.data.zero_()  # rows that pad the vocabulary
        _rows_of_file(name, parameter, model).data.copy_(merge(tensors, model))


def _weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's safetensors files.

    Raises:
        InputError: one is missing, or the index is not readable.
    """
    index = folder / INDEX_FILE
    names = {SINGLE_FILE}
    if index.is_file():
        try:
            names = set(read_json(index)["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{index} cannot be read ({first_line(error)}); download it again"
            ) from None
    for name in sorted(names):
        if not (folder / name).is_file():
            raise InputError(f"{folder} has no {name}; save the model with safe_serialization=True")
    return sorted(names)


def _rows_of_file(name: str, parameter: torch.Tensor, model: DenseModel) -> torch.Tensor:
    """Return the rows of a parameter that files have: embeddings without the vocabulary's
    padding."""
    return parameter if "layers" in name else parameter[: model.vocabulary]


def write(chunk: torch.nn.Module, model: DenseModel, folder: Path, dtype: torch.dtype) -> None:
    """Write a model of one process as safetensors files of up to 5 GB with their index.

    Args:
        chunk: the whole model, built by Megatron.
        model: its sizes.
        folder: where the files go.
        dtype: of the tensors in the files.
    """
    require_extra("huggingface_hub", "huggingface", f"writing {folder}")
    from huggingface_hub import save_torch_state_dict

    state: dict[str, torch.Tensor] = {}
    for name, tensors in sources(model).items():
        rows = _rows_of_file(name, chunk.get_parameter(name).data, model)
        for tensor, values in zip(tensors, split(rows, len(tensors), model), strict=True):
            state[tensor] = (
                values.to(dtype).contiguous().clone()
            )  # safetensors refuses shared memory
    save_torch_state_dict(state, folder)
