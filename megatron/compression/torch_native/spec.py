"""Which modules a GPT's layers are made of: megatron-core's local ones with torch's attention and norms.

Linear layers but fc2 are megatron-core's: ``tensor_parallel.hooks`` makes those that communicate compress.
"""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.compression.tensor_parallel.layers import CompressedRowParallelLinear
from megatron.compression.torch_native.attention import SDPACoreAttention
from megatron.compression.torch_native.latent_attention import LatentSelfAttention
from megatron.compression.torch_native.norm import TorchLayerNorm, TorchRMSNorm


def is_covered_local(transformer) -> bool:
    """Whether our spec covers this ``TransformerConfig``."""
    return transformer.transformer_impl == "local" and is_covered(transformer)


def is_covered(transformer) -> bool:
    """Whether this ``TransformerConfig`` is of a GPT, dense or of experts, whose traffic our hooks know."""
    local = transformer.transformer_impl == "local"
    return (
        (local or not transformer.multi_latent_attention)
        and transformer.experimental_attention_variant is None
        and not getattr(transformer, "heterogeneous_block_specs", False)
        and not transformer.use_kitchen
    )


def block_spec(transformer: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this stage and the final norm, for ``GPTModelConfig.transformer_layer_spec``."""
    block = get_gpt_decoder_block_spec(
        transformer, False, transformer.normalization, transformer.qk_l2_norm, vp_stage
    )
    norm = TorchRMSNorm if transformer.normalization == "RMSNorm" else TorchLayerNorm
    block.layer_norm = norm
    for layer in {id(layer): layer.submodules for layer in block.layer_specs}.values():
        attention = layer.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = norm
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, name, IdentityOp) not in (IdentityOp, L2Norm):
                setattr(attention, name, norm)
        if transformer.attention_backend is not AttnBackend.local:
            attention.core_attention = SDPACoreAttention
        # The names under which Transformer Engine's fused layers keep the norms: checkpoints are shared.
        names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        if transformer.multi_latent_attention:
            layer.self_attention.module, names = LatentSelfAttention, {}
        mlp = layer.mlp.keywords["submodules"]
        if layer.mlp.func is not MoELayer:
            names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        elif mlp.shared_experts is not None:
            mlp = mlp.shared_experts.keywords["submodules"]
        if hasattr(mlp, "linear_fc2"):  # with one rank, too: a bias that it returns can be recomputed
            mlp.linear_fc2 = CompressedRowParallelLinear
        layer.sharded_state_dict_keys_map = names
    return block
