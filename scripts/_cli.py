"""What the scripts share: one-line errors and outputs that appear whole or not at all."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

LEFT = re.compile(r"\d+ of \d+ runs are left")


def runs_left(left: int, runs: int) -> str:
    """What scripts that train within a time limit say last; ``LEFT`` finds it."""
    return f"{left} of {runs} runs are left: start again for them"


class UsageError(Exception):
    """Bad input from the user: the message names the flag or file and says how to fix it."""


class Parser(argparse.ArgumentParser):
    """argparse with no abbreviations (as in Megatron) and errors in the scripts' own one-line form."""

    def __init__(self, **kwargs) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Call `main(argv)` and return the exit status: 0, 2 for bad input, 130 when interrupted.

    SIGTERM is turned into an exception so that temporary files are removed on the way out.
    """

    def terminate(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        main(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted, nothing was written", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


@contextlib.contextmanager
def staged(outputs: Sequence[Path], overwrite: bool) -> Iterator[list[Path]]:
    """Yield one temporary path for each output; rename them all at a clean exit, else remove them.

    The last output is the one whose presence says that the set is complete: with `overwrite` its old
    version goes first, so that an interruption between two renames never leaves a mixed set behind.

    Raises:
        UsageError: an output exists and `overwrite` is false.
    """
    existing = [path for path in outputs if path.exists()]
    if existing and not overwrite:
        raise UsageError(
            f"{existing[0]} exists already: add --overwrite to replace it, or choose another output"
        )
    for path in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in outputs]
    try:
        yield temporary
        outputs[-1].unlink(missing_ok=True)
        for source, target in zip(temporary, outputs, strict=True):
            os.replace(source, target)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
