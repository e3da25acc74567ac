"""Checkpoints: why one does not fit, which file is damaged, why none can be saved."""

import errno
import os
import shutil
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from megatron.compression.errors import came_through, explains, first_line

FULL_BELOW_BYTES = 4 * 2**20
"""What a write that ran out of space leaves free at most."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
LONGEST_MESSAGE = 160
"""Characters of an exception's first line that are shown: torch lists all tensors of a checkpoint
in one."""

_OF_MODEL = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "num_experts",
    "max_position_embeddings",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "qk_layernorm",
    "multi_latent_attention",
    "mtp_num_layers",
    "untie_embeddings_and_output_weights",
    "vocab_size",
)
"""Arguments that decide which weights a model has, the more telling ones first."""
_OF_OPTIMIZER = ("use_distributed_optimizer", "optimizer", "bf16", "fp16")
"""Arguments that decide which state an optimizer has."""


@explains("save_checkpoint_and_time", "save_checkpoint", "save_checkpoint_and_train_finalization")
def cannot_save(error: BaseException, args: Namespace | None) -> str | None:
    """Explain why no checkpoint was written: a full disk, which torch reports as an "iostream
    error" or as a failure of no rank, or no folder where Megatron saves before it stops."""
    folder = args.save if args is not None else None
    if isinstance(error, TypeError) and args is not None and not folder:
        return (
            "a loss or a gradient is NaN or infinite, as the lines above say, and Megatron saves "
            "before it stops: add --save DIR, or go on with --no-check-for-nan-in-loss-and-grad"
        )
    if not (_came_from_full_disk(error) or _is_full(folder)):
        return None
    where = f"--save {folder}" if folder else "the output folder"
    return f"{where}: no space left: make room there, or name another folder"


def _is_full(folder: str | None) -> bool:
    """Return whether a folder's disk has no room left."""
    return (
        bool(folder) and os.path.isdir(folder) and shutil.disk_usage(folder).free < FULL_BELOW_BYTES
    )


def _came_from_full_disk(error: BaseException) -> bool:
    """Return whether an exception, or one that it was raised from, is the system's of a full disk
    or quota."""
    texts = [os.strerror(code) for code in _FULL]
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "errno", None) in _FULL or any(text in str(cause) for text in texts):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@explains("load_checkpoint")
def cannot_load(error: BaseException, args: Namespace | None) -> str | None:
    """One line where a checkpoint does not fit the run or is damaged, None where something else
    failed. Megatron compares by assertion and CheckpointingException, which torch wraps in one of
    all ranks."""
    if args is None:
        return None
    saved = _saved_arguments(error)
    # torch gathers the ranks' exceptions into one; they fail for the same reason.
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    folder = args.load or args.pretrained_checkpoint
    source = f"--load {folder}" if args.load else f"--pretrained-checkpoint {folder}"
    if came_through(error, "_check_and_set"):  # of the learning rate's schedule
        return (
            f"{source}: its learning rate follows another schedule ({first_line(error)}), as with "
            "other --train-iters: add --override-opt-param-scheduler to follow this run's"
        )
    if isinstance(error, FileNotFoundError) and args.ckpt_step:
        return _no_such_iteration(source, Path(folder), args.ckpt_step)
    if damaged := damaged_file(folder):
        return (
            f"{source}: {damaged}: name another checkpoint, or an earlier iteration with "
            "--ckpt-step"
        )
    line = _mismatch(error, saved, args)
    return None if line is None else f"{source}: {line}"


def _mismatch(error: BaseException, saved: Namespace | None, args: Namespace) -> str | None:
    """Tell how a checkpoint and this run do not fit; None: the exception is about something else.

    Args:
        error: what was raised while it was loaded.
        saved: the arguments of the run that wrote it; None where they were not read.
        args: this run's.
    """
    text = str(error)
    of_optimizer = any(
        word in text for word in ("flattened_range", "optimizer.", "distrib_optim_sharding_type")
    )
    is_mismatch = "mismatch" in text or isinstance(error, AssertionError | KeyError)
    if not (of_optimizer or is_mismatch):
        return None
    if saved is not None and (difference := _difference(saved, args)):
        return difference
    # "... not in state dict: [" begins a list of all tensors.
    message = first_line(error).partition(": [")[0].rstrip(".")
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[:LONGEST_MESSAGE]}..."
    alternative = (
        "load weights alone: --no-load-optim" if of_optimizer else "name another checkpoint"
    )
    return f"{message}. Start with the flags that wrote it, or {alternative}"


