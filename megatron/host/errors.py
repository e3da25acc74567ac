"""Bad input ends a run with one line, on one rank, that names the flag or file and the fix."""

import contextlib
import os
import sys
import time
import traceback
from argparse import Namespace

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


def came_through(error: BaseException, function: str) -> bool:
    """Whether the exception passed through a function of this name."""
    return any(frame.name == function for frame in traceback.extract_tb(error.__traceback__))


def _first_line(error: BaseException) -> str:
    """The message's first line; for a bare assertion the condition that did not hold."""
    text = str(error).strip().splitlines()
    if text:
        return text[0]
    return f"required: {traceback.extract_tb(error.__traceback__)[-1].line.removeprefix('assert ')}"


def _checkpoint_mismatch(error: BaseException, args: Namespace) -> str | None:
    """One line where a checkpoint does not fit the model, None where loading failed for another reason.

    Megatron compares arguments by assertion and tensors by CheckpointingException, which torch wraps in a
    CheckpointException of all ranks; the legacy format ends in torch's "size mismatch".
    """
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if not (isinstance(error, AssertionError) or "mismatch" in str(error)):
        return None
    source = f"--load {args.load}" if args.load else f"--pretrained-checkpoint {args.pretrained_checkpoint}"
    reason = "; ".join(differing_flags(args)) or _first_line(error)
    return f"{source}: {reason.rstrip('.')}. Start with the flags that wrote it, or name another checkpoint"


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
    from megatron.core.dist_checkpointing import load_common_state_dict
    from megatron.training.checkpointing import (
        get_checkpoint_name,
        get_checkpoint_tracker_filename,
        read_metadata,
    )

    folder = args.load or args.pretrained_checkpoint
    try:
        iteration, release = read_metadata(get_checkpoint_tracker_filename(folder))
        name = get_checkpoint_name(folder, iteration, release, return_base_dir=True)
        saved = load_common_state_dict(name)["args"]
    except Exception:  # a legacy or damaged checkpoint: the caller has Megatron's own message
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


def explain(error: BaseException, args: Namespace | None = None) -> str | None:
    """One line for an exception that the command line or a lost peer caused, else None.

    Args:
        error: what ended the run.
        args: the parsed command line, None where parsing itself failed.
    """
    if isinstance(error, InputError):
        return str(error).split(" when instantiating ")[0]  # what megatron-core adds, module by module
    if isinstance(error, AssertionError | ValueError) and came_through(error, "validate_args"):
        return _first_line(error)
    if came_through(error, "load_checkpoint") and args is not None:
        return _checkpoint_mismatch(error, args)
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
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        training = sys.modules.get("megatron.training.global_vars")
        args = getattr(training, "_GLOBAL_ARGS", None)
        line = str(error) if isinstance(error, also) else explain(error, args)
        if line is None:
            raise
        fail(line)
