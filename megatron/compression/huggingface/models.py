"""Models of Hugging Face as Megatron flags: Qwen2.5 and Qwen3 by name, these and Llama 3 by config.json.

Numbers from each base model's config.json (Qwen/Qwen2.5-*, Qwen/Qwen3-*). The norm's epsilon of
Qwen2.5 14B, 32B and 72B is 1e-5 in the base models; their instruct versions have 1e-6. Qwen3 1.7B and 4B tie
their embeddings, 8B and up do not.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.compression.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DenseModel:
    """What the Megatron flags and the Hugging Face config of a model have in common."""

    family: str
    """Hugging Face's model_type: qwen2 (bias on q, k and v), qwen3 (norm of q and k) or llama."""
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    """Heads of keys and values."""
    head_dim: int
    vocabulary: int
    """Rows of the embedding, which is more than the tokenizer has tokens."""
    tied: bool
    """Whether the output layer is the embedding."""
    norm_epsilon: float = 1e-6
    rotary_base: int = 1_000_000
    rope_factor: float | None = None
    """How far Llama 3.1 and later stretch their low frequencies (``--rope-scaling-factor``)."""
    positions: int
    """Longest sequence."""
    init_std: float = 0.02
    experts: int = 0
    """Of a mixture in every layer; 0: a dense model."""
    chosen: int = 0
    """Experts of a token, whose weights sum to one."""
    expert_ffn: int = 0
    """Width of one expert."""


def _qwen25(
    layers, hidden, ffn, heads, groups, tied=False, positions=131072, **others
) -> DenseModel:
    sizes = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "groups": groups}
    sizes |= {
        "head_dim": hidden // heads,
        "vocabulary": 151936 if tied else 152064,
        "positions": positions,
    }
    return DenseModel(family="qwen2", tied=tied, **sizes, **others)


def _qwen3(layers, hidden, ffn, heads, groups=8, tied=False, **others) -> DenseModel:
    sizes = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "groups": groups}
    sizes |= {"head_dim": 128, "vocabulary": 151936, "positions": 40960}
    return DenseModel(family="qwen3", tied=tied, **sizes, **others)


MODELS: dict[str, DenseModel] = {
    "2.5-0.5b": _qwen25(24, 896, 4864, 14, 2, tied=True, positions=32768),
    "2.5-1.5b": _qwen25(28, 1536, 8960, 12, 2, tied=True),
    "2.5-3b": _qwen25(36, 2048, 11008, 16, 2, tied=True, positions=32768),
    "2.5-7b": _qwen25(28, 3584, 18944, 28, 4),
    "2.5-14b": _qwen25(48, 5120, 13824, 40, 8, norm_epsilon=1e-5),
    "2.5-32b": _qwen25(64, 5120, 27648, 40, 8, norm_epsilon=1e-5),
    "2.5-72b": _qwen25(80, 8192, 29568, 64, 8, norm_epsilon=1e-5),
    "3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "3-8b": _qwen3(36, 4096, 12288, 32),
    "3-14b": _qwen3(40, 5120, 17408, 40),
    "3-32b": _qwen3(64, 5120, 25600, 64),
    "3-30b-a3b": _qwen3(48, 2048, 6144, 32, 4, experts=128, chosen=8, expert_ffn=768),
}
"""The last is for training from scratch: its weights are not converted."""


def megatron_flags(model: DenseModel, tensor_parallel: int = 1) -> dict[str, str | None]:
    """The model as Megatron flags, each with its value; None for a flag that takes none. The vocabulary is
    padded to a multiple of ``--tensor-model-parallel-size``."""
    flags = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--group-query-attention": None,
        "--num-query-groups": model.groups,
        "--kv-channels": model.head_dim,
        "--max-position-embeddings": model.positions,
        "--position-embedding-type": "rope",
        "--rotary-base": model.rotary_base,
        "--normalization": "RMSNorm",
        "--norm-epsilon": model.norm_epsilon,
        "--swiglu": None,
        "--disable-bias-linear": None,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--init-method-std": model.init_std,
        # The tokenizer has fewer tokens than the embedding has rows: without the padded size, Megatron would
        # pad from the tokenizer's and the weights would not fit.
        "--vocab-size": model.vocabulary,
        "--padded-vocab-size": -(-model.vocabulary // tensor_parallel) * tensor_parallel,
    }
    if own := {"qwen2": "--add-qkv-bias", "qwen3": "--qk-layernorm"}.get(model.family):
        flags[own] = None
    if model.rope_factor is not None:
        flags |= {"--use-rope-scaling": None, "--rope-scaling-factor": model.rope_factor}
    if model.experts:
        flags |= {"--num-experts": model.experts, "--moe-router-topk": model.chosen}
        flags["--moe-ffn-hidden-size"] = model.expert_ffn
        flags |= {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.001}
    if not model.tied:
        flags["--untie-embeddings-and-output-weights"] = None
    if model.family != "qwen3" and model.head_dim * model.heads == model.hidden:
        del flags["--kv-channels"]  # follows those two, should they be overridden
    return {flag: None if value is None else str(value) for flag, value in flags.items()}


