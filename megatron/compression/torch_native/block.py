"""The transformer block of torch-native layers, final norm included."""

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.compression.torch_native.norm import TorchLayerNorm, TorchRMSNorm


def block_spec(
    transformer: TransformerConfig, layer_spec: ModuleSpec, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Wrap a layer spec so that the final norm is ours as well.

    From a bare layer spec, megatron-core makes the final norm of whatever is installed: Transformer Engine's,
    apex's, or its torch one, which refuses ``--sequence-parallel``.

    Args:
        layer_spec: of every layer of this stage; changed in place for ``--attention-backend local``, which
            megatron-core's model builder honours for bare layer specs alone.
    Returns: A ``GPTModelConfig.transformer_layer_spec``.
    """
    if transformer.attention_backend is AttnBackend.local:
        layer_spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec] * get_num_layers_to_build(transformer, vp_stage),
        layer_norm=TorchRMSNorm if transformer.normalization == "RMSNorm" else TorchLayerNorm,
    )
