"""A tiny tensor-parallel GPT with compression hooked into it, inside a spawned rank."""

from dataclasses import dataclass, field, replace

import torch

from megatron.compression.caat_net.config import CaatNetConfig
from megatron.compression.codecs import Codec
from megatron.compression.communication import Ledger, Policy, Run, Transports
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.tensor_parallel.config import TensorParallelConfig

VOCABULARY = 96
SEQUENCE = 32
HIDDEN = 64
LAYERS = 2
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
"""Recomputation of every layer."""
QWEN = dict(
    normalization="RMSNorm",
    qk_layernorm=True,
    add_bias_linear=False,
    num_query_groups=2,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
)
"""Settings of a ``TransformerConfig`` that make the tiny model a Qwen3."""


def device_of(rank: int) -> torch.device:
    """The rank's CUDA device, which ``spawn`` has set (ranks may share one), or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass
class TinyRun(Run):
    """The run of the tiny model, and the settings that it is hooked with."""

    config: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    caat_net: CaatNetConfig = field(default_factory=CaatNetConfig)
    step: int = 0
    """The zero-based iteration that the policy is told."""


def run_with(
    codec: str | Codec = "taco",
    *,
    start_iteration: int = 0,
    error_bound: float | None = None,
    validate_uncompressed: bool = False,
    transport: str = "auto",
    sync_fraction: float = 1.0,
    **settings,
) -> TinyRun:
    """Return a run that compresses every tensor-parallel message.

    Args:
        codec: a spec, none for uncompressed; or a codec that takes the place of TACO.
        start_iteration, error_bound, validate_uncompressed, transport: as in ``CompressionConfig``.
        sync_fraction: of ``CaatNetConfig``.
        settings: of ``TensorParallelConfig``; unless given, no message is too small.
    """
    spec = codec if isinstance(codec, str) else "taco"
    if spec != "none":
        settings = {"min_mb": 0.0, **settings}
    config = TensorParallelConfig(compression=spec, **settings)
    rules = config.rules(start_iteration)
    if isinstance(codec, Codec):
        rules = {traffic: replace(rule, codec=codec) for traffic, rule in rules.items()}
    ledger = Ledger()
    policy = Policy(rules, ledger, lambda: run.step, validate_uncompressed, ErrorMeter(error_bound))
    caat_net = CaatNetConfig(sync_fraction=sync_fraction)
    run = TinyRun(
        policy, ledger, transports=Transports(transport), config=config, caat_net=caat_net
    )
    return run


def start_model_parallel(world_size: int) -> None:
    """Make Megatron's groups, with all ranks in one tensor-parallel group, and its random state."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def transformer_config(world_size: int, dtype: torch.dtype = torch.float32, **changes):
    """Return the tiny model's ``TransformerConfig``.

    Weights do not depend on the tensor-parallel size: they are initialised on the CPU.

    Args:
        world_size: tensor-parallel size.
        dtype: of the parameters.
        changes: other values of its fields.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    settings = dict(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        tensor_model_parallel_size=world_size,
        transformer_impl="local",
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        persist_layer_norm=False,
    )
    fused = (
        "gradient_accumulation",
        "masked_softmax",
        "bias_dropout",
        "bias_activation",
        "apply_rope",
    )
    settings |= {f"{name}_fusion": False for name in fused}
    kind = MLATransformerConfig if changes.get("multi_latent_attention") else TransformerConfig
    return kind(**{**settings, **changes})


def build_gpt(
    transformer,
    first=True,
    last=True,
    vp_stage=None,
    tied=False,
    positions="learned_absolute",
    layers=None,
):
    """Build a model, or a stage of one.

    Args:
        transformer: its ``TransformerConfig``.
        first: whether it has the embeddings.
        last: whether it has the output layer.
        vp_stage: number of this chunk under an interleaved schedule.
        tied: the output layer's weights are the word embeddings.
        positions: as ``--position-embedding-type``.
        layers: a layer spec; None for the one of the run's entrypoint.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    from megatron.compression.frontends.megatron_lm.enable import gpt_layer_spec

    config = GPTModelConfig(
        transformer=transformer,
        transformer_layer_spec=layers or gpt_layer_spec,
        vocab_size=VOCABULARY,
        seq_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=positions,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModelBuilder(config).build_model(groups, first, last, vp_stage)


def build_tiny_gpt(
    rank: int,
    world_size: int,
    run: TinyRun,
    dtype=torch.float32,
    tied: bool = False,
    attach: bool = True,
    positions: str = "learned_absolute",
    **changes,
):
    """Build the model on this rank's device and hook ``run``'s compression into it.

    ``start_model_parallel`` must have run.

    Args:
        rank: this rank.
        world_size: tensor-parallel size.
        run: the settings of compression.
        dtype: of the parameters.
        tied: the output layer's weights are the word embeddings.
        attach: False leaves the model as Megatron makes it.
        positions: as ``--position-embedding-type``.
        changes: other values of fields of its ``TransformerConfig``.
    """
    from megatron.compression.caat_net import hooks as caat_net
    from megatron.compression.tensor_parallel import hooks

    torch.manual_seed(7)
    model = build_gpt(
        transformer_config(world_size, dtype, **changes), tied=tied, positions=positions
    )
    if attach:
        hooks.TensorParallel(run.config, run).attach([model])
    if run.caat_net.enabled:
        caat_net.attach(model, run.caat_net, run.ledger)
    return model.to(device_of(rank), dtype)


def replicated(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that each tensor-parallel rank holds in whole, by name."""
    parameters = model.named_parameters()
    return {name: p for name, p in parameters if not getattr(p, "tensor_model_parallel", False)}


def batch(step: int, rank: int, size: int = 2) -> dict[str, torch.Tensor]:
    """Return the same random tokens on every rank.

    Args:
        step: seed of the tokens.
        rank: whose device holds them.
        size: sequences in the batch.
    """
    generator = torch.Generator().manual_seed(step)
    return inputs_of(torch.randint(0, VOCABULARY, (size, SEQUENCE + 1), generator=generator), rank)


def inputs_of(tokens: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    """Return a GPT's inputs from tokens ``[b, s + 1]``: each token is its predecessor's label."""
    tokens = tokens.to(device_of(rank))
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(len(tokens), -1)
    mask = torch.ones(SEQUENCE, SEQUENCE, device=tokens.device).triu(1).bool()[None, None]
    return {
        "input_ids": tokens[:, :-1],
        "position_ids": positions,
        "attention_mask": mask,
        "labels": tokens[:, 1:].contiguous(),
    }
