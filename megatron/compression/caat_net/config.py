"""The setting of CAAT-Net, and what it cannot be combined with.

CaatNetConfig(sync_fraction=0.5)                 # on the command line: --caat-net-sync-fraction 0.5
"""

from argparse import Namespace
from dataclasses import dataclass

from megatron.compression.dimension import documented, refuse_arguments
from megatron.compression.errors import (
    CompressionConfigError,
    SettingError,
    argument,
    setting,
    spelled,
)
from megatron.compression.graphs import refuse_by_layer
from megatron.compression.names import PYTHON_NAMES
from megatron.compression.tensor_parallel.config import OTHER_LAYERS

_PATH = "caat_net.sync_fraction"
_UNREACHED = "keeps gradients where their sum over tensor-parallel ranks does not reach them"

# Megatron's argument -> why a model of one residual stream for each rank cannot have it
_REFUSED = {
    "sequence_parallel": "splits one residual stream over the ranks, but here each rank has its "
    "own",
    "distribute_saved_activations": "keeps a slice of one residual stream on each rank, but each "
    "has its own",
    "num_experts": "routes tokens from one residual stream, but here each rank has its own",
    "mtp_num_layers": "embeds tokens again in layers that are not covered",
    "multi_latent_attention": "has layers that are not covered",
    **dict.fromkeys(OTHER_LAYERS, "has layers that are not covered"),
    "defer_embedding_wgrad_compute": "defers the output layer's weight gradient to after the "
    "backward",
    "use_megatron_fsdp": _UNREACHED,
    "use_torch_fsdp2": _UNREACHED,
}


@dataclass(frozen=True, kw_only=True)
class CaatNetConfig:
    """Partially synchronised tensor parallelism (CAAT-Net, arXiv 2506.19645): another model, less
    traffic."""

    sync_fraction: float = documented(
        1.0,
        "Part of the channels of each row-parallel output (attention projection, fc2) that "
        "tensor-parallel ranks sum; the others stay private to a rank. 0.5 is the paper's; 1 is "
        "ordinary tensor parallelism. A checkpoint belongs to its fraction and tensor-parallel "
        "size.",
    )

    def __post_init__(self) -> None:
        with spelled(PYTHON_NAMES):
            # Written so that a NaN, which compares as false, is refused, too.
            if not 0 < self.sync_fraction <= 1:
                raise SettingError(
                    _PATH,
                    f"{self.sync_fraction:g}",
                    "must be a part of the channels: above 0, at most 1 (ordinary tensor "
                    "parallelism)",
                )

    @property
    def enabled(self) -> bool:
        """True where some channels stay private to a rank."""
        return self.sync_fraction < 1

    def shared_channels(self, hidden_size: int) -> int:
        """Return how many of ``hidden_size`` channels are summed, the first ones; at least one.

        Raises: SettingError: the fraction is less than one channel.
        """
        shared = int(hidden_size * self.sync_fraction)
        if shared == 0:
            raise SettingError(
                _PATH,
                f"{self.sync_fraction:g}",
                f"shares none of {hidden_size} channels",
                f"give at least {1 / hidden_size:g}",
            )
        return shared

    def lines(self, args: Namespace) -> list[str]:
        """The line for the log; none where the model is an ordinary one."""
        if not self.enabled:
            return []
        return [
            f"CAAT-Net sums {self.shared_channels(args.hidden_size)} of {args.hidden_size} "
            f"channels of each row-parallel output over {args.tensor_model_parallel_size} ranks. "
            "Its checkpoints load with the same fraction and the same number of ranks only"
        ]

    def check(self, args: Namespace) -> None:
        """Refuse what would compute another function or a wrong gradient.

        Raises: SettingError: one of Megatron's arguments does not fit.
        """
        if not self.enabled:
            return
        fraction = f"{self.sync_fraction:g}"
        if args.transformer_impl != "local":
            implementation = argument("transformer_impl")
            raise SettingError(
                _PATH,
                fraction,
                f"changes the layers of {implementation} local, not of {args.transformer_impl}",
                f"use {implementation} local",
            )
        if args.tensor_model_parallel_size == 1:
            raise SettingError(
                _PATH,
                fraction,
                f"needs tensor parallelism: {argument('tensor_model_parallel_size')} 1 "
                "synchronises nothing",
                "raise it or drop the flag",
            )
        # Each of these assumes that the ranks hold one residual stream, or adds weights that do.
        refuse_arguments(args, _REFUSED, f"drop it or {setting(_PATH)}")
        refuse_by_layer(
            args,
            f"{setting(_PATH)} {fraction}",
            "computes weight gradients in the backward of the layer before",
        )
        # With fewer groups than ranks a group's keys and values would be gathered from several
        # streams.
        groups = getattr(args, "num_query_groups", None)
        grouped = getattr(args, "group_query_attention", False)
        if grouped and groups < args.tensor_model_parallel_size:
            raise SettingError(
                _PATH,
                fraction,
                f"needs at least one query group a rank: {argument('num_query_groups')} {groups} "
                f"at {argument('tensor_model_parallel_size')} {args.tensor_model_parallel_size} "
                "gathers keys and values of several streams",
                "lower the latter",
            )
        self.shared_channels(args.hidden_size)


def check_checkpoint(checkpoint_args: Namespace, args: Namespace) -> None:
    """Refuse a checkpoint whose weights mean another function: one of another sync fraction or,
    with a fraction below 1, of another tensor-parallel size.

    Args:
        checkpoint_args: Megatron's arguments as the checkpoint has them.
        args: those of this run.

    Raises: CompressionConfigError: they do not fit.
    """
    flag = setting(_PATH)
    saved_fraction = getattr(checkpoint_args, "caat_net_sync_fraction", 1.0)
    if saved_fraction != args.caat_net_sync_fraction:
        raise CompressionConfigError(
            f"the checkpoint was trained with {flag} {saved_fraction:g} (1 is an ordinary model), "
            f"this run has {args.caat_net_sync_fraction:g}: another function of the same weights. "
            f"Use {flag} {saved_fraction:g}, or --finetune to train on as another model"
        )
    saved_ranks = checkpoint_args.tensor_model_parallel_size
    ranks = args.tensor_model_parallel_size
    if saved_fraction != 1.0 and saved_ranks != ranks:
        size = argument("tensor_model_parallel_size")
        raise CompressionConfigError(
            f"the checkpoint is a CAAT-Net of {saved_ranks} residual streams, one a "
            f"tensor-parallel rank; at {size} {ranks} its weights are another function. Use "
            f"{size} {saved_ranks}, or --finetune to train on as another model"
        )
