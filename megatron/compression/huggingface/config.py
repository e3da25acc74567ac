"""A model from and to Hugging Face's config.json."""

import json
from pathlib import Path
from typing import Any

from megatron.compression.huggingface.models import DenseModel, ModelError

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_KEYS = {
    **{"layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size"},
    **{"heads": "num_attention_heads", "positions": "max_position_embeddings"},
    **{"norm_epsilon": "rms_norm_eps", "vocabulary": "vocab_size"},
}
"""Fields of a model that every config.json has under one key."""

# Keys with one value that Megatron's flags can express.
_FIXED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,  # would put a bias on the output projection as well
    "mlp_bias": False,
    "quantization_config": None,
}


def model_from_config(config: dict[str, Any]) -> DenseModel:
    """Read the keys of a config.json, of transformers 4 or 5.

    Raises: ModelError: another model type, or a setting that the model here does not have; names the key.
    """
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise ModelError(
            f"config.json: model_type {family!r} is not covered; dense models are {', '.join(ARCHITECTURES)}"
        )
    for key, wanted in _FIXED.items():
        if config.get(key, wanted) != wanted:
            raise ModelError(f"config.json: {key} = {config[key]!r} is not covered, only {wanted!r}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ModelError("config.json: layer_types other than full_attention are not covered")
    rotary_base = rope.get("rope_theta", config.get("rope_theta", 10000 if family == "llama" else None))
    if rotary_base is None or rotary_base != int(rotary_base):
        raise ModelError(f"config.json: rope_theta must be a whole number (--rotary-base), not {rotary_base}")
    heads = config["num_attention_heads"]
    return DenseModel(
        family=family,
        **{name: config[key] for name, key in _KEYS.items()},
        groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        tied=config.get("tie_word_embeddings", False),
        rotary_base=int(rotary_base),
        rope_factor=_rope_factor(rope, family),
        init_std=config.get("initializer_range", 0.02),
    )


def _rope_factor(rope: dict[str, Any], family: str) -> float | None:
    """Llama 3.1's scaling of low frequencies, whose other numbers megatron-core has as constants."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if family != "llama" or kind != "llama3" or any(rope.get(key) != LLAMA3_ROPE[key] for key in LLAMA3_ROPE):
        raise ModelError(
            f"config.json: rope_type {kind!r} is not covered for {family}, only 'default' and Llama 3.1's"
        )
    return float(rope["factor"])


def config_from_model(model: DenseModel, dtype: str) -> dict[str, Any]:
    """The keys of a config.json that transformers 4 and 5 read.

    Args:
        dtype: of the weights, as torch names it: bfloat16, float32, ...
    """
    config = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **{key: getattr(model, name) for name, key in _KEYS.items()},
        "num_key_value_heads": model.groups,
        "rope_theta": model.rotary_base,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "torch_dtype": dtype,
    }
    if model.family != "llama":
        config["use_sliding_window"] = False
    if model.family == "qwen3":
        config |= {"head_dim": model.head_dim, "attention_bias": False}
    elif model.family == "llama":
        config |= {"head_dim": model.head_dim, "attention_bias": False, "mlp_bias": False}
        if model.rope_factor is not None:
            scaling = {"rope_type": "llama3", "factor": model.rope_factor, **LLAMA3_ROPE}
            config["rope_scaling"] = scaling
    elif model.head_dim * model.heads != model.hidden:
        raise ModelError(
            f"Hugging Face's {model.family} has heads of hidden_size / num_attention_heads; this model has "
            f"--kv-channels {model.head_dim}"
        )
    return config


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder.

    Raises: ModelError: there is none.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing: is {folder} a folder with a Hugging Face model?")
    return json.loads(path.read_text())
