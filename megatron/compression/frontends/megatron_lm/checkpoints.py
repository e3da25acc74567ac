"""Checkpoints: why one does not fit, which file is damaged, why none can be saved."""

import errno
import os
import shutil
from argparse import Namespace
from pathlib import Path

from megatron.compression.errors import came_through, explains, first_line

FULL_BELOW_BYTES = 4 * 2**20  # what a write that ran out of space leaves free at most
_FULL = (errno.ENOSPC, errno.EDQUOT)


@explains("save_checkpoint_and_time", "save_checkpoint", "save_checkpoint_and_train_finalization")
def cannot_save(error: BaseException, args: Namespace | None) -> str | None:
    """Why no checkpoint was written: a full disk, which torch reports as an "iostream error" or as a failure
    of no rank, or no folder where Megatron saves before it stops."""
    folder = args.save if args is not None else None
    if isinstance(error, TypeError) and args is not None and not folder:
        return (
            "a loss or a gradient is NaN or infinite, as the lines above say, and Megatron saves before it "
            "stops: add --save DIR, or go on with --no-check-for-nan-in-loss-and-grad"
        )
    one: BaseException | None = error
    full = (
        bool(folder) and os.path.isdir(folder) and shutil.disk_usage(folder).free < FULL_BELOW_BYTES
    )
    while one is not None and not full:
        full = getattr(one, "errno", None) in _FULL or any(
            os.strerror(code) in str(one) for code in _FULL
        )
        one = one.__cause__ or one.__context__
    where = f"--save {folder}" if folder else "the output folder"
    return f"{where}: no space left: make room there, or name another folder" if full else None


@explains("load_checkpoint")
def cannot_load(error: BaseException, args: Namespace | None) -> str | None:
    """One line where a checkpoint does not fit the model or is damaged, None where something else failed.
    Megatron compares by assertion and CheckpointingException, which torch wraps in one of all ranks."""
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
    if damaged := damaged_file(folder):
        return f"{source}: {damaged}: name another checkpoint, or an earlier iteration with --ckpt-step"
    optimizer = any(word in str(error) for word in ("flattened_range", "optimizer.state"))
    if not (optimizer or "mismatch" in str(error) or isinstance(error, AssertionError | KeyError)):
        return None
    other = "load weights alone: --no-load-optim" if optimizer else "name another checkpoint"
    return (
        f"{source}: {first_line(error).rstrip('.')}. Start with the flags that wrote it, or {other}"
    )


def damaged_file(folder: str) -> str | None:
    """The first file of a folder's last checkpoint that is missing, shorter than what it should hold, or not
    what it should be; None: none is."""
    from megatron.training import checkpointing
    from torch.distributed.checkpoint import FileSystemReader

    try:
        tracker = checkpointing.get_checkpoint_tracker_filename(folder)
        iteration, release = checkpointing.read_metadata(tracker)
        place = Path(
            checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
        )
        if not (place / ".metadata").exists():
            return None  # of the legacy format
        stored = FileSystemReader(place).read_metadata().storage_data
    except Exception:
        return f"{folder} has no readable .metadata"
    ends: dict[str, int] = {}
    for entry in stored.values():
        ends[entry.relative_path] = max(
            ends.get(entry.relative_path, 0), entry.offset + entry.length
        )
    for name, end in sorted(ends.items()):
        size = (place / name).stat().st_size if (place / name).exists() else 0
        if size < end:
            return f"{place / name} is damaged, {size} of {end} bytes"
    return None
