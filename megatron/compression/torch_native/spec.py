"""Which modules a GPT layer is made of: megatron-core's local ones with our tensor-parallel layers."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron.compression.tensor_parallel.layers import (
    CompressedColumnParallelLinear,
    CompressedRowParallelLinear,
)
from megatron.compression.torch_native.attention import SDPACoreAttention
from megatron.compression.torch_native.latent_attention import latent_attention_spec
from megatron.compression.torch_native.norm import TorchLayerNorm, TorchRMSNorm


class CompressedSpecProvider(LocalSpecProvider):
    """megatron-core's local backend: layers that compress, torch's own attention and norms."""

    def column_parallel_linear(self) -> type:
        """qkv and fc1."""
        return CompressedColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Attention projection and fc2."""
        return CompressedRowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """Norms that take sequence parallelism, also for queries and keys."""
        return TorchRMSNorm if rms_norm else TorchLayerNorm

    def core_attention(self) -> type:
        """torch's fused attention; ``--attention-backend local`` puts megatron-core's in its place."""
        return SDPACoreAttention


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


def gpt_layer_spec(transformer, backend: BackendSpecProvider, experts: bool = False) -> ModuleSpec:
    """A pre-norm layer of causal self-attention and an MLP, from a backend's modules.

    Args:
        backend: supplies the modules; one whose norm is not fused into the linear.
        experts: a mixture of experts in place of the dense MLP.
    """
    number = transformer.num_moe_experts if experts else None
    # The names under which Transformer Engine's fused layers keep the norms: checkpoints are shared.
    fused_norms = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not experts:
        fused_norms["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    rms_norm = transformer.normalization == "RMSNorm"
    layer_norm = backend.layer_norm(rms_norm=rms_norm, for_qk=False, has_residual=True)
    if transformer.qk_l2_norm:
        qk_norm = L2Norm
    elif transformer.qk_layernorm:
        qk_norm = backend.layer_norm(rms_norm=rms_norm, for_qk=True)
    else:
        qk_norm = IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    if transformer.multi_latent_attention:
        attention = latent_attention_spec(transformer, backend)
        del fused_norms["input_layernorm."]
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=layer_norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=layer_norm,
            mlp=get_mlp_module_spec_for_backend(backend=backend, num_experts=number),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=fused_norms,
        ),
    )
