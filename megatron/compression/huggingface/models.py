"""Hugging Face models as Megatron flags: Qwen2.5 and Qwen3 by name, these and Llama 3 by
config.json.

Numbers from each base model's config.json (Qwen/Qwen2.5-*, Qwen/Qwen3-*). The norm's epsilon of
Qwen2.5 14B, 32B and 72B is 1e-5 in the base models; their instruct versions have 1e-6. Qwen3 1.7B
and 4B tie their embeddings, 8B and up do not.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.compression.errors import InputError, first_line
from megatron.compression.files import read_json
from taco_kernels.common import ceil_div


@dataclass(frozen=True, kw_only=True)
class DenseModel:
    """The sizes that Megatron's flags and the Hugging Face config of a model have in common."""

    family: str
    """Hugging Face's model_type: qwen2 (bias on q, k and v), qwen3 (norm of q and k) or llama."""
    layers: int
    """Transformer layers."""
    hidden: int
    """Channels of the residual stream."""
    ffn: int
    """Channels inside an MLP."""
    heads: int
    """Attention heads, those of queries."""
    groups: int
    """Heads of keys and values."""
    head_dim: int
    """Channels of a head."""
    vocabulary: int
    """Rows of the embedding, which is more than the tokenizer has tokens."""
    tied: bool
    """Whether the output layer is the embedding."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in RMSNorm."""
    rotary_base: int = 1_000_000
    """The base of the rotary embedding's wavelengths."""
    rope_factor: float | None = None
    """How far Llama 3.1 and later stretch their low frequencies (``--rope-scaling-factor``)."""
    positions: int
    """The longest sequence."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    experts: int = 0
    """Experts of the mixture in every layer; 0: a dense model."""
    experts_per_token: int = 0
    """Experts that each token is sent to, whose weights sum to one."""
    expert_ffn: int = 0
    """Channels inside one expert."""


def _qwen25(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int,
    *,
    tied: bool = False,
    positions: int = 131072,
    norm_epsilon: float = 1e-6,
) -> DenseModel:
    """Return a Qwen2.5 base model."""
    return DenseModel(
        family="qwen2",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=groups,
        head_dim=hidden // heads,
        # The embedding of the sizes that do not tie it has 128 rows more.
        vocabulary=151936 if tied else 152064,
        tied=tied,
        positions=positions,
        norm_epsilon=norm_epsilon,
    )


def _qwen3(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    *,
    groups: int = 8,
    tied: bool = False,
    experts: int = 0,
    experts_per_token: int = 0,
    expert_ffn: int = 0,
) -> DenseModel:
    """Return a Qwen3 model."""
    return DenseModel(
        family="qwen3",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=groups,
        # Not hidden / heads: attention is wider than the residual stream in the small sizes.
        head_dim=128,
        vocabulary=151936,
        tied=tied,
        positions=40960,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_ffn=expert_ffn,
    )


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
    "3-30b-a3b": _qwen3(
        48, 2048, 6144, 32, groups=4, experts=128, experts_per_token=8, expert_ffn=768
    ),
}
"""Models by what ``--qwen-model`` calls them: layers, hidden, ffn, heads and groups.

The mixture of experts is for training from scratch: its weights are not converted."""


def megatron_flags(model: DenseModel, tensor_parallel: int = 1) -> dict[str, str | None]:
    """Return a model as Megatron flags, each with its value; None for a flag that takes none.

    Args:
        model: the model.
        tensor_parallel: ``--tensor-model-parallel-size``; the vocabulary is padded to a multiple of
            it.
    """
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
        # The tokenizer has fewer tokens than the embedding has rows: without the padded size,
        # Megatron would pad from the tokenizer's and the weights would not fit.
        "--vocab-size": model.vocabulary,
        "--padded-vocab-size": ceil_div(model.vocabulary, tensor_parallel) * tensor_parallel,
    }
    if model.family == "qwen2":
        flags["--add-qkv-bias"] = None
    if model.family == "qwen3":
        flags["--qk-layernorm"] = None
    if model.rope_factor is not None:
        flags |= {"--use-rope-scaling": None, "--rope-scaling-factor": model.rope_factor}
    if model.experts:
        flags |= {"--num-experts": model.experts, "--moe-router-topk": model.experts_per_token}
        flags["--moe-ffn-hidden-size"] = model.expert_ffn
        flags |= {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.001}
    if not model.tied:
        flags["--untie-embeddings-and-output-weights"] = None
    if model.family != "qwen3" and model.head_dim * model.heads == model.hidden:
        del flags["--kv-channels"]  # follows those two, should they be overridden
    return {flag: None if value is None else str(value) for flag, value in flags.items()}


def as_arguments(flags: dict[str, str | None]) -> list[str]:
    """Return flags with their values (None for one that takes none) as words of a command line."""
    return [word for pair in flags.items() for word in pair if word is not None]


def add_qwen_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--qwen-model`` to a parser and return it: an ``extra_args_provider`` of Megatron's."""
    parser.add_argument_group("qwen").add_argument(
        "--qwen-model",
        metavar="MODEL",
        help=f"A model: one of {', '.join(MODELS)} (qwen3-8b is 3-8b), or a folder with a Hugging "
        "Face config.json. Sets Megatron's flags for that model; a flag that you give yourself "
        "wins.",
    )
    return parser


def find_model(name: str) -> DenseModel:
    """Return the model of a ``--qwen-model`` value: a name of the table, or a Hugging Face folder.

    Raises:
        InputError: there is no such model, or its config.json is not covered.
    """
    if (known := name.removeprefix("qwen")) in MODELS:
        return MODELS[known]
    if Path(name).is_dir():
        return model_from_config(read_config(name))
    raise InputError(
        f"--qwen-model {name} is unknown; choose one of {', '.join(MODELS)}, or give a folder with "
        "a Hugging Face config.json"
    )