def as_arguments(flags: dict[str, str | None]) -> list[str]:
    """Flags with their values, None for one that takes none, as a command line."""
    return [word for pair in flags.items() for word in pair if word is not None]


def add_qwen_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--qwen-model`` (an ``extra_args_provider``)."""
    parser.add_argument_group("qwen").add_argument(
        "--qwen-model",
        metavar="MODEL",
        help=f"One of {', '.join(MODELS)} (a qwen in front may be), or a folder with a Hugging Face "
        "config.json. Expands to Megatron's flags, each of which can be overridden by giving it.",
    )
    return parser


def find_model(name: str) -> DenseModel:
    """The model of a ``--qwen-model`` value: a name of the table, or a Hugging Face folder."""
    if (known := name.removeprefix("qwen")) in MODELS:
        return MODELS[known]
    if Path(name).is_dir():
        return model_from_config(read_config(name))
    raise InputError(
        f"--qwen-model {name} is unknown; choose one of {', '.join(MODELS)}, or give a folder with a "
        "Hugging Face config.json"
    )


def expand(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Put the flags of ``--qwen-model`` before the user's own, but for those that the user gives, and for
    ``--padded-vocab-size`` with ``--vocab-size`` or ``--make-vocab-size-divisible-by``.

    Returns: The whole command line without the program's name, and the part that was added.
    Raises: InputError: no model, or an unknown one.
    """
    reader = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    reader.add_argument("--qwen-model")
    reader.add_argument("--tensor-model-parallel-size", type=int, default=1)
    known, _ = reader.parse_known_args(arguments)
    if known.qwen_model is None:
        raise InputError(f"--qwen-model is missing; choose one of {', '.join(MODELS)}")
    flags = megatron_flags(find_model(known.qwen_model), known.tensor_model_parallel_size)
    given = {argument.split("=", 1)[0] for argument in arguments if argument.startswith("--")}
    if given.intersection(("--vocab-size", "--make-vocab-size-divisible-by")):
        flags.pop("--padded-vocab-size", None)
    added = as_arguments({flag: value for flag, value in flags.items() if flag not in given})
    return added + arguments, added


LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of Llama 3.1's scaling of low frequencies; megatron-core has them as constants."""
_KEYS = {
    **{"layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size"},
    **{"heads": "num_attention_heads", "positions": "max_position_embeddings"},
    **{"norm_epsilon": "rms_norm_eps", "vocabulary": "vocab_size"},
}
"""Fields of a model that every config.json has under one key."""
_FIXED = {
    **{
        "hidden_act": "silu",
        "use_sliding_window": False,
        "mlp_bias": False,
        "quantization_config": None,
    },
    "attention_bias": False,  # would put a bias on the output projection as well
}
"""Keys with one value that Megatron's flags can express."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder. Raises: InputError: there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise InputError(f"{path} is missing: is {folder} a folder with a Hugging Face model?")
    return json.loads(path.read_text())


def model_from_config(config: dict[str, Any]) -> DenseModel:
    """Read the keys of a config.json, of transformers 4 or 5.

    Raises: InputError: another model type, or a setting that the model here does not have; names the key.
    """
    family = config.get("model_type")
    if family not in ("qwen2", "qwen3", "llama"):
        raise InputError(
            f"config.json: model_type {family!r} is not covered; use qwen2, qwen3 or llama"
        )
    for key, wanted in _FIXED.items():
        if config.get(key, wanted) != wanted:
            raise InputError(
                f"config.json: {key} = {config[key]!r} is not covered, only {wanted!r}"
            )
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise InputError("config.json: layer_types other than full_attention are not covered")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaled = family == "llama" and kind == "llama3" and LLAMA3_ROPE.items() <= rope.items()
    if kind != "default" and not scaled:
        raise InputError(
            f"config.json: rope_type {kind!r} is not covered for {family}, only 'default' and Llama 3.1's"
        )
    base = rope.get("rope_theta", config.get("rope_theta", 10000 if family == "llama" else None))
    if base is None or base != int(base):
        raise InputError(
            f"config.json: rope_theta must be a whole number (--rotary-base), not {base}"
        )
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise InputError(
            f"num_attention_heads {heads} must be a multiple of num_key_value_heads {groups}"
        )
    return DenseModel(
        family=family,
        **{name: config[key] for name, key in _KEYS.items()},
        groups=groups,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        tied=config.get("tie_word_embeddings", False),
        rotary_base=int(base),
        rope_factor=float(rope["factor"]) if scaled else None,
        init_std=config.get("initializer_range", 0.02),
    )
