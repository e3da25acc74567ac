"""Bad input ends a run with one line, on one rank, that names the flag or file and the fix."""

import contextlib
import importlib
import os
import sys
import time
import traceback

PEER_GRACE_SECONDS = 10.0  # how long another rank waits for rank 0 to say the same thing


class InputError(ValueError):
    """Something the user gave cannot be used; the message names the flag or file and the fix."""


def fail(message: str, status: int = 2) -> None:
    """Print `error: message` and end this process with `status`, without a trace.

    Every rank usually finds the same problem. The launcher kills the others as soon as one has ended, so the
    others wait for rank 0 to speak; one that is still alive after that found something rank 0 did not see.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(PEER_GRACE_SECONDS)
        message = f"rank {rank}: {message}"
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(status)  # a peer may be inside a collective: leaving by sys.exit could wait for it


def _came_through(error: BaseException, function: str) -> bool:
    """Whether the exception passed through a function of this name."""
    return any(frame.name == function for frame in traceback.extract_tb(error.__traceback__))


def _first_line(error: BaseException) -> str:
    """The message's first line; for a bare assertion the condition that did not hold."""
    text = str(error).strip().splitlines()
    if text:
        return text[0]
    return f"required: {traceback.extract_tb(error.__traceback__)[-1].line.removeprefix('assert ')}"


def _is_checkpoint_mismatch(error: BaseException) -> bool:
    # Megatron compares arguments by assertion, tensors of a distributed checkpoint by CheckpointingException,
    # and leaves torch's "size mismatch" for the rest.
    checkpointing = importlib.import_module("megatron.core.dist_checkpointing.core").CheckpointingException
    return isinstance(error, AssertionError | checkpointing) or "size mismatch" in str(error)


def explain(error: BaseException, load: str | None = None) -> str | None:
    """One line for an exception that the command line or a lost peer caused, else None.

    Args:
        error: what ended the run.
        load: the folder of --load or --pretrained-checkpoint, for the message.
    """
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, AssertionError | ValueError) and _came_through(error, "validate_args"):
        return _first_line(error)
    if _came_through(error, "load_checkpoint") and _is_checkpoint_mismatch(error):
        reason = _first_line(error)
        return f"--load {load}: {reason} Start with the flags that wrote it, or give another --load folder"
    if any(text in str(error) for text in ("Connection closed by peer", "Connection reset by peer")):
        return "lost the connection to another rank: it died or was stopped; its own log says why"
    if "Timed out waiting" in str(error):
        return "another rank did not answer within --distributed-timeout-minutes: it hangs, or is that slow"
    return None


@contextlib.contextmanager
def one_line_errors(*also: type[Exception]):
    """Run an entrypoint's body so that bad input ends it with one line and a non-zero status.

    Args:
        also: further exception types whose message is the line.
    """
    try:
        yield
    except Exception as error:
        training = sys.modules.get("megatron.training.global_vars")
        args = getattr(training, "_GLOBAL_ARGS", None)
        load = getattr(args, "load", None) or getattr(args, "pretrained_checkpoint", None)
        line = str(error) if isinstance(error, also) else explain(error, load)
        if line is None:
            raise
        fail(line)
