"""Models of Hugging Face (Qwen2.5, Qwen3, Llama 3 base models), and a model as Megatron flags.

Numbers from each model's config.json (Qwen/Qwen2.5-*, Qwen/Qwen3-*, meta-llama/*). The norm's epsilon of
Qwen2.5 14B, 32B and 72B is 1e-5 in the base models; their instruct versions have 1e-6. Qwen3 1.7B and 4B tie
their embeddings, 8B and up do not.
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from megatron.compression.errors import InputError


class ModelError(InputError):
    """A model or a setting that cannot be honoured; the message names the flag or the key and the fix."""


@dataclass(frozen=True, kw_only=True)
class DenseModel:
    """What the Megatron flags and the Hugging Face config of a dense model have in common."""

    family: Literal["qwen2", "qwen3", "llama"]
    """Hugging Face's model_type. qwen2 (Qwen2 and Qwen2.5): bias on q, k and v. qwen3: norm of q and k."""
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

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelError(
                f"num_attention_heads {self.heads} must be a multiple of num_key_value_heads {self.groups}"
            )
        if self.rope_factor is not None and self.family != "llama":
            raise ModelError(f"--use-rope-scaling is Llama 3.1's: a {self.family} model has none; drop it")


@dataclass(frozen=True, kw_only=True)
class ExpertModel(DenseModel):
    """A mixture of experts in every layer, for training from scratch: its weights are not converted."""

    experts: int
    chosen: int
    """Experts of a token, whose weights sum to one."""
    expert_ffn: int
    """Width of one expert."""
    balance: float = 0.001
    """Factor of the auxiliary loss that balances their loads."""


def _model(layers, hidden, ffn, heads, groups=8, *, tied=False, **others) -> DenseModel:
    sizes = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "groups": groups}
    return DenseModel(**{**sizes, "head_dim": hidden // heads, "tied": tied, **others})


def _qwen25(*sizes, tied=False, positions=131072, **others) -> DenseModel:
    rows = 151936 if tied else 152064
    return _model(*sizes, family="qwen2", vocabulary=rows, tied=tied, positions=positions, **others)


def _qwen3(*sizes, **others) -> DenseModel:
    return _model(*sizes, family="qwen3", head_dim=128, vocabulary=151936, positions=40960, **others)


def _llama3(*sizes, rope_factor=None, **others) -> DenseModel:
    family = {"family": "llama", "vocabulary": 128256, "norm_epsilon": 1e-5, "rotary_base": 500_000}
    positions = 131072 if rope_factor else 8192
    return _model(*sizes, **family, rope_factor=rope_factor, positions=positions, **others)


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
    "llama-3-8b": _llama3(32, 4096, 14336, 32),
    "llama-3-70b": _llama3(80, 8192, 28672, 64),
    "llama-3.1-8b": _llama3(32, 4096, 14336, 32, rope_factor=8.0),
    "llama-3.1-70b": _llama3(80, 8192, 28672, 64, rope_factor=8.0),
    "llama-3.2-1b": _llama3(16, 2048, 8192, 32, tied=True, rope_factor=32.0),
    "llama-3.2-3b": _llama3(28, 3072, 8192, 24, tied=True, rope_factor=32.0),
}

EXPERT_MODELS: dict[str, ExpertModel] = {
    "3-30b-a3b": ExpertModel(
        **{**vars(_qwen3(48, 2048, 6144, 32, 4)), "experts": 128, "chosen": 8, "expert_ffn": 768}
    ),
}


def padded_vocabulary(model: DenseModel, tensor_parallel: int) -> int:
    """Rows of the embedding in Megatron: the next multiple of the tensor-parallel size."""
    return -(-model.vocabulary // tensor_parallel) * tensor_parallel


def megatron_flags(model: DenseModel, tensor_parallel: int = 1) -> dict[str, str | None]:
    """The model as Megatron flags, each with its value; None for a flag that takes none.

    Args:
        tensor_parallel: ``--tensor-model-parallel-size``; the vocabulary is padded to a multiple of it.
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
        # The tokenizer has fewer tokens than the embedding has rows: without the padded size, Megatron would
        # pad from the tokenizer's and the weights would not fit.
        "--vocab-size": model.vocabulary,
        "--padded-vocab-size": padded_vocabulary(model, tensor_parallel),
    }
    if own := {"qwen2": "--add-qkv-bias", "qwen3": "--qk-layernorm"}.get(model.family):
        flags[own] = None
    if model.rope_factor is not None:
        flags |= {"--use-rope-scaling": None, "--rope-scaling-factor": model.rope_factor}
    if isinstance(model, ExpertModel):
        flags |= {"--num-experts": model.experts, "--moe-router-topk": model.chosen}
        flags["--moe-ffn-hidden-size"] = model.expert_ffn
        flags |= {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": model.balance}
    if not model.tied:
        flags["--untie-embeddings-and-output-weights"] = None
    if model.family != "qwen3" and model.head_dim * model.heads == model.hidden:
        del flags["--kv-channels"]  # follows those two, should they be overridden
    return {flag: None if value is None else str(value) for flag, value in flags.items()}


# What a model must have been trained with to be one of these: argument -> (value, flag).
_REQUIRED = {
    "normalization": ("RMSNorm", "--normalization RMSNorm"),
    "swiglu": (True, "--swiglu"),
    "add_bias_linear": (False, "--disable-bias-linear"),
    "position_embedding_type": ("rope", "--position-embedding-type rope"),
    "rotary_percent": (1.0, "--rotary-percent 1.0"),
    "rotary_interleaved": (False, "no --rotary-interleaved"),
    "rotary_seq_len_interpolation_factor": (None, "no --rotary-seq-len-interpolation-factor"),
    "layernorm_zero_centered_gamma": (False, "no --apply-layernorm-1p"),
    "attention_output_gate": (False, "no --attention-output-gate"),
    "window_size": (None, "no --window-size"),
    "num_experts": (None, "no --num-experts"),
    "multi_latent_attention": (False, "no --multi-latent-attention"),
    "caat_net_sync_fraction": (1.0, "one residual stream (no --caat-net-sync-fraction below 1)"),
}


def model_from_args(args: Namespace) -> DenseModel:
    """The model that Megatron's arguments describe, those saved in a checkpoint for example.

    Raises: ModelError: it is none of these families, and which argument says so.
    """
    for name, (wanted, flag) in _REQUIRED.items():
        found = getattr(args, name, wanted)
        if found != wanted:
            raise ModelError(f"a Qwen or Llama model has {flag}, this one has {name} = {found}")
    if args.add_qkv_bias and args.qk_layernorm:
        raise ModelError("a model has --add-qkv-bias (Qwen2.5), --qk-layernorm (Qwen3) or neither (Llama)")
    return DenseModel(
        family="qwen2" if args.add_qkv_bias else "qwen3" if args.qk_layernorm else "llama",
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        # Padded from a tokenizer with fewer tokens than --vocab-size says, the padded size is the smaller.
        vocabulary=min(size for size in (args.vocab_size, args.padded_vocab_size) if size),
        tied=not args.untie_embeddings_and_output_weights,
        norm_epsilon=args.layernorm_epsilon,
        rotary_base=int(args.rotary_base),
        rope_factor=args.rope_scaling_factor if args.use_rope_scaling else None,
        positions=args.max_position_embeddings,
        init_std=args.init_method_std,
    )
