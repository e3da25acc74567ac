"""Arguments that a CPU run needs: a launch script written for GPUs runs unchanged."""

from argparse import Namespace

# argument -> (value on the CPU, flag that says the same, reason)
_OVERRIDES = {
    "distributed_backend": ("gloo", "--distributed-backend gloo", "NCCL needs GPUs"),
    "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion", "a GPU kernel"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion", "needs a CUDA extension"),
    "bias_gelu_fusion": (False, "--no-bias-gelu-fusion", "a GPU kernel"),
    "bias_swiglu_fusion": (False, "--no-bias-swiglu-fusion", "a GPU kernel"),
    "bias_dropout_fusion": (False, "--no-bias-dropout-fusion", "a GPU kernel"),
    "apply_rope_fusion": (False, "--no-rope-fusion", "needs Transformer Engine"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm", "needs apex"),
    "tp_comm_overlap": (False, "no --tp-comm-overlap", "needs Transformer Engine"),
    "optimizer_cuda_graph": (False, "no --optimizer-cuda-graph", "CUDA graphs"),
    "record_memory_history": (False, "no --record-memory-history", "records CUDA memory"),
    "nccl_ub": (False, "no --use-nccl-ub", "NCCL needs GPUs"),
}


def cpu_argument_overrides(args: Namespace) -> list[str]:
    """Set in `args` what a CPU run needs.

    Returns: one line for each value that changed, for the log. Call it after validation and before the
    configs are built from `args`.
    """
    said = []
    for name, (value, flag, reason) in _OVERRIDES.items():
        if getattr(args, name) != value:
            setattr(args, name, value)
            said.append(f"running without CUDA: {flag} ({reason})")
    if args.attention_backend.name in ("fused", "flash"):
        said.append(
            f"running without CUDA: --attention-backend auto ({args.attention_backend.name} is a GPU kernel)"
        )
        args.attention_backend = type(args.attention_backend).auto
    if args.cuda_graph_impl != "none":
        from megatron.core.transformer.enums import InferenceCudaGraphScope

        args.cuda_graph_impl, args.cuda_graph_modules, args.te_rng_tracker = "none", [], False
        args.inference_cuda_graph_scope = InferenceCudaGraphScope.none
        said.append("running without CUDA: --cuda-graph-impl none")
    if args.profile and not args.use_pytorch_profiler:
        args.profile = False
        said.append("running without CUDA: no --profile (Nsight follows CUDA; --use-pytorch-profiler works)")
    return said
