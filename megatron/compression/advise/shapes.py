"""The model and how it is laid out: what decides an iteration's work and its messages."""

import argparse
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from megatron.compression.errors import InputError, OneLineParser
from megatron.compression.flags import add_flags
from megatron.compression.huggingface.flags import add_qwen_arguments, as_arguments, expand
from megatron.compression.huggingface.models import EXPERT_MODELS, MODELS, megatron_flags


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT, dense or with experts in every layer that is not ``dense_layers``."""

    layers: int
    hidden: int
    ffn: int
    """Of the dense MLP."""
    heads: int
    groups: int
    """Heads of keys and values."""
    head_dim: int
    vocabulary: int
    tied: bool = False
    gated: bool = False
    """SwiGLU: fc1 has two halves."""
    rope: bool = False
    sequence: int = 2048
    """Tokens of a sample."""
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    """Layers with the dense MLP in a model with experts."""

    @property
    def qkv(self) -> int:
        """Weights of the query, key and value projection."""
        return self.hidden * (self.heads + 2 * self.groups) * self.head_dim

    @property
    def projection(self) -> int:
        """Weights of the attention's output projection."""
        return self.heads * self.head_dim * self.hidden

    @property
    def fc1(self) -> int:
        """Weights of the dense MLP's first matrix."""
        return self.hidden * self.ffn * (2 if self.gated else 1)

    @property
    def fc2(self) -> int:
        """Weights of the dense MLP's second matrix."""
        return self.ffn * self.hidden

    def expert_weights(self, of: int = 1) -> int:
        """Weights of ``of`` experts of one layer."""
        return of * self.expert_ffn * self.hidden * (3 if self.gated else 2)

    @property
    def shared_weights(self) -> int:
        """Weights of one layer's shared expert and router."""
        return self.shared_ffn * self.hidden * (3 if self.gated else 2) + self.experts * self.hidden

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def parameters(self) -> int:
        """All weights, norms and biases left out."""
        dense, sparse = self.layers - self.expert_layers, self.expert_layers
        mlp = dense * (self.fc1 + self.fc2)
        mlp += sparse * (self.expert_weights(self.experts) + self.shared_weights)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.qkv + self.projection) + mlp + embeddings


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is spread over GPUs and a batch over iterations."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Model chunks of a pipeline rank."""
    data: int = 1
    context: int = 1
    expert: int = 1
    """GPUs of a pipeline stage that share a layer's experts, each of which is whole."""
    micro_batch: int = 1
    global_batch: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_gradients: bool = False
    overlap_weights: bool = False
    bf16_gradients: bool = False
    """Data parallelism sums gradients in bf16 instead of fp32."""
    fused_gradients: bool = True
    """Weight gradients are added to main_grad by their GEMM."""
    recompute: Literal["none", "selective", "full"] = "none"
    transformer_engine: bool = False
    value_bytes: ClassVar[int] = 2
    """Of an activation, and of a weight as it is gathered: bf16 or fp16."""
    communicators: int = 1
    """Over which uncompressed messages travel: 1 in Megatron; benchmarks give both sides as many."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def micro_batches(self) -> int:
        """Of one iteration, on each data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.data)

    def check(self, model: Model) -> None:
        """Raises: InputError: Megatron would not run this; the message names the flag and the fix."""
        for name, size in vars(self).items():
            if type(size) is int and size < 1:
                raise InputError(f"a {name.replace('_', '-')} size of {size} is impossible; give 1 or more")
        tensor, stages, copies = self.tensor, self.pipeline * self.virtual, self.micro_batch * self.data
        for flag, value, what, parts in (
            ("--num-attention-heads", model.heads, "tensor-parallel ranks", tensor),
            ("--ffn-hidden-size", model.ffn, "tensor-parallel ranks", tensor),
            (
                "--num-query-groups",
                max(model.groups, tensor),
                "tensor-parallel ranks",
                min(model.groups, tensor),
            ),
            ("--num-layers", model.layers, "pipeline stages", stages),
            ("--global-batch-size", self.global_batch, "samples in the data-parallel micro-batches", copies),
            ("--seq-length", model.sequence, "context-parallel halves", 2 * self.context),
            ("--num-experts", model.experts, "expert-parallel ranks", self.expert),
            ("GPUs of a stage:", self.gpus // self.pipeline, "expert-parallel ranks", self.expert),
        ):
            if value % parts:
                raise InputError(f"{flag} {value} cannot be split over {parts} {what}; change one of the two")
        if self.virtual > 1 and (self.pipeline == 1 or self.micro_batches % self.pipeline):
            raise InputError("virtual stages need a pipeline, and micro-batches in multiples of its stages")
        if model.experts and self.tensor > 1 and not self.sequence_parallel:
            raise InputError("--num-experts with tensor parallelism needs --sequence-parallel; add it")


GPT3 = {"1.3b": (24, 2048, 16), "6.7b": (32, 4096, 32), "13b": (40, 5120, 40), "175b": (96, 12288, 96)}
"""Brown et al. 2020 (arXiv 2005.14165), table 2.1: layers, hidden size, heads (of 128 for 13B)."""
_MODELS = {**MODELS, **EXPERT_MODELS}
PRESETS = [f"gpt3-{name}" for name in GPT3]
PRESETS += [f"qwen{name}" if name[0].isdigit() else name for name in _MODELS]
_TRAINING = """--bf16 --seq-length 4096 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --transformer-impl transformer_engine"""


def preset(name: str) -> list[str]:
    """Megatron's flags of ``--model``: the model's, and a training's as most are run.

    Raises: InputError: no model has the name.
    """
    if name.lower() not in PRESETS:
        raise InputError(
            f"--model {name} is unknown; choose one of {', '.join(PRESETS)}, or give Megatron's flags"
        )
    family, _, size = name.lower().partition("-")
    if family == "gpt3":
        sizes = zip(("--num-layers", "--hidden-size", "--num-attention-heads"), GPT3[size], strict=True)
        model = [str(word) for pair in sizes for word in pair] + ["--vocab-size", "51200"]
        return [*_TRAINING.split(), *model, "--seq-length", "2048"]
    flags = as_arguments(megatron_flags(_MODELS[name.lower().removeprefix("qwen")]))
    return [*_TRAINING.split(), "--expert-tensor-parallel-size", "1", *flags]


_NOT_MODELLED = (
    *("multi_latent_attention", "experimental_attention_variant", "heterogeneous_layers_config_path"),
    *("mtp_num_layers", "use_megatron_fsdp", "use_torch_fsdp2", "pipeline_model_parallel_layout", "fp8"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "tp_comm_overlap", "fp4"),
    *("hybrid_override_pattern", "hybrid_layer_pattern", "window_size", "cpu_offloading_num_layers"),
    *("overlap_moe_expert_parallel_comm", "moe_latent_size", "yaml_cfg"),
)
"""Arguments of Megatron's that change what the cost model assumes."""
_SIZES = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "padded_vocab_size"),
    *("ffn_hidden_size", "kv_channels", "num_query_groups", "num_experts", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "micro_batch_size", "global_batch_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
    *("num_virtual_stages_per_pipeline_rank", "moe_layer_freq"),
)
"""Arguments that are 1 or more where they are given."""


