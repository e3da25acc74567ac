"""What a CAAT-Net cannot be combined with, and which checkpoints belong to it."""

from argparse import Namespace
from collections.abc import Callable

from megatron.compression.config import CaatNetSettings, CompressionConfigError

# Megatron's flag -> why a model of one stream a rank cannot have it
_REFUSED = {
    "sequence_parallel": "splits one residual stream over the ranks, but here each rank has its own",
    "distribute_saved_activations": "keeps a slice of one residual stream on each rank, but each has its own",
    "num_experts": "routes tokens from one residual stream, but here each rank has its own",
    "mtp_num_layers": "embeds tokens again in layers that are not covered",
    "multi_latent_attention": "has layers that are not covered",
    "experimental_attention_variant": "has layers that are not covered",
    "heterogeneous_layers_config_path": "has layers that are not covered",
    "use_kitchen": "has layers that are not covered",
    "defer_embedding_wgrad_compute": "takes the output layer's weight gradient out of the backward",
    "use_megatron_fsdp": "keeps gradients where their sum over tensor-parallel ranks does not reach them",
    "use_torch_fsdp2": "keeps gradients where their sum over tensor-parallel ranks does not reach them",
}


def check_caat_net(settings: CaatNetSettings, args: Namespace) -> None:
    """Refuse what would compute another function or a wrong gradient.

    Args:
        settings: the sync fraction.
        args: Megatron's validated flags.

    Raises:
        CompressionConfigError: with the flag, the reason and the fix.
    """
    if not settings.enabled:
        return
    fraction = f"--caat-net-sync-fraction {settings.caat_net_sync_fraction:g}"
    if args.transformer_impl != "local":
        raise CompressionConfigError(
            f"{fraction} changes the layers of --transformer-impl local, not of {args.transformer_impl}; use "
            "--transformer-impl local"
        )
    if args.tensor_model_parallel_size == 1:
        raise CompressionConfigError(
            f"{fraction} needs tensor parallelism: --tensor-model-parallel-size 1 synchronises nothing; "
            "raise it or drop the flag"
        )
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise CompressionConfigError(
                f"--{name.replace('_', '-')} {reason}; drop it or --caat-net-sync-fraction"
            )
    if getattr(args, "cuda_graph_impl", "none") != "none":
        raise CompressionConfigError(
            f"{fraction} has not been run with --cuda-graph-impl; drop one of the two"
        )
    groups = getattr(args, "num_query_groups", None)
    if getattr(args, "group_query_attention", False) and groups < args.tensor_model_parallel_size:
        raise CompressionConfigError(
            f"{fraction} needs at least one query group a rank: --num-query-groups {groups} at "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} gathers keys and values of "
            "several streams; lower the latter"
        )
    if getattr(args, "taco_overlap_chunks", 1) > 1:
        raise CompressionConfigError(
            f"{fraction} overlaps its exchange with the private channels' GEMM; drop --taco-overlap-chunks"
        )
    settings.shared_channels(args.hidden_size)


def check_checkpoint(checkpoint_args: Namespace, args: Namespace) -> None:
    """Refuse a checkpoint of another function: the sync fraction and the ranks are part of the model.

    Args:
        checkpoint_args: the flags that were saved with it.
        args: this run's.

    Raises:
        CompressionConfigError: another fraction, or with one below 1 another tensor-parallel size.
    """
    if not _is_another_function(checkpoint_args, args):
        return
    saved, ranks = _fraction_and_ranks(checkpoint_args)
    if saved != args.caat_net_sync_fraction:
        raise CompressionConfigError(
            f"the checkpoint was trained with --caat-net-sync-fraction {saved:g} (1 is an ordinary model), "
            f"this run has {args.caat_net_sync_fraction:g}: another function of the same weights. Use "
            f"--caat-net-sync-fraction {saved:g}, or --finetune to train on as another model"
        )
    raise CompressionConfigError(
        f"the checkpoint is a CAAT-Net of {ranks} residual streams, one a tensor-parallel rank; at "
        f"--tensor-model-parallel-size {args.tensor_model_parallel_size} its weights are another "
        f"function. Use --tensor-model-parallel-size {ranks}, or --finetune to train on as another model"
    )


class OtherWeights:
    """Says that a run begins from weights of another function, which --finetune permits. Once.

    Megatron sets --finetune by itself where it takes --pretrained-checkpoint.

    Args:
        args: this run's flags.
        say: prints a line.
    """

    def __init__(self, args: Namespace, say: Callable[[str], None]) -> None:
        self.args, self.say, self._said = args, say, False

    def on_checkpoint_read(self, state_dict: dict | None, path: str | None) -> None:
        """Called with what has been read of a checkpoint, arguments alone or everything."""
        saved = (state_dict or {}).get("args")
        if self._said or saved is None or not self.args.finetune:
            return
        if _is_another_function(saved, self.args):
            self._said = True
            there, here = (
                f"--caat-net-sync-fraction {fraction:g} at --tensor-model-parallel-size {ranks}"
                for fraction, ranks in (_fraction_and_ranks(saved), _fraction_and_ranks(self.args))
            )
            self.say(f"WARNING: weights of {there} begin a run of {here}: another function of them")


def _fraction_and_ranks(args: Namespace) -> tuple[float, int]:
    return getattr(args, "caat_net_sync_fraction", 1.0), args.tensor_model_parallel_size


def _is_another_function(checkpoint_args: Namespace, args: Namespace) -> bool:
    (saved, ranks), (fraction, ours) = _fraction_and_ranks(checkpoint_args), _fraction_and_ranks(args)
    return saved != fraction or (saved != 1.0 and ranks != ours)
