"""Which modules a GPT's torch-native layers are made of, and the arguments whose best value depends
on them.

megatron-core's local layers with torch's attention, norms and RoPE. Linear layers but fc2 are
megatron-core's: ``tensor_parallel.hooks`` makes those that communicate compress.

RoPE is compiled, for the slot that Transformer Engine fills in megatron-core:

    [a, b] -> [a cos - b sin, b cos + a sin]      a, b: the halves of a head

The backward is the rotation by the opposite angle. Angles, sine and cosine are fp32 and nothing is
rounded on the way, as in Transformer Engine's kernel; megatron-core's unfused path rounds four
times.
"""

from argparse import Namespace
from collections.abc import Sequence

import torch
from megatron.core.jit import jit_fuser
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.compression.communication.collectives import WithBackward
from megatron.compression.patches import gaps
from megatron.compression.tensor_parallel.layers import CompressedRowParallelLinear
from megatron.compression.tensor_parallel.weight_gradient import fill_weight_gradient_slot
from megatron.compression.torch_native.attention import LatentSelfAttention, SDPACoreAttention
from megatron.compression.torch_native.norm import TorchLayerNorm, TorchRMSNorm


def is_covered(transformer) -> bool:
    """Return whether this ``TransformerConfig`` is of a GPT, dense or of experts, whose traffic our
    hooks know."""
    return (
        transformer.experimental_attention_variant is None
        and not getattr(transformer, "heterogeneous_block_specs", False)
        and not transformer.use_kitchen
    )


def block_spec(
    transformer: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layers of this stage and the final norm, for
    ``GPTModelConfig.transformer_layer_spec``."""
    # megatron-core's own choice of layers, without Transformer Engine.
    block = get_gpt_decoder_block_spec(
        transformer, False, transformer.normalization, transformer.qk_l2_norm, vp_stage
    )
    if transformer.cuda_graph_impl == "local":
        gaps.keep_buffers_of_layer_graphs()
    norm = TorchRMSNorm if transformer.normalization == "RMSNorm" else TorchLayerNorm
    block.layer_norm = norm
    for layer in {id(layer): layer.submodules for layer in block.layer_specs}.values():
        attention = layer.self_attention.submodules
        # Both norms are separate modules here, fused ones in Transformer Engine.
        layer.input_layernorm = layer.pre_mlp_layernorm = norm
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, name, IdentityOp) not in (IdentityOp, L2Norm):
                setattr(attention, name, norm)
        if transformer.attention_backend is not AttnBackend.local:
            attention.core_attention = SDPACoreAttention
        # The names under which Transformer Engine's fused layers keep the norms: checkpoints are
        # shared.
        names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        if transformer.multi_latent_attention:
            layer.self_attention.module = LatentSelfAttention
            names = {}
        mlp = layer.mlp.keywords["submodules"]
        if layer.mlp.func is not MoELayer:
            names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        elif mlp.shared_experts is not None:
            mlp = mlp.shared_experts.keywords["submodules"]
        # With one rank, too: a bias that it returns can be recomputed.
        if hasattr(mlp, "linear_fc2"):
            mlp.linear_fc2 = CompressedRowParallelLinear
        layer.sharded_state_dict_keys_map = names
    return block


def apply_native_defaults(args: Namespace, command_line: Sequence[str]) -> list[str]:
    """Adapt validated arguments of `--transformer-impl local` to the torch-native modules.

    `--spec local` becomes no `--spec`: our layer spec is the local one.

    Args:
        args: Megatron's, changed in place.
        command_line: flags that the user gave stay as they are.

    Returns: a line for each value that changed or has no effect, for the log.
    """
    if args.spec == ["local"]:
        args.spec = None
    lines = [
        leave_out_causal_mask(args),
        _fuse_rope(args, command_line),
        _fuse_weight_gradients(args),
        _ignored_exchange(args),
    ]
    return [line for line in lines if line is not None]


def _ignored_exchange(args: Namespace) -> str | None:
    """Return a line where `--cp-comm-type` asks for another exchange than ours."""
    if args.transformer_impl != "local" or getattr(args, "context_parallel_size", 1) == 1:
        return None
    exchange = getattr(args, "cp_comm_type", None)
    if exchange in (None, ["p2p"]):  # Megatron's default
        return None
    names = " ".join(exchange)
    return f"torch-native layers gather keys and values: --cp-comm-type {names} is ignored"


def leave_out_causal_mask(args: Namespace) -> str | None:
    """Set `--no-create-attention-mask-in-dataloader` where the mask would be the causal one:
    without it torch's flash kernels can run, and it is not sent to tensor-parallel ranks."""
    unneeded = args.transformer_impl == "local" and not args.reset_attention_mask
    if not (unneeded and args.create_attention_mask_in_dataloader):
        return None
    args.create_attention_mask_in_dataloader = False
    return "attention is causal: --no-create-attention-mask-in-dataloader, no mask tensor is needed"


def _fuse_rope(args: Namespace, command_line: Sequence[str]) -> str | None:
    """Keep RoPE fusion, Megatron's default, where our compiled RoPE can be the fused one: not on
    the CPU."""
    usable = (
        args.transformer_impl == "local"
        and args.position_embedding_type == "rope"
        and not args.rotary_interleaved
        and not getattr(args, "multi_latent_attention", False)
        and torch.cuda.is_available()
        and "--no-rope-fusion" not in command_line
    )
    # In the slot that a TransformerConfig checks when it is built. Packed sequences are not
    # covered.
    if not usable or not gaps.fill_rope_slot(rotary) or args.apply_rope_fusion:
        return None
    args.apply_rope_fusion = True
    return "RoPE runs compiled (--no-rope-fusion: megatron-core's unfused one)"


def _fuse_weight_gradients(args: Namespace) -> str | None:
    """Keep gradient accumulation fusion, Megatron's default: without apex torch's GEMMs do it."""
    if not args.gradient_accumulation_fusion or not fill_weight_gradient_slot():
        return None
    if args.transformer_impl == "local" and args.defer_embedding_wgrad_compute:
        flag = "--defer-embedding-wgrad-compute"  # unfused, Megatron refuses it
    elif args.use_megatron_fsdp:
        flag = "--use-megatron-fsdp"
    else:
        return None
    args.gradient_accumulation_fusion = False
    return f"{flag} cannot use torch's fused weight gradients: --no-gradient-accumulation-fusion"


@jit_fuser
def _rotate(t: torch.Tensor, freqs: torch.Tensor, opposite: bool) -> torch.Tensor:
    """Rotate by the angles, or by the opposite ones; tensors as in ``rotary``."""
    cos = freqs.cos()
    sin = -freqs.sin() if opposite else freqs.sin()
    rotated = t[..., : freqs.shape[-1]].float()
    first, second = rotated.chunk(2, dim=-1)
    # fp32 until the end: one rounding.
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated.to(t.dtype), t[..., freqs.shape[-1] :]), dim=-1)


def rotary(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first values of each head.

    Args:
        t: ``[s, b, heads, head_dim]``.
        freqs: angles ``[s, 1, 1, rotated]``, fp32; the second half of ``rotated`` repeats the
            first.
        interleaved: a pair is two neighbouring values, not one of each half. Rare: megatron-core's
            own unfused path does it.
    """
    if interleaved:
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=True)
    # The gradient of a rotation is the rotation by the opposite angles.
    return WithBackward.apply(
        t,
        lambda values: _rotate(values, freqs, False),
        lambda gradient: _rotate(gradient, freqs, True),
    )