@functools.cache
def _parser() -> argparse.ArgumentParser:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not installed here
        from megatron.training.arguments import add_megatron_arguments

    parser = OneLineParser(allow_abbrev=False)
    for add in (add_megatron_arguments, add_flags, add_qwen_arguments):
        add(parser)
    return parser


def parse_megatron(words: Sequence[str]) -> argparse.Namespace:
    """Megatron's flags and ours, as a launch script has them; not validated, which would need the GPUs.

    Raises: InputError: an unknown flag, a size below 1, or a flag whose effect is not modelled.
    """
    qwen = any(word.split("=")[0] == "--qwen-model" for word in words)
    args = _parser().parse_args(expand(list(words))[0] if qwen else list(words))
    for name in _NOT_MODELLED:
        if getattr(args, name, None):
            flag = next(one.option_strings[0] for one in _parser()._actions if one.dest == name)
            raise InputError(f"{flag} is not modelled; leave it out for a prediction without")
    for name in _SIZES:
        size = getattr(args, name)
        if isinstance(size, int) and size < 1:
            raise InputError(f"--{name.replace('_', '-')} {size} must be 1 or more")
    if args.num_experts and args.tensor_model_parallel_size > 1 and args.expert_tensor_parallel_size != 1:
        raise InputError("experts in parts are not modelled; give --expert-tensor-parallel-size 1")
    return args