def _saved_arguments(error: BaseException) -> Namespace | None:
    """The arguments of the run that wrote the checkpoint. Megatron reads them before the tensors,
    so they are in its frame that the exception came through; reading them again here could wait for
    other ranks."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "load_checkpoint":
            state_dict = frame.f_locals.get("state_dict")
            if isinstance(state_dict, dict) and isinstance(state_dict.get("args"), Namespace):
                return state_dict["args"]
        trace = trace.tb_next
    return None


def _difference(saved: Namespace, args: Namespace) -> str | None:
    """Tell how the run that wrote a checkpoint differs from this one, in flags, and what to do;
    None: it does not.

    Args:
        saved: the arguments of the run that wrote it.
        args: this run's.
    """

    def differing(names: Iterable[str]) -> list[str]:
        # Megatron sets the number of groups while it builds a model that has none.
        grouped = getattr(args, "group_query_attention", False)
        return [
            name
            for name in names
            if getattr(saved, name, None) != getattr(args, name, None)
            and (grouped or name != "num_query_groups")
        ]

    if names := differing(_OF_MODEL):
        then = ", ".join(_typed(saved, name) for name in names[:3])
        now = ", ".join(_typed(args, name) for name in names[:3])
        return (
            f"it was saved {then}, and this run is {now}: give the same, or name another checkpoint"
        )
    if names := differing(_OF_OPTIMIZER):
        name = names[0]
        flag = f"--{name.replace('_', '-')}"
        if getattr(args, name) is True:
            fix = f"drop {flag}"
        elif getattr(args, name) is False:
            fix = f"add {flag}"
        else:
            fix = f"give {flag} {getattr(saved, name)}"
        return f"it was saved {_typed(saved, name)}: {fix}, or add --no-load-optim (weights only)"
    return None


def _typed(args: Namespace, name: str) -> str:
    """An argument as one types it: ``with --num-layers 2``, ``without --swiglu``."""
    flag = f"--{name.replace('_', '-')}"
    value = getattr(args, name, None)
    if value is None or value is False:
        return f"without {flag}"
    return f"with {flag}" if value is True else f"with {flag} {value}"


def _no_such_iteration(source: str, folder: Path, iteration: int) -> str:
    """The line for a --ckpt-step that was not saved."""
    names = sorted(path.name.removeprefix("iter_").lstrip("0") for path in folder.glob("iter_*"))
    saved_iterations = ", ".join(names) or "none"
    return (
        f"{source} has no iteration {iteration}: give --ckpt-step one of those it has "
        f"({saved_iterations}), or drop it"
    )


def damaged_file(folder: str) -> str | None:
    """The first file of a folder's last checkpoint that is missing, shorter than what it should
    hold, or not what it should be; None: none is."""
    from megatron.training import checkpointing
    from torch.distributed.checkpoint import FileSystemReader

    try:
        tracker = checkpointing.get_checkpoint_tracker_filename(folder)
        iteration, release = checkpointing.read_metadata(tracker)
        name = checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
        checkpoint = Path(name)
        if not (checkpoint / ".metadata").exists():
            return None  # of the legacy format
        stored = FileSystemReader(checkpoint).read_metadata().storage_data
    except Exception:
        return f"{folder} has no readable .metadata"
    # A file ends where its last tensor does; a shorter one was cut off while it was written or
    # copied.
    ends: dict[str, int] = {}
    for entry in stored.values():
        ends[entry.relative_path] = max(
            ends.get(entry.relative_path, 0), entry.offset + entry.length
        )
    for name, end in sorted(ends.items()):
        file = checkpoint / name
        size = file.stat().st_size if file.exists() else 0
        if size < end:
            return f"{file} is damaged, {size} of {end} bytes"
    return None
