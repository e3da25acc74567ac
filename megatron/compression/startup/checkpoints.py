"""Checkpoints: what one that does not fit differs in, which files are damaged, why none can be saved."""

import errno
import os
import shutil
from argparse import Namespace
from pathlib import Path

from megatron.compression.errors import CompressionConfigError, came_through, explains, first_line

FULL_BELOW_BYTES = 4 * 2**20  # what a write that ran out of space leaves free at most
_FULL = (errno.ENOSPC, errno.EDQUOT)


@explains("save_checkpoint_and_time", "save_checkpoint", "save_checkpoint_and_train_finalization")
def cannot_save(error: BaseException, args: Namespace | None) -> str | None:
    """Why no checkpoint was written: a full disk, or no folder where Megatron saves before it stops.

    torch reports a full disk from its writers as an "iostream error", or as a failure of no rank.
    """
    folder = args.save if args is not None else None
    if isinstance(error, TypeError) and args is not None and not folder:
        return (
            "a loss or a gradient is NaN or infinite, as the lines above say, and Megatron saves before it "
            "stops: add --save DIR, or go on with --no-check-for-nan-in-loss-and-grad"
        )
    one: BaseException | None = error
    full = bool(folder) and os.path.isdir(folder) and shutil.disk_usage(folder).free < FULL_BELOW_BYTES
    while one is not None and not full:
        full = getattr(one, "errno", None) in _FULL or any(os.strerror(code) in str(one) for code in _FULL)
        one = one.__cause__ or one.__context__
    where = f"--save {folder}" if folder else "the output folder"
    return f"{where}: no space left: make room there, or name another folder" if full else None


@explains("load_checkpoint")
def cannot_load(error: BaseException, args: Namespace | None) -> str | None:
    """One line where a checkpoint does not fit the model or is damaged, None where something else failed.

    Megatron compares arguments by assertion and tensors by CheckpointingException, which torch wraps in a
    CheckpointException of all ranks; the legacy format ends in torch's "size mismatch".
    """
    if args is None:
        return None
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    folder = args.load or args.pretrained_checkpoint
    source = f"--load {folder}" if args.load else f"--pretrained-checkpoint {folder}"
    if came_through(error, "_check_and_set"):  # of the learning rate's schedule
        return (
            f"{source}: its learning rate follows another schedule ({first_line(error)}), as with other "
            "--train-iters: add --override-opt-param-scheduler to follow this run's"
        )
    text = str(error)
    of_model = isinstance(error, AssertionError) or "mismatch" in text
    of_optimizer = text == "'optimizer'" or any(one in text for one in _OF_OPTIMIZER)
    if damaged := damaged_file(folder):
        return f"{source}: {damaged}: name another checkpoint, or an earlier iteration with --ckpt-step"
    if not (of_model or of_optimizer):
        return None
    flags = differing_flags(args)
    if of_optimizer and not flags and (reason := _other_expert_ranks(args)):
        return f"{source}: {reason}"
    if not of_model:
        of_rate = "Could not find parameter group" in text and not flags
        fix = "its optimizer's groups have another --lr, --min-lr or --weight-decay: give those that wrote it"
        return f"{source}: {fix}, or --no-load-optim" if of_rate else None
    reason = "; ".join(flags) or first_line(error)
    return f"{source}: {reason.rstrip('.')}. Start with the flags that wrote it, or name another checkpoint"


_OF_OPTIMIZER = ("optimizer.distributed", "entries in state dict", "Could not find parameter group")
_SHAPE_FLAGS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "max_position_embeddings", "position_embedding_type", "normalization", "swiglu"),
    *("untie_embeddings_and_output_weights", "add_bias_linear", "add_qkv_bias", "padded_vocab_size"),
)
_SPOKEN = {  # arguments whose name is no flag
    "add_bias_linear": "the linear layers' bias (--disable-bias-linear)",
    "padded_vocab_size": "the padded vocabulary (--vocab-size)",
}