def model_of(args: argparse.Namespace) -> Model:
    """The model that parsed flags describe.

    Raises: InputError: a size is missing, or does not go with another.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if not getattr(args, name):
            raise InputError(f"--{name.replace('_', '-')} is missing; it decides the time of an iteration")
    vocabulary = args.padded_vocab_size or args.vocab_size
    if not vocabulary:
        raise InputError("--vocab-size is missing; the tokenizer is not read here, so give the number")
    hidden, heads = args.hidden_size, args.num_attention_heads
    ffn = args.ffn_hidden_size or (int(4 * hidden * 2 / 3 / 64) * 64 if args.swiglu else 4 * hidden)
    frequency = args.moe_layer_freq
    every = isinstance(frequency, int)
    groups = (args.num_query_groups or heads) if args.group_query_attention else heads
    if not args.kv_channels and hidden % heads:
        raise InputError(
            f"--hidden-size {hidden} cannot be split over {heads} attention heads; give --kv-channels"
        )
    if heads % groups:
        raise InputError(f"--num-attention-heads {heads} cannot be split over --num-query-groups {groups}")
    if args.num_experts and args.moe_router_topk > args.num_experts:
        raise InputError(
            f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_experts}"
        )
    if not every and len(frequency) != args.num_layers:
        raise InputError(f"--moe-layer-freq has {len(frequency)} layers, --num-layers says {args.num_layers}")
    dense = args.num_layers - -(-args.num_layers // frequency) if every else frequency.count(0)
    return Model(
        layers=args.num_layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=groups,
        head_dim=args.kv_channels or hidden // heads,
        vocabulary=vocabulary,
        tied=not args.untie_embeddings_and_output_weights,
        gated=args.swiglu,
        rope=args.position_embedding_type == "rope",
        sequence=args.seq_length,
        experts=args.num_experts or 0,
        top_k=args.moe_router_topk if args.num_experts else 0,
        expert_ffn=(args.moe_ffn_hidden_size or ffn) if args.num_experts else 0,
        shared_ffn=args.moe_shared_expert_intermediate_size or 0,
        dense_layers=dense if args.num_experts else 0,
    )


def layout_of(args: argparse.Namespace, gpus: int) -> Layout:
    """The layout that parsed flags describe on so many GPUs.

    Raises: InputError: GPUs or layers do not come out even, or the model is one of fp32.
    """
    if not (args.bf16 or args.fp16):
        raise InputError("products of fp32 were not timed; give --bf16 or --fp16")
    tensor, stages, context = (
        getattr(args, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context")
    )
    ranks = tensor * stages * context
    if args.expert_model_parallel_size > 1 and not args.num_experts:
        raise InputError(
            f"--expert-model-parallel-size {args.expert_model_parallel_size} needs --num-experts"
        )
    if gpus % ranks:
        raise InputError(
            f"--gpus {gpus} must be a multiple of {ranks}, --tensor-model-parallel-size {tensor} x "
            f"--pipeline-model-parallel-size {stages} x --context-parallel-size {context}"
        )
    virtual = 1
    if chunk := args.num_layers_per_virtual_pipeline_stage:
        layers = args.num_layers // stages
        if layers % chunk:
            raise InputError(
                f"--num-layers-per-virtual-pipeline-stage {chunk} must divide the {layers} layers of a stage"
            )
        virtual = layers // chunk
    virtual = args.num_virtual_stages_per_pipeline_rank or max(virtual, 1)
    micro_batch, data = args.micro_batch_size or 1, gpus // ranks
    return Layout(
        tensor=tensor,
        pipeline=stages,
        virtual=virtual,
        data=data,
        context=context,
        expert=args.expert_model_parallel_size,
        micro_batch=micro_batch,
        global_batch=args.global_batch_size or micro_batch * data,
        sequence_parallel=args.sequence_parallel and tensor > 1,
        distributed_optimizer=args.use_distributed_optimizer,
        overlap_gradients=args.overlap_grad_reduce,
        overlap_weights=args.overlap_param_gather,
        bf16_gradients=args.grad_reduce_in_bf16,
        fused_gradients=args.gradient_accumulation_fusion,
        recompute=args.recompute_granularity or "none",
        transformer_engine=args.transformer_impl == "transformer_engine",
    )


def with_gpus(layout: Layout, gpus: int) -> Layout:
    """The same sizes with more or fewer data-parallel ranks; each keeps its micro-batches."""
    data = gpus // (layout.tensor * layout.pipeline * layout.context)
    return replace(layout, data=data, global_batch=layout.global_batch // layout.data * data)
