"""Bad input ends a run with one line, on one rank, that names the flag or file and the fix."""

import argparse
import contextlib
import difflib
import importlib.util
import json
import os
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatron.compression.names import FLAG_NAMES, Names, argument, setting

__all__ = [
    "CompressionConfigError",
    "InputError",
    "SettingError",
    "argument",
    "refused_for",
    "setting",
    "spelled",
]

PEER_GRACE_SECONDS = 10.0
"""How long a rank waits before it ends with a line that another rank has, or is the reason of."""

_LOST = "lost the connection to another rank: it died or was stopped; its own log says why"
_SLOW = (
    "another rank did not answer within --distributed-timeout-minutes: it hangs, or is that slow"
)
# Part of the text of an exception that another rank is the reason of -> what to say.
_LOST_PEER = {
    # gloo's, which has one type for everything
    "Connection closed by peer": _LOST,
    "Connection reset by peer": _LOST,
    "Broken pipe": _LOST,
    "Timed out waiting": _SLOW,
    # NCCL's
    "remote process exited or there was a network error": _LOST,
    # those of the store, which rank 0 keeps
    "failed to recv, got 0 bytes": _LOST,
    "Did the remote server shutdown or crash": _LOST,
}
"""Part of a ``RuntimeError``'s text -> the line."""

Explanation = Callable[[BaseException, Namespace | None], str | None]

# Megatron raises bare assertions and KeyErrors for what a user mistyped, as for its own bugs. The
# function that an exception came through tells them apart: one from validate_args is about the
# command line.
_EXPLANATIONS: dict[str, Explanation] = {}
"""Function -> what explains an exception that comes through it."""


class InputError(ValueError):
    """Something the user gave cannot be used; the message names the flag or file and the fix.

    A message mentions settings and Megatron's arguments by reference, ``setting("transport")`` and
    ``argument("bf16")``, which are shown as ``names`` has them: until a front end decides otherwise
    (``spelled``), as flags of the command line.
    """

    names: Names = FLAG_NAMES

    def __str__(self) -> str:
        return self.names.resolve(super().__str__())


class CompressionConfigError(InputError):
    """Settings that cannot be honoured; the message names the flag and the fix."""


class SettingError(CompressionConfigError):
    """A setting, or an argument of Megatron's, that cannot be honoured: which, its value, why, and
    the fix.

    The text is one line, ``NAME VALUE REASON; FIX``, in the words of the front end that the user
    came through. Reason and fix mention other settings and Megatron's arguments by reference.

        raise SettingError(
            "tensor_parallel.overlap",
            "halves",
            f"needs {argument('transformer_impl')} local: other layers wait for a sum",
            f"give local, or drop {setting('tensor_parallel.overlap')}",
        )

    On the command line that is "--tp-compression-overlap halves needs --transformer-impl local:
    other layers wait for a sum; give local, or drop --tp-compression-overlap". In Python the first
    words are "TensorParallelConfig.overlap halves".

    Args:
        path: the place of the setting in ``CompressionConfig``, or ``args.NAME`` for Megatron's
            argument.
        value: what the user gave, as typed; None where the name alone is shown, as for a switch.
        reason: what is wrong. It goes on from the value (``is unknown``); a sentence of its own
            begins with a colon (``: codec 'int' is unknown``).
        fix: what the user can do, in the imperative; empty where the reason says it.
    """

    def __init__(
        self, path: str, value: object = None, reason: str | None = None, fix: str = ""
    ) -> None:
        super().__init__(path, value, reason, fix)
        self.path = path
        self.value = value
        self.reason = reason
        self.fix = fix

    def __str__(self) -> str:
        # megatron-core makes another exception of a module's, of the same type, from its text
        # alone.
        if self.reason is None:
            return self.path
        text = self.names.of(self.path)
        # "outer=" ends with the sign that its value follows: "outer=int8", but "--flag int8".
        if self.value is not None:
            space = "" if text.endswith("=") else " "
            text += f"{space}{self.value}"
        # A reason that is a sentence of its own begins with a colon, right after the value.
        if not self.reason.startswith(":"):
            text += " "
        text += self.names.resolve(self.reason)
        if self.fix:
            text += f"; {self.names.resolve(self.fix)}"
        return text


@contextlib.contextmanager
def spelled(names: Names) -> Iterator[None]:
    """Give errors that leave the body these names; of nested front ends the outermost decides."""
    try:
        yield
    except InputError as error:
        error.names = names
        raise


@contextlib.contextmanager
def refused_for(path: str) -> Iterator[None]:
    """Put a setting's name before what a codec, which does not know whose value it is, refuses."""
    try:
        yield
    except SettingError:
        raise  # it names its setting already
    except CompressionConfigError as error:
        raise SettingError(path, None, f": {error.args[0]}") from None


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage of hundreds of flags."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line, with the flag that looks most like an unknown one.

        Raises: InputError: in any case.
        """
        # Flags without help are those of earlier versions, which nobody should be pointed to.
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        known = [flag for action in shown for flag in action.option_strings]
        unknown = [word.split("=")[0] for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized") and unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            message += f"; did you mean {near[0]}?" if near else "; --help lists all"
        raise InputError(message)


def require_extra(module: str, extra: str, needed_by: str) -> None:
    """Refuse to go on without a package that comes with an extra of this project.

    Args:
        module: the package, as it is imported.
        extra: the extra of this project that brings it.
        needed_by: what needs it, for the message.

    Raises: InputError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{needed_by} needs {module}: pip install -e '.[{extra}]'")


