"""The setting of CAAT-Net, and what it cannot be combined with."""

from argparse import Namespace
from dataclasses import dataclass

from megatron.compression.dimension import naming_arguments, refuse_flags
from megatron.compression.errors import CompressionConfigError
from megatron.compression.graphs import refuse_by_layer
from megatron.compression.tensor_parallel.config import OTHER_LAYERS

# Megatron's flag -> why a model of one stream a rank cannot have it
_REFUSED = {
    "sequence_parallel": "splits one residual stream over the ranks, but here each rank has its own",
    "distribute_saved_activations": "keeps a slice of one residual stream on each rank, but each has its own",
    "num_experts": "routes tokens from one residual stream, but here each rank has its own",
    "mtp_num_layers": "embeds tokens again in layers that are not covered",
    **dict.fromkeys(("multi_latent_attention", *OTHER_LAYERS), "has layers that are not covered"),
    "defer_embedding_wgrad_compute": "defers the output layer's weight gradient to after the backward",
    "use_megatron_fsdp": "keeps gradients where their sum over tensor-parallel ranks does not reach them",
    "use_torch_fsdp2": "keeps gradients where their sum over tensor-parallel ranks does not reach them",
}


@dataclass(frozen=True, kw_only=True)
class CaatNetConfig:
    """Partially synchronised tensor parallelism (CAAT-Net, arXiv 2506.19645): another model, less traffic."""

    sync_fraction: float = 1.0
    """Part of the channels of each row-parallel output (attention projection, fc2) that tensor-parallel ranks
    sum; the others stay private to a rank. 0.5 is the paper's; 1 is ordinary tensor parallelism. A checkpoint
    belongs to its fraction and tensor-parallel size."""

    def __post_init__(self) -> None:
        with naming_arguments():
            if not 0 < self.sync_fraction <= 1:  # NaN too
                raise CompressionConfigError(
                    f"--caat-net-sync-fraction {self.sync_fraction:g} must be a part of the channels: above "
                    "0, at most 1 (ordinary tensor parallelism)"
                )

    @property
    def enabled(self) -> bool:
        """Whether some channels stay private."""
        return self.sync_fraction < 1

    def shared_channels(self, hidden_size: int) -> int:
        """How many of ``hidden_size`` channels are summed, the first ones; at least one."""
        shared = int(hidden_size * self.sync_fraction)
        if shared == 0:
            raise CompressionConfigError(
                f"--caat-net-sync-fraction {self.sync_fraction:g} shares none of {hidden_size} channels; "
                f"give at least {1 / hidden_size:g}"
            )
        return shared

    def lines(self, args: Namespace) -> list[str]:
        """For the log."""
        if not self.enabled:
            return []
        return [
            f"CAAT-Net sums {self.shared_channels(args.hidden_size)} of {args.hidden_size} channels of each "
            f"row-parallel output over {args.tensor_model_parallel_size} ranks; its checkpoints belong to "
            "both numbers"
        ]

    def check(self, args: Namespace) -> None:
        """Raises: CompressionConfigError: what would compute another function or a wrong gradient."""
        if not self.enabled:
            return
        fraction = f"--caat-net-sync-fraction {self.sync_fraction:g}"
        if args.transformer_impl != "local":
            raise CompressionConfigError(
                f"{fraction} changes the layers of --transformer-impl local, not of {args.transformer_impl}; "
                "use --transformer-impl local"
            )
        if args.tensor_model_parallel_size == 1:
            raise CompressionConfigError(
                f"{fraction} needs tensor parallelism: --tensor-model-parallel-size 1 synchronises nothing; "
                "raise it or drop the flag"
            )
        refuse_flags(args, _REFUSED, "drop it or --caat-net-sync-fraction")
        refuse_by_layer(
            args, fraction, "computes weight gradients in the backward of the layer before"
        )
        groups = getattr(args, "num_query_groups", None)
        if (
            getattr(args, "group_query_attention", False)
            and groups < args.tensor_model_parallel_size
        ):
            raise CompressionConfigError(
                f"{fraction} needs at least one query group a rank: --num-query-groups {groups} at "
                f"--tensor-model-parallel-size {args.tensor_model_parallel_size} gathers keys and values of "
                "several streams; lower the latter"
            )
        self.shared_channels(args.hidden_size)


def check_checkpoint(checkpoint_args: Namespace, args: Namespace) -> None:
    """Raises: CompressionConfigError: a checkpoint of another function of its weights: another sync fraction,
    or with one below 1 another tensor-parallel size."""
    saved, ranks = (
        getattr(checkpoint_args, "caat_net_sync_fraction", 1.0),
        args.tensor_model_parallel_size,
    )
    if saved != args.caat_net_sync_fraction:
        raise CompressionConfigError(
            f"the checkpoint was trained with --caat-net-sync-fraction {saved:g} (1 is an ordinary model), "
            f"this run has {args.caat_net_sync_fraction:g}: another function of the same weights. Use "
            f"--caat-net-sync-fraction {saved:g}, or --finetune to train on as another model"
        )
    streams = checkpoint_args.tensor_model_parallel_size
    if saved != 1.0 and streams != ranks:
        raise CompressionConfigError(
            f"the checkpoint is a CAAT-Net of {streams} residual streams, one a tensor-parallel rank; at "
            f"--tensor-model-parallel-size {ranks} its weights are another function. Use "
            f"--tensor-model-parallel-size {streams}, or --finetune to train on as another model"
        )
