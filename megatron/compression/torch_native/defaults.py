"""Arguments whose best value depends on which attention and which RoPE run."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import torch

from megatron.compression.torch_native.rope import fill_rope_fusion_slot
from megatron.compression.torch_native.weight_gradient import fill_weight_gradient_slot


def add_native_defaults(parser: ArgumentParser) -> ArgumentParser:
    """Let `--attention-backend local` pass validation (an `extra_args_provider`).

    Megatron requires `--spec local` with it, which it then tries to import as a module.
    `apply_native_defaults` takes that default back.
    """
    parser.set_defaults(spec=["local"])
    return parser


def apply_native_defaults(args: Namespace, command_line: Sequence[str]) -> list[str]:
    """Adapt the arguments of `--transformer-impl local` to the torch-native modules. Idempotent.

    Args:
        args: after validation, before the datasets and the configs are built from it. `--spec local`, ours
            or the user's, becomes no `--spec`: our layer spec is the local one.
        command_line: the arguments as given: what the user asked for is kept.
    Returns: One line for each value that changed or has no effect, for the log.
    """
    if args.spec == ["local"]:
        args.spec = None
    changed = [leave_out_causal_mask(args), _fuse_rope(args, command_line), _fuse_weight_gradients(args)]
    kind, several = getattr(args, "cp_comm_type", None), getattr(args, "context_parallel_size", 1) > 1
    if args.transformer_impl == "local" and several and kind not in (None, ["p2p"]):
        changed.append(
            f"torch-native layers gather keys and values: --cp-comm-type {' '.join(kind)} is ignored"
        )
    return [line for line in changed if line is not None]


def leave_out_causal_mask(args: Namespace) -> str | None:
    """Set `--no-create-attention-mask-in-dataloader` where the mask would be the causal one.

    The dataset's [b, 1, s, s] mask differs from the causal mask only with `--reset-attention-mask`. Both
    local attentions make the causal mask themselves; without the tensor, torch's flash kernels can run and
    tensor-parallel ranks need not be sent it.
    """
    unneeded = args.transformer_impl == "local" and not args.reset_attention_mask
    if not (unneeded and args.create_attention_mask_in_dataloader):
        return None
    args.create_attention_mask_in_dataloader = False
    return "attention is causal: --no-create-attention-mask-in-dataloader, no mask tensor is needed"


def _fuse_rope(args: Namespace, command_line: Sequence[str]) -> str | None:
    """Let RoPE fusion, Megatron's default, stand where our compiled RoPE can be the fused one.

    Not on the CPU, where nothing is compiled.
    """
    usable = (
        args.transformer_impl == "local"
        and args.position_embedding_type == "rope"
        and not args.rotary_interleaved
        and not getattr(args, "multi_latent_attention", False)
        and torch.cuda.is_available()
        and "--no-rope-fusion" not in command_line
    )
    if not usable or not fill_rope_fusion_slot() or args.apply_rope_fusion:
        return None
    args.apply_rope_fusion = True
    return "RoPE runs compiled (--no-rope-fusion: megatron-core's unfused one)"


def _fuse_weight_gradients(args: Namespace) -> str | None:
    """Let gradient accumulation fusion, Megatron's default, stand: without apex torch's GEMMs do it."""
    if not args.gradient_accumulation_fusion or not fill_weight_gradient_slot():
        return None
    flag = "--use-megatron-fsdp" if args.use_megatron_fsdp else None
    if args.transformer_impl == "local" and args.defer_embedding_wgrad_compute:  # unfused, it is refused
        flag = "--defer-embedding-wgrad-compute"
    if flag is None:
        return None
    args.gradient_accumulation_fusion = False
    return f"{flag} cannot use torch's fused weight gradients: --no-gradient-accumulation-fusion"
