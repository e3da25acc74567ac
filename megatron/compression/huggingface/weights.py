"""The weights of a built model from and to Hugging Face files, in one process on CPUs.

Megatron fuses projections. Rows of linear_qkv go by query group, so that a tensor-parallel rank gets whole
groups: [q of group 0, k 0, v 0, q of group 1, k 1, v 1, ...]. Rows of linear_fc1 are the gate's, then the up
projection's.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import training
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.global_vars import destroy_global_vars
from megatron.training.models.gpt import GPTModelBuilder

from megatron.compression.errors import InputError, require_extra
from megatron.compression.huggingface.models import DenseModel, add_qwen_arguments, expand
from megatron.compression.setup import add_arguments, complete
from megatron.compression.startup import entrypoint

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Of the parser, without effect on weights.
_FILLERS = """--mock-data --tokenizer-type NullTokenizer --ckpt-format torch_dist --micro-batch-size 1
    --seq-length 16 --train-iters 1 --lr 0 --transformer-impl local --no-load-optim --no-load-rng
    --no-save-optim --no-save-rng"""
_PRECISION = {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"], torch.float32: []}

_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_OF_FAMILY = {
    "qwen2": {
        "self_attention.linear_qkv.bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
    },
    "qwen3": {
        f"self_attention.{name}_layernorm.weight": (f"self_attn.{name}_norm.weight",)
        for name in "qk"
    },
    "llama": {},
}


def sources(model: DenseModel) -> dict[str, tuple[str, ...]]:
    """The Hugging Face tensors of each Megatron parameter of a model in one stage."""
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    found = {"embedding.word_embeddings.weight": (embedding,)}
    for layer in range(model.layers):
        rules = _LAYER | _OF_FAMILY[model.family]
        prefix = f"model.layers.{layer}"
        found |= {
            f"decoder.layers.{layer}.{name}": tuple(f"{prefix}.{one}" for one in tensors)
            for name, tensors in rules.items()
        }
    found["decoder.final_layernorm.weight"] = ("model.norm.weight",)
    return found if model.tied else found | {"output_layer.weight": (output,)}


def merge(tensors: list[torch.Tensor], model: DenseModel) -> torch.Tensor:
    """A parameter of its Hugging Face tensors: three are q, k and v, two gate and up, weights or biases."""
    if len(tensors) == 3:
        return torch.cat(
            [tensor.unflatten(0, (model.groups, -1)) for tensor in tensors], dim=1
        ).flatten(0, 1)
    return torch.cat(tensors)


def split(parameter: torch.Tensor, parts: int, model: DenseModel) -> list[torch.Tensor]:
    """The inverse of ``merge``, padding of the vocabulary cut off."""
    if parts == 3:
        sizes = [model.heads // model.groups * model.head_dim, model.head_dim, model.head_dim]
        by_group = parameter.unflatten(0, (model.groups, -1)).split(sizes, dim=1)
        return [part.flatten(0, 1) for part in by_group]
    return list(parameter.chunk(2)) if parts == 2 else [parameter]


def read(chunk: torch.nn.Module, model: DenseModel, folder: Path) -> None:
    """Copy a folder's tensors into a model of one process, each cast to its parameter's dtype."""
    require_extra("safetensors", "huggingface", f"reading {folder}")
    from safetensors import safe_open

    index = folder / INDEX
    names = (
        set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {SINGLE}
    )
    if missing := [name for name in sorted(names) if not (folder / name).is_file()]:
        raise InputError(
            f"{folder} has no {missing[0]}; save the model with safe_serialization=True"
        )
    files = {name: safe_open(folder / name, "pt") for name in names}
    held = {tensor: file for file in files.values() for tensor in file.keys()}
    expected = sources(model)
    wanted = {one for tensors in expected.values() for one in tensors}
    if model.tied:
        held.pop("lm_head.weight", None)
    if other := sorted(wanted.symmetric_difference(held)):
        raise InputError(
            f"{folder} and a {model.family} model differ in tensors: {', '.join(other[:5])}"
        )
    for name, parameter in chunk.named_parameters():
        rows = parameter[: model.vocabulary] if "layers" not in name else parameter
        parameter.data.zero_()
        rows.data.copy_(merge([held[one].get_tensor(one) for one in expected[name]], model))


def write(chunk: torch.nn.Module, model: DenseModel, folder: Path, dtype: torch.dtype) -> None:
    """Write a model of one process as safetensors files of up to 5 GB with their index."""
    require_extra("huggingface_hub", "huggingface", f"writing {folder}")
    from huggingface_hub import save_torch_state_dict

    held: dict[str, torch.Tensor] = {}
    for name, tensors in sources(model).items():
        parameter = chunk.get_parameter(name).data
        whole = parameter if "layers" in name else parameter[: model.vocabulary]
        for tensor, part in zip(tensors, split(whole, len(tensors), model), strict=True):
            held[tensor] = part.to(dtype).contiguous().clone()  # safetensors refuses shared memory
    save_torch_state_dict(held, folder)


@contextlib.contextmanager
def built(
    name: str, dtype: torch.dtype, flags: list[str] | None = None
) -> Iterator[SimpleNamespace]:
    """Megatron's global state around a model, of ``--qwen-model``, with weights of no meaning: ``args``,
    ``chunks``, ``groups``. A process group that is there already is used and left; ``flags`` win."""
    for variable, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
        "RANK": "0",
    }.items():
        os.environ.setdefault(variable, value)
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.setdefault(variable, "1")
    words = ["--qwen-model", name, *_FILLERS.split(), *_PRECISION[dtype], *(flags or [])]
    previous, sys.argv = sys.argv, [sys.argv[0], *expand(words)[0]]
    owns_process_group = not torch.distributed.is_initialized()
    try:
        args = entrypoint.parse_arguments(lambda parser: add_qwen_arguments(add_arguments(parser)))
        training.initialize_megatron()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config = gpt_config_from_args(args)
        complete(config, args)
        config.transformer.perform_initialization = False
        chunks = GPTModelBuilder(config).build_distributed_models(
            groups, wrap_with_ddp=False, data_parallel_random_init=False
        )
        yield SimpleNamespace(args=args, chunks=unwrap_model(chunks), groups=groups)
    finally:
        sys.argv = previous
        destroy_global_vars()
        destroy_num_microbatches_calculator()
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()
        if owns_process_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