def fail(message: str) -> NoReturn:
    """Print ``error: message`` and end this process with status 2, without a trace.

    Every rank usually has the same problem, so the others wait for rank 0, after which the launcher
    kills them; one that is still alive found something that rank 0 did not see.
    """
    rank = int(os.environ.get("RANK", "0"))
    # A launcher ends all ranks when the first has failed, so a line that all have is printed once.
    if rank != 0:
        time.sleep(PEER_GRACE_SECONDS)
        message = f"rank {rank}: {message}"
    line = f"error: {message}"
    _write_error_file(line)
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)
    os._exit(2)  # a peer may be inside a collective: leaving by sys.exit could wait for it


# How a rank that dies is shown, under torchrun:
#
#   rank 1 raises       writes its error file, prints its trace, exits     -> root cause: rank 1
#   rank 0 loses it     waits here                                         -> ended by torchrun
#
# If rank 0 wrote its file at once, its time would often be the earlier one, and torchrun would show
# it alone.
def _fail_after_the_others(message: str) -> NoReturn:
    """End like ``fail``, but after a rank that has died: the launcher has noticed it by then, has
    ended this process, and names that rank and its error as the cause."""
    if int(os.environ.get("RANK", "0")) == 0:
        time.sleep(PEER_GRACE_SECONDS)
    fail(message)


def _write_error_file(line: str) -> None:
    """Give torchrun a line about this process: it shows that of the rank that failed first, and
    compares the times in these files (of a rank without a file the time at which it was found
    dead)."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The format is that of torch.distributed.elastic's error handler.
        extra_info = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(file).write_text(
                json.dumps({"message": {"message": line, "extraInfo": extra_info}})
            )


def _report_to_launcher(error: BaseException) -> None:
    """Give torchrun the type, first line and place of an exception that keeps its trace: without
    them it would show another rank, which fails because this one is gone."""
    if isinstance(error, SystemExit):
        if error.code not in (None, 0):
            _write_error_file(f"sys.exit({error.code!r})")
        return
    line = type(error).__name__
    if text := str(error).strip():
        line += f": {text.splitlines()[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        line += f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})"
    _write_error_file(line)


def end_with_one_line() -> None:
    """Let an ``InputError`` that the script does not catch end it with its line; others keep their
    trace."""
    # The hook is a partial of _one_line, which calls the hook before it.
    is_ours = getattr(sys.excepthook, "func", None) is _one_line
    if not is_ours:  # once, however many parsers are made
        sys.excepthook = partial(_one_line, sys.excepthook)


def _one_line(
    show: Callable, error_type: type[BaseException], error: BaseException, trace: object
) -> None:
    """The hook for exceptions that nobody catches; ``show`` is the one before it."""
    if isinstance(error, InputError):
        sys.stderr = sys.__stderr__  # torch.distributed's hook collects what is printed under it
        fail(_text_of(error))
    _report_to_launcher(error)
    show(error_type, error, trace)


def explains(*functions: str) -> Callable[[Explanation], Explanation]:
    """Have the decorated ``explanation(error, args)`` give the line for exceptions that come
    through one of these functions, or None; ``args`` is the parsed command line, None where parsing
    itself failed."""

    def register(explanation: Explanation) -> Explanation:
        _EXPLANATIONS.update(dict.fromkeys(functions, explanation))
        return explanation

    return register


def explain(error: BaseException, args: Namespace | None = None) -> str | None:
    """One line for an exception that the command line, a full disk or a lost peer caused, else
    None.

    Args:
        error: what was raised.
        args: the parsed command line, where parsing has succeeded.
    """
    if isinstance(error, InputError):
        return _text_of(error)
    # The outermost function decides: it knows most about what the user asked for.
    for frame in traceback.extract_tb(error.__traceback__):
        explanation = _EXPLANATIONS.get(frame.name)
        if explanation is not None and (line := explanation(error, args)):
            return line
    # A package that a flag needs: Megatron imports most of them where they are used.
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install {str(error.name).replace('_', '-')}"
    return lost_peer(error)


def lost_peer(error: BaseException) -> str | None:
    """The line for an exception whose reason is another rank that died, or does not answer; else
    None."""
    if isinstance(error, RuntimeError):
        for text, line in _LOST_PEER.items():
            if text in str(error):
                return line
    return None


def _text_of(error: InputError) -> str:
    """The error's line, without what megatron-core adds to it, module by module."""
    return str(error).split(" when instantiating ")[0]


def came_through(error: BaseException, function: str) -> bool:
    """Return whether the exception passed through a function of this name."""
    return any(frame.name == function for frame in traceback.extract_tb(error.__traceback__))


def raised_in(error: BaseException, function: str) -> bool:
    """Return whether a function of this name raised the exception itself, not one that it
    called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].name == function


def first_line(error: BaseException) -> str:
    """The message's first line; for a bare assertion the condition that did not hold."""
    text = str(error).strip().splitlines()
    if text:
        return text[0]
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"required: {line.removeprefix('assert ')}"


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Run an entrypoint's body so that bad input ends it with one line and a non-zero status."""
    try:
        yield
    except KeyboardInterrupt:  # the user knows the reason
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        # One rank may leave alone, by sys.exit in a codec for instance: the launcher hears of it.
        if isinstance(error, SystemExit):
            _report_to_launcher(error)
            raise
        # Not imported here: what fails may be the import of megatron.training.
        training = sys.modules.get("megatron.training.global_vars")
        line = explain(error, getattr(training, "_GLOBAL_ARGS", None))
        # A bug, ours or Megatron's: the trace is what somebody needs to mend it.
        if line is None:
            _report_to_launcher(error)
            raise
        # Peers of a dead rank fail at the same moment. If they ended first, torchrun would name
        # one of them as the cause.
        if lost_peer(error):
            _fail_after_the_others(line)
        fail(line)
