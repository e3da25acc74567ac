"""A tiny tensor-parallel GPT with compression bound, inside a spawned rank."""

import torch

from megatron import host
from megatron.compression.codecs import Codec
from megatron.compression.config import CompressionConfig, TensorParallelCompression
from megatron.compression.runtime import CompressionRuntime

VOCABULARY = 96
SEQUENCE = 32
HIDDEN = 64
LAYERS = 2


def device_of(rank: int) -> torch.device:
    """The rank's CUDA device, which ``spawn`` has set (ranks may share one), or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def runtime_with(codec: Codec | None = None, **settings) -> CompressionRuntime:
    """A runtime that compresses every message with TACO, or with ``codec`` in its place."""
    settings = {"tp_compression": "taco", "taco_min_message_mb": 0.0, **settings}
    runtime = CompressionRuntime(CompressionConfig(tensor_parallel=TensorParallelCompression(**settings)))
    if codec is not None:
        runtime.tensor_parallel_codec = codec
    return runtime


def start_model_parallel(world_size: int) -> None:
    """Megatron's groups with all ranks in one tensor-parallel group, and its random state."""
    host.install()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def transformer_config(world_size: int, dtype: torch.dtype = torch.float32, **changes):
    """The tiny model's ``TransformerConfig``: weights do not depend on the tensor-parallel size."""
    from megatron.core.transformer import TransformerConfig

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
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    return TransformerConfig(**{**settings, **changes})


def build_tiny_gpt(
    rank: int,
    world_size: int,
    runtime: CompressionRuntime,
    dtype=torch.float32,
    tied: bool = False,
    **changes,
):
    """Build the model on this rank's device and bind ``runtime``'s compression to it.

    ``start_model_parallel`` must have run. ``tied``: the output layer's weights are the word embeddings.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    from megatron.compression.tensor_parallel.bind import bind_compression
    from megatron.compression.tensor_parallel.spec import gpt_layer_spec

    torch.manual_seed(7)
    config = GPTModelConfig(
        transformer=transformer_config(world_size, dtype, **changes),
        transformer_layer_spec=gpt_layer_spec,
        vocab_size=VOCABULARY,
        seq_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(config).build_model(groups, pre_process=True, post_process=True)
    bind_compression([model], runtime)
    return model.to(device_of(rank), dtype)


def batch(step: int, rank: int, size: int = 2) -> dict[str, torch.Tensor]:
    """The same random tokens on every rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (size, SEQUENCE + 1), generator=generator).to(device_of(rank))
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(size, -1)
    mask = torch.ones(SEQUENCE, SEQUENCE, device=tokens.device).triu(1).bool()[None, None]
    return {
        "input_ids": tokens[:, :-1],
        "position_ids": positions,
        "attention_mask": mask,
        "labels": tokens[:, 1:].contiguous(),
    }
