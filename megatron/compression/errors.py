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

PEER_GRACE_SECONDS = 10.0  # how long another rank waits for rank 0 to say the same thing

# gloo has one type for everything: a peer that is gone, and one that does not answer.
_LOST = "lost the connection to another rank: it died or was stopped; its own log says why"
_LOST_PEER = {
    "Connection closed by peer": _LOST,
    "Connection reset by peer": _LOST,
    "Timed out waiting": "another rank did not answer within --distributed-timeout-minutes: it hangs, or is "
    "that slow",
}

Explanation = Callable[[BaseException, Namespace | None], str | None]

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
    """A setting, or an argument of Megatron's, that cannot be honoured: which, its value, why, and the fix.

    The text is one line, ``NAME VALUE REASON; FIX``, in the words of the front end that the user came
    through. Reason and fix mention other settings and Megatron's arguments by reference.

        raise SettingError(
            "tensor_parallel.overlap",
            "halves",
            f"needs {argument('transformer_impl')} local: other layers wait for a sum",
            f"give local, or drop {setting('tensor_parallel.overlap')}",
        )

    On the command line that is "--tp-compression-overlap halves needs --transformer-impl local: other layers
    wait for a sum; give local, or drop --tp-compression-overlap". In Python the first words are
    "TensorParallelConfig.overlap halves".

    Args:
        path: the place of the setting in ``CompressionConfig``, or ``args.NAME`` for Megatron's argument.
        value: what the user gave, as typed; None where the name alone is shown, as for a switch.
        reason: what is wrong. It goes on from the value (``is unknown``); a sentence of its own begins with a
            colon (``: codec 'int' is unknown``).
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
        if (
            self.reason is None
        ):  # megatron-core makes another of a module's error, from its text alone
            return self.path
        text = self.names.of(self.path)
        if self.value is not None:
            space = "" if text.endswith("=") else " "
            text += f"{space}{self.value}"
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
        raise
    except CompressionConfigError as error:
        raise SettingError(path, None, f": {error.args[0]}") from None


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
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        known = [flag for action in shown for flag in action.option_strings]
        unknown = [word.split("=")[0] for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized") and unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            message += f"; did you mean {near[0]}?" if near else "; --help lists all"
        raise InputError(message)


def require_extra(module: str, extra: str, needed_by: str) -> None:
    """Raises: InputError: a package which comes with an extra of this project is not installed."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{needed_by} needs {module}: pip install -e '.[{extra}]'")


def fail(message: str) -> None:
    """Print `error: message` and end this process with status 2, without a trace. Every rank usually finds
    the same problem, so the others wait for rank 0, after which the launcher kills them; one that is still
    alive found something rank 0 did not see. torchrun prints the line last, from the file that it names for
    this."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(PEER_GRACE_SECONDS)
        message = f"rank {rank}: {message}"
    line = f"error: {message}"
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)
    os._exit(2)  # a peer may be inside a collective: leaving by sys.exit could wait for it


def end_with_one_line() -> None:
    """Let an ``InputError`` that the script does not catch end it with its line; others keep their trace."""
    if (
        getattr(sys.excepthook, "func", None) is not _one_line
    ):  # once, however many parsers are made
        sys.excepthook = partial(_one_line, sys.excepthook)


def _one_line(
    show: Callable, kind: type[BaseException], error: BaseException, trace: object
) -> None:
    line = explain(error) if isinstance(error, InputError) else None
    if line is not None:
        sys.stderr = sys.__stderr__  # torch.distributed's hook collects what is printed under it
        fail(line)
    show(kind, error, trace)


def explains(*functions: str) -> Callable[[Explanation], Explanation]:
    """Have the decorated ``explanation(error, args)`` give the line for exceptions that come through one of
    these functions, or None; ``args`` is the parsed command line, None where parsing itself failed."""

    def register(explanation: Explanation) -> Explanation:
        _EXPLANATIONS.update(dict.fromkeys(functions, explanation))
        return explanation

    return register


def explain(error: BaseException, args: Namespace | None = None) -> str | None:
    """One line for an exception that the command line, a full disk or a lost peer caused, else None."""
    if isinstance(error, InputError):
        return str(error).split(" when instantiating ")[
            0
        ]  # what megatron-core adds, module by module
    for frame in traceback.extract_tb(error.__traceback__):
        explanation = _EXPLANATIONS.get(frame.name)
        if explanation is not None and (line := explanation(error, args)):
            return line
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install {str(error.name).replace('_', '-')}"
    if isinstance(error, RuntimeError):
        return next((line for text, line in _LOST_PEER.items() if text in str(error)), None)
    return None


def came_through(error: BaseException, function: str) -> bool:
    """Whether the exception passed through a function of this name."""
    return any(frame.name == function for frame in traceback.extract_tb(error.__traceback__))


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
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        training = sys.modules.get("megatron.training.global_vars")
        line = explain(error, getattr(training, "_GLOBAL_ARGS", None))
        if line is None:
            raise
        fail(line)