def expand(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Put the flags of ``--qwen-model`` before those that the user gives, which win.

    ``--padded-vocab-size`` is left to Megatron where the user sets ``--vocab-size`` or
    ``--make-vocab-size-divisible-by``.

    Args:
        arguments: the command line without the program's name.

    Returns:
        The whole command line, and the part of it that was added.

    Raises:
        InputError: no model is named, or an unknown one.
    """
    # Two flags are read here; Megatron parses the whole command line afterwards.
    reader = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    reader.add_argument("--qwen-model")
    reader.add_argument("--tensor-model-parallel-size", type=int, default=1)
    known, _ = reader.parse_known_args(arguments)
    if known.qwen_model is None:
        raise InputError(f"--qwen-model is missing; choose one of {', '.join(MODELS)}")
    flags = megatron_flags(find_model(known.qwen_model), known.tensor_model_parallel_size)
    # "--flag value" and "--flag=value".
    user_flags = {word.split("=", 1)[0] for word in arguments if word.startswith("--")}
    if user_flags & {"--vocab-size", "--make-vocab-size-divisible-by"}:
        flags.pop("--padded-vocab-size", None)
    added = as_arguments({flag: value for flag, value in flags.items() if flag not in user_flags})
    return added + arguments, added


LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3.1's scaling of low frequencies; megatron-core has these numbers as constants."""
_SIZE_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
    "vocabulary": "vocab_size",
}
"""Sizes of a model that every config.json has under one key."""
_ONLY_VALUES = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "mlp_bias": False,
    "quantization_config": None,
    "attention_bias": False,  # would put a bias on the output projection as well
}
"""Keys with one value that Megatron's flags can express."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face folder.

    Raises:
        InputError: there is none, or it is no JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise InputError(f"{path} is missing: is {folder} a folder with a Hugging Face model?")
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read ({first_line(error)}); download it again"
        ) from None
    if not isinstance(config, dict):
        raise InputError(f"{path} holds no JSON object; download it again")
    return config


def model_from_config(config: dict[str, Any]) -> DenseModel:
    """Return the model that a config.json describes, of transformers 4 or 5.

    Raises:
        InputError: another model type, a setting that the model here does not have, or a value that
            makes no sense; names the key.
    """
    family = config.get("model_type")
    if family not in ("qwen2", "qwen3", "llama"):
        raise InputError(
            f"config.json: model_type {family!r} is not covered; use qwen2, qwen3 or llama"
        )
    for key, only_value in _ONLY_VALUES.items():
        if config.get(key, only_value) != only_value:
            raise InputError(
                f"config.json: {key} = {config[key]!r} is not covered, only {only_value!r}"
            )
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or set(map(str, layer_types)) - {"full_attention"}:
        raise InputError("config.json: layer_types other than full_attention are not covered")
    sizes = {field: _whole_number(config, key) for field, key in _SIZE_KEYS.items()}
    # Without the key every head has keys and values of its own.
    groups = _whole_number(config, "num_key_value_heads", default=sizes["heads"])
    if sizes["heads"] % groups:
        raise InputError(
            f"config.json: num_attention_heads {sizes['heads']} must be a multiple of "
            f"num_key_value_heads {groups}"
        )
    rope_base, rope_factor = _rope_settings(config, family)
    return DenseModel(
        family=family,
        **sizes,
        groups=groups,
        head_dim=_head_dim(config, sizes["hidden"], sizes["heads"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_epsilon=_number(config, "rms_norm_eps"),
        rotary_base=rope_base,
        rope_factor=rope_factor,
        init_std=_number(config, "initializer_range", default=0.02),
    )


def _head_dim(config: dict[str, Any], hidden: int, heads: int) -> int:
    """Return the channels of an attention head: the config's, or the hidden size over all heads."""
    if config.get("head_dim"):
        return _whole_number(config, "head_dim")
    if hidden % heads:
        raise InputError(
            f"config.json: hidden_size {hidden} must be a multiple of num_attention_heads {heads}, "
            "since there is no head_dim"
        )
    return hidden // heads


def _rope_settings(config: dict[str, Any], family: str) -> tuple[int, float | None]:
    """Return ``--rotary-base`` and Llama 3.1's factor, None where nothing is scaled.

    transformers 5 keeps both in ``rope_parameters``; 4 has ``rope_theta`` and ``rope_scaling``.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise InputError(f"config.json: rope_scaling must be an object, not {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    is_llama3 = family == "llama" and rope_type == "llama3" and LLAMA3_ROPE.items() <= rope.items()
    if rope_type != "default" and not is_llama3:
        raise InputError(
            f"config.json: rope_type {rope_type!r} is not covered for {family}, only 'default' and "
            "Llama 3.1's"
        )
    # Qwen names its base; Llama's configs of transformers 4 may leave it at 10,000.
    theta_owner = rope if "rope_theta" in rope else config
    base = _number(theta_owner, "rope_theta", default=10_000.0 if family == "llama" else None)
    if base != int(base):
        raise InputError(
            f"config.json: rope_theta must be a whole number (--rotary-base), not {base}"
        )
    return int(base), _number(rope, "factor") if is_llama3 else None


def _whole_number(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a size of a config.json: a whole number from 1 to 2^31.

    Raises:
        InputError: it is missing, or something else.
    """
    value = config.get(key)
    if value is None:
        value = default
    # To Python True is an int.
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InputError(f"config.json: {key} must be a whole number from 1 on, not {value!r}")
    return value


def _number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive finite number of a config.json.

    Raises:
        InputError: it is missing, or something else.
    """
    value = config.get(key)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise InputError(f"config.json: {key} must be a number above 0, not {value!r}")
    return float(value)
