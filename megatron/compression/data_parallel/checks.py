"""What data-parallel compression cannot be combined with."""

from argparse import Namespace

from megatron.compression.config_errors import CompressionConfigError, changed_flags
from megatron.compression.data_parallel.config import DataParallelCompression

# Megatron's flag -> why its gradients or weights do not pass through a bucket group that we know
_REFUSED = {
    "use_megatron_fsdp": "communicates inside its own buffers",
    "use_torch_fsdp2": "communicates inside torch",
    "num_experts": "has a data-parallel group of its own for experts, which is not covered",
    "fp8_param_gather": "gathers fp8 weights already",
    "fp4_param_gather": "gathers fp4 weights already",
    "reuse_grad_buf_for_mxfp8_param_ag": "gathers weights through the gradients' buffer",
    "overlap_param_gather_with_optimizer_step": "gathers weights in the middle of the optimizer's step",
    "ddp_reduce_scatter_with_fp32_accumulation": "has its own reduce-scatter; ours sums in fp32 too",
    "nccl_ub": "registers the buffers that its own collectives use",
}
_WEIGHTS = ("weight_quantization_bits", "wq_group_size", "weight_difference")
_NEITHER = (
    "dp_compression",
    "quantized_weights",
    "quantized_gradients",
    "dp_intra_node_size",
    "dp_communicators",
)


def check_data_parallel(settings: DataParallelCompression, args: Namespace) -> None:
    """Refuse what would leave traffic uncompressed without a word, or break training.

    Args:
        settings: resolved.
        args: Megatron's validated flags.

    Raises:
        CompressionConfigError: with the flag, the reason and the fix.
    """
    if not settings.enabled:
        return
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise CompressionConfigError(f"--{name.replace('_', '-')} {reason}; drop it or --dp-compression")
    if getattr(args, "use_layer_wise_distributed_optimizer", False):
        raise CompressionConfigError(
            f"--optimizer {args.optimizer} with --use-distributed-optimizer gathers whole parameters instead "
            "of shards; drop --use-distributed-optimizer or --dp-compression"
        )
    if args.num_distributed_optimizer_instances > 1:
        raise CompressionConfigError(
            "--num-distributed-optimizer-instances reduces gradients in two steps of its own; drop it, "
            "--dp-compression knows the nodes itself"
        )
    if getattr(args, "gtp_weight_remat_size", 1) > 1:
        raise CompressionConfigError(
            "--tensor-parallel-num-weight-shards spreads data-parallel ranks over another group as well, "
            "which is not covered; drop it or --dp-compression"
        )
    if getattr(args, "cuda_graph_impl", "none") != "none":
        raise CompressionConfigError(
            "--dp-compression chooses and counts on the host, which a replayed graph leaves out; drop "
            "--cuda-graph-impl or --dp-compression"
        )
    if settings.quantized_weights:
        _check_weights(args)
    elif idle := [flag for flag in changed_flags(settings) if flag in _flags(_WEIGHTS)]:
        raise CompressionConfigError(
            f"{', '.join(idle)} given, but weights are not quantised; add --quantized-weights with "
            "--use-distributed-optimizer"
        )
    gradient_flags = [f for f in changed_flags(settings, (*_NEITHER, *_WEIGHTS))]
    if settings.dp_compression == "sdp4bit" and not settings.quantized_gradients and gradient_flags:
        raise CompressionConfigError(
            f"{', '.join(gradient_flags)} given, but gradients are not quantised; add --quantized-gradients"
        )
    if settings.dp_error_feedback != "none":
        _check_error_feedback(args)


def _flags(names: tuple[str, ...]) -> set[str]:
    return {"--" + name.replace("_", "-") for name in names}


def _check_weights(args: Namespace) -> None:
    if not args.use_distributed_optimizer:
        raise CompressionConfigError(
            "--quantized-weights quantises the distributed optimizer's all-gather; add "
            "--use-distributed-optimizer, or drop it: without one every rank updates all weights itself"
        )
    if not (args.bf16 or args.fp16):
        raise CompressionConfigError(
            "--quantized-weights needs fp32 masters apart from the weights that are sent; add --bf16 or "
            "--fp16, or ask for --quantized-gradients alone"
        )
    if args.use_precision_aware_optimizer:
        raise CompressionConfigError(
            "--use-precision-aware-optimizer writes the weights inside its own kernel, where the difference "
            "to the old ones is lost; drop it or --quantized-weights"
        )
    if args.optimizer_cuda_graph:
        raise CompressionConfigError(
            "--optimizer-cuda-graph replays the optimizer's step, where the host has to hand over the "
            "difference of the weights; drop it or --quantized-weights"
        )


def _check_error_feedback(args: Namespace) -> None:
    if args.rerun_mode == "report_stats":
        raise CompressionConfigError(
            "--rerun-mode report_stats runs every iteration twice, and error feedback would lose what the "
            "first time sent; drop it or error feedback"
        )
    if args.fp16:
        raise CompressionConfigError(
            "--dp-error-feedback remembers gradients in units of the loss scale, which --fp16 changes; use "
            "--bf16 or drop it"
        )
    if args.save and args.ckpt_format != "torch_dist":
        raise CompressionConfigError(
            f"--dp-error-feedback is saved with --ckpt-format torch_dist, not {args.ckpt_format}; use it or "
            "drop --dp-error-feedback"
        )


def idle_reason(settings: DataParallelCompression, ranks: int) -> str | None:
    """Why an enabled data-parallel compression has nothing to do, or None."""
    if settings.enabled and ranks == 1:
        return "--dp-compression has no effect here: there is one data-parallel rank, and so nothing to send"
    return None
