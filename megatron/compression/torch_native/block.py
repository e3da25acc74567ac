"""The transformer block of torch-native layers, final norm included."""

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.compression.errors import InputError
from megatron.compression.torch_native.norm import TorchLayerNorm, TorchRMSNorm


def block_spec(
    transformer: TransformerConfig,
    layer_spec: ModuleSpec,
    vp_stage: int | None = None,
    expert_spec: ModuleSpec | None = None,
) -> TransformerBlockSubmodules:
    """Wrap a layer spec so that the final norm is ours as well.

    From a bare layer spec, megatron-core makes the final norm of whatever is installed: Transformer Engine's,
    apex's, or its torch one, which refuses ``--sequence-parallel``.

    Args:
        layer_spec: of every dense layer of this stage; changed in place for ``--attention-backend local``,
            which megatron-core's model builder honours for bare layer specs alone.
        expert_spec: of the others, by ``moe_layer_freq``; also changed so.
    Returns: A ``GPTModelConfig.transformer_layer_spec``.
    """
    specs = layer_spec, expert_spec
    if transformer.attention_backend is AttnBackend.local:
        for spec in specs:
            if spec is not None:
                spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    if expert_spec is None:
        layers = [layer_spec] * get_num_layers_to_build(transformer, vp_stage)
    else:
        pattern = _expert_layers(transformer)
        layers = [specs[pattern[number]] for number in _layers_here(transformer, vp_stage)]
    return TransformerBlockSubmodules(
        layer_specs=layers,
        layer_norm=TorchRMSNorm if transformer.normalization == "RMSNorm" else TorchLayerNorm,
    )


def _expert_layers(transformer: TransformerConfig) -> list[int]:
    """1 for each layer of experts, 0 for each dense one."""
    every = transformer.moe_layer_freq
    if isinstance(every, int):
        return [int(number % every == 0) for number in range(transformer.num_layers)]
    if len(every) != transformer.num_layers or not set(every) <= {0, 1}:
        raise InputError(
            f"--moe-layer-freq {every} must have a 0 or a 1 for each of --num-layers {transformer.num_layers}"
        )
    return every


def _layers_here(transformer: TransformerConfig, vp_stage: int | None) -> list[int]:
    """Numbers, from 0, of the layers of this pipeline stage."""
    layout = transformer.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(transformer, vp_stage)
    return list(range(first, first + get_num_layers_to_build(transformer, vp_stage)))
