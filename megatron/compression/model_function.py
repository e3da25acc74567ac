"""Which checkpoints belong to a model whose function is not the ordinary one of its weights.

Of a CAAT-Net the sync fraction and the ranks are part of the model.
"""

from argparse import Namespace
from collections.abc import Callable

from megatron.compression.errors import CompressionConfigError


def check_checkpoint(checkpoint_args: Namespace, args: Namespace) -> None:
    """Refuse a checkpoint of another function.

    Raises: CompressionConfigError: another sync fraction, or with one below 1 another tensor-parallel size.
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
            there, here = _function(saved), _function(self.args)
            self.say(f"WARNING: weights of {there} begin a run of {here}: another function of them")


def _fraction_and_ranks(args: Namespace) -> tuple[float, int]:
    return getattr(args, "caat_net_sync_fraction", 1.0), args.tensor_model_parallel_size


def _function(args: Namespace) -> str:
    fraction, ranks = _fraction_and_ranks(args)
    return f"--caat-net-sync-fraction {fraction:g} at --tensor-model-parallel-size {ranks}"


def _is_another_function(checkpoint_args: Namespace, args: Namespace) -> bool:
    (saved, ranks), (fraction, ours) = _fraction_and_ranks(checkpoint_args), _fraction_and_ranks(args)
    return saved != fraction or (saved != 1.0 and ranks != ours)