def differing_flags(args: Namespace) -> list[str]:
    """The flags that shape the model and differ from those that the checkpoint was written with.

    Returns: "--hidden-size is 64 in the checkpoint, 32 here" and so on; empty where it keeps no arguments.
    """
    saved = _saved_arguments(args)
    if saved is None:
        return []
    differ = []
    for field in _SHAPE_FLAGS:
        if field == "num_query_groups" and not args.group_query_attention:
            continue  # filled in from --num-attention-heads after parsing
        there, here = getattr(saved, field, None), getattr(args, field, None)
        if there != here:
            name = _SPOKEN.get(field, "--" + field.replace("_", "-"))
            differ.append(f"{name} is {there} in the checkpoint, {here} here")
    return differ


def damaged_file(folder: str) -> str | None:
    """The first file of a folder's last checkpoint that is missing, shorter than what it should hold, or not
    what it should be; None: none is."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        place = Path(_checkpoint_folder(folder))
        if not (place / ".metadata").exists():
            return None  # of the legacy format
        stored = FileSystemReader(place).read_metadata().storage_data
    except Exception:
        return f"{folder} has no readable .metadata"
    ends: dict[str, int] = {}
    for entry in stored.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in sorted(ends.items()):
        size = (place / name).stat().st_size if (place / name).exists() else 0
        if size < end:
            return f"{place / name} is damaged, {size} of {end} bytes"
    return None


def _other_expert_ranks(args: Namespace) -> str | None:
    """Why the optimizer's state of experts cannot be read, None where it is spread as it was.

    megatron-core keeps a second optimizer for experts, but not where --expert-model-parallel-size is 1; and
    by default a checkpoint holds each rank's piece, which only the same layout reads.
    """
    saved, flag = _saved_arguments(args), "--expert-model-parallel-size"
    there, here = getattr(saved, "expert_model_parallel_size", None), args.expert_model_parallel_size
    if there in (None, here):
        return None
    again = "" if 1 in (there, here) else " --dist-ckpt-optim-fully-reshardable when it is saved, or"
    return (
        f"{flag} is {there} in the checkpoint, {here} here, and its optimizer state fits no other. "
        f"Give{again} --no-load-optim to go on from the weights, or the {flag} that wrote it"
    )


def _checkpoint_folder(folder: str) -> str:
    from megatron.training import checkpointing

    tracker = checkpointing.get_checkpoint_tracker_filename(folder)
    iteration, release = checkpointing.read_metadata(tracker)
    return checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)


def _saved_arguments(args: Namespace) -> Namespace | None:
    """Of the run that wrote the checkpoint; None where it keeps none (a legacy or damaged one)."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    try:
        return load_common_state_dict(_checkpoint_folder(args.load or args.pretrained_checkpoint))["args"]
    except Exception:  # the caller has Megatron's own message
        return None


def check_checkpoint(checkpoint_args: Namespace, args: Namespace) -> None:
    """Refuse a checkpoint of another function of its weights: of a CAAT-Net the sync fraction and the ranks
    are part of the model.

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


def other_weights(checkpoint_args: Namespace, args: Namespace) -> str | None:
    """A warning where weights of another function begin this run, as --finetune permits (Megatron sets it by
    itself for --pretrained-checkpoint)."""
    if not args.finetune or not _is_another_function(checkpoint_args, args):
        return None
    there, here = _function(checkpoint_args), _function(args)
    return f"WARNING: weights of {there} begin a run of {here}: another function of them"


def _fraction_and_ranks(args: Namespace) -> tuple[float, int]:
    return getattr(args, "caat_net_sync_fraction", 1.0), args.tensor_model_parallel_size


def _function(args: Namespace) -> str:
    fraction, ranks = _fraction_and_ranks(args)
    return f"--caat-net-sync-fraction {fraction:g} at --tensor-model-parallel-size {ranks}"


def _is_another_function(checkpoint_args: Namespace, args: Namespace) -> bool:
    (saved, ranks), (fraction, ours) = _fraction_and_ranks(checkpoint_args), _fraction_and_ranks(args)
    return saved != fraction or (saved != 1.0 and ranks != ours)
