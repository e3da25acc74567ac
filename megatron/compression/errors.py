"""Bad input ends a run with one line, on one rank, that names the flag or file and the fix."""

import argparse
import contextlib
import difflib
import errno
import importlib.util
import os
import shutil
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

FULL_BELOW_BYTES = 4 * 2**20  # what a write that ran out of space leaves free at most
_FULL = (errno.ENOSPC, errno.EDQUOT)

_CHECKS_OF_MEGATRON = ("validate_args", "core_transformer_config_from_args")
_SAVING = "save_checkpoint_and_time"

PEER_GRACE_SECONDS = 10.0  # how long another rank waits for rank 0 to say the same thing


class InputError(ValueError):
    """Something the user gave cannot be used; the message names the flag or file and the fix."""


class CompressionConfigError(InputError):
    """A setting that cannot be honoured; the message names the flag and the fix."""


@contextlib.contextmanager
def naming(flag: str) -> Iterator[None]:
    """Put the flag that a setting came from before what is wrong with it, unless a flag is named there."""
    try:
        yield
    except CompressionConfigError as error:
        text = str(error)
        raise CompressionConfigError(text if text.startswith("--") else f"{flag}: {text}") from None


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage of hundreds of flags."""

    def error(self, message: str) -> NoReturn:
        """Raises: InputError, with the flags that look like the unknown ones."""
        known = [flag for action in self._actions for flag in action.option_strings]
        unknown = [word.split("=")[0] for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized") and unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            message += f"; did you mean {near[0]}?" if near else "; --help lists all"
        raise InputError(message)


def require_extra(module: str, extra: str, needed_by: str) -> None:
    """Check that a package which comes with an extra of this project is installed.

    Raises: InputError: it is not.
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{needed_by} needs {module}: pip install 'megatron-taco[{extra}]'")


def require_folder(path: Path, flag: str) -> None:
    """Raises: InputError: the folder that a flag's file goes to does not exist."""
    if not path.absolute().parent.is_dir():
        raise InputError(f"{flag} {path}: its folder does not exist; make it first")


def fail(message: str) -> None:
    """Print `error: message` and end this process with status 2, without a trace.

    Every rank usually finds the same problem. The launcher kills the others as soon as one has ended, so the
    others wait for rank 0 to speak; one that is still alive after that found something rank 0 did not see.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(PEER_GRACE_SECONDS)
        message = f"rank {rank}: {message}"
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(2)  # a peer may be inside a collective: leaving by sys.exit could wait for it


def end_with_one_line() -> None:
    """Let an ``InputError`` that the script does not catch end it with its line; others keep their trace."""
    if getattr(sys.excepthook, "func", None) is not _one_line:  # once, however many parsers are made
        sys.excepthook = partial(_one_line, sys.excepthook)


def _one_line(show: Callable, kind: type[BaseException], error: BaseException, trace: object) -> None:
    line = explain(error) if isinstance(error, InputError) else None
    if line is not None:
        sys.stderr = sys.__stderr__  # torch.distributed's hook collects what is printed under it
        fail(line)
    show(kind, error, trace)


def came_through(error: BaseException, function: str) -> bool:
    """Whether the exception passed through a function of this name."""
    return any(frame.name == function for frame in traceback.extract_tb(error.__traceback__))


def explain(error: BaseException, args: Namespace | None = None) -> str | None:
    """One line for an exception that the command line, a full disk or a lost peer caused, else None.

    Args:
        args: the parsed command line, None where parsing itself failed.
    """
    if isinstance(error, InputError):
        return str(error).split(" when instantiating ")[0]  # what megatron-core adds, module by module
    refused = isinstance(error, AssertionError | ValueError | RuntimeError)
    text = str(error)
    if refused and any(came_through(error, name) for name in _CHECKS_OF_MEGATRON):
        return first_line(error)
    if refused and "current global batch size (" in text:  # of a schedule, as it comes
        return first_line(error)
    if refused and "without also enabling sequence parallelism" in text:  # in an expert layer's first forward
        return (
            "--num-experts at --tensor-model-parallel-size 2 or more trains with --sequence-parallel: add it"
        )
    if isinstance(error, TypeError) and args is not None and not args.save and came_through(error, _SAVING):
        return (
            "a loss is NaN or infinite, as the lines above say, and Megatron saves before it stops: add "
            "--save DIR, or go on with --no-check-for-nan-in-loss-and-grad"
        )
    folder = args.save if args is not None else None
    if _disk_is_full(error, folder):
        where = f"--save {folder}" if folder else "the output folder"
        return f"{where}: no space left: make room there, or name another folder"
    if came_through(error, "load_checkpoint") and args is not None:
        from megatron.compression.startup.other_checkpoint import checkpoint_mismatch

        return checkpoint_mismatch(error, args)
    if text.startswith("no sample to consume"):
        return "a share of the data has no sample: give it more of --split, or 0 with --eval-iters 0"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        port = os.environ.get("MASTER_PORT", "29500")
        return f"port {port} of this machine is in use: set MASTER_PORT (torchrun --master-port) to another"
    if "expected, but not set" in text and "rendezvous" in text:
        return "this process was not started by torchrun: torchrun --nproc-per-node N SCRIPT ..."
    if "Connection closed by peer" in text or "Connection reset by peer" in text:
        return "lost the connection to another rank: it died or was stopped; its own log says why"
    if "Timed out waiting" in text:
        return "another rank did not answer within --distributed-timeout-minutes: it hangs, or is that slow"
    return None


def without_fix(error: InputError) -> str:
    """What is wrong, for who has not asked for it: the message up to its last part, the fix."""
    return str(error).rpartition("; ")[0] or str(error)


def first_line(error: BaseException) -> str:
    """The message's first line; for a bare assertion the condition that did not hold."""
    text = str(error).strip().splitlines()
    if text:
        return text[0]
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"required: {line.removeprefix('assert ')}"


def _disk_is_full(error: BaseException, folder: str | None) -> bool:
    """Whether the system said so, or saving to `folder` failed and next to nothing is free there.

    torch reports a full disk from its writers as an "iostream error", or as a failure of no rank.
    """
    one: BaseException | None = error
    while one is not None:
        if getattr(one, "errno", None) in _FULL or any(os.strerror(code) in str(one) for code in _FULL):
            return True
        one = one.__cause__ or one.__context__
    if folder is None or not os.path.isdir(folder) or not came_through(error, "save_checkpoint"):
        return False
    return shutil.disk_usage(folder).free < FULL_BELOW_BYTES


@contextlib.contextmanager
def one_line_errors():
    """Run an entrypoint's body so that bad input ends it with one line and a non-zero status."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        training = sys.modules.get("megatron.training.global_vars")
        line = explain(error, getattr(training, "_GLOBAL_ARGS", None))
        if line is None:
            raise
        fail(line)
