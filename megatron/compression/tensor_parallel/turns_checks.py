"""What blocks in turn (block.py) cannot be combined with, in Megatron's arguments or a model's config."""

from argparse import Namespace

from megatron.compression.dimension import refuse_flags
from megatron.compression.errors import CompressionConfigError

HALVES = "--tp-compression-overlap halves"

_OTHER_LAYERS = "has layers that do not take turns"
_FULLY_SHARDED = "gathers weights when a layer is called, and in turns its modules are"
_REFUSED = {
    "num_experts": "routes the tokens of a whole micro-batch",
    "multi_latent_attention": "has attention whose input goes to several layers",
    "mtp_num_layers": _OTHER_LAYERS,
    "experimental_attention_variant": _OTHER_LAYERS,
    "heterogeneous_layers_config_path": _OTHER_LAYERS,
    "use_kitchen": _OTHER_LAYERS,
    "distribute_saved_activations": "keeps a part of one tensor, where there are two",
    "use_megatron_fsdp": _FULLY_SHARDED,
    "use_torch_fsdp2": _FULLY_SHARDED,
}
"""Megatron's argument -> why."""


def check_halves(args: Namespace) -> None:
    """Refuse what halves of a micro-batch cannot have.

    Args:
        args: Megatron's, or a ``TransformerConfig``, which has those that would give a wrong gradient.
    Raises: CompressionConfigError: with the flag, the reason and the fix.
    """
    implementation = args.transformer_impl
    if implementation != "local":
        raise CompressionConfigError(
            f"{HALVES} needs --transformer-impl local: layers of {implementation} wait for a sum before they "
            "return it; give local or drop the flag"
        )
    refuse_flags(args, _REFUSED, f"drop it or {HALVES}")
    if args.cuda_graph_impl != "none":
        raise CompressionConfigError(
            f"{HALVES} orders kernels on the host, which a replayed graph leaves out; drop it or "
            "--cuda-graph-impl"
        )
    modules = " ".join(sorted(set(args.recompute_modules or ()) - {"core_attn"}))
    if args.recompute_granularity == "selective" and modules:
        raise CompressionConfigError(
            f"--recompute-modules {modules} has a backward for each turn, so that a weight's gradient would "
            f"count as complete after one of two; recompute core_attn alone or drop {HALVES}"
        )
    for name in ("mlp_chunks_for_training", "context_parallel_size"):
        if (getattr(args, name, None) or 1) > 1:
            raise CompressionConfigError(
                f"--{name.replace('_', '-')} {getattr(args, name)} has not been made to fit {HALVES}; "
                "drop one of the two"
            )
    if getattr(args, "micro_batch_size", 2) < 2:
        raise CompressionConfigError(
            f"--micro-batch-size {args.micro_batch_size} has no two halves; give 2 or more, or drop {HALVES}"
        )
    if args.attention_dropout > 0:
        raise CompressionConfigError(
            f"--attention-dropout {args.attention_dropout:g} draws in a kernel by place in the batch, so "
            f"halves would drop other scores than the whole; give 0 or drop {HALVES}"
        )
