"""What ``python -m taco_kernels.tune`` found on a GPU, where launches look for it.

The file holds, by machine (GPU, compute capability, versions of Triton and of this package), the settings
that are run otherwise than shipped: how they were shipped, and how they are run. It changes no bit of any
result, since tune takes nothing that would: ranks may have different files, or none.

Collectives over symmetric memory do not ask here. A tile of theirs is cut alike by the rank that writes it
and the rank that reads it, and files may differ.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import triton

import taco_kernels
from taco_kernels.common.device import Device, Tuning

FILE = "TACO_KERNELS_TUNING"
"""Environment variable: another place for the file than ~/.cache/taco_kernels/tuning.json."""
REGISTERS = 65536  # of a multiprocessor
MOST_WARPS, MOST_STAGES, MOST_REGISTERS = 16, 4, 255
logger = logging.getLogger("taco_kernels")
_planned: list = []


class Trial(NamedTuple):
    """What launches within ``trying`` go by."""

    chosen: dict[str, Tuning]
    asked: dict[str, Tuning]
    """Settings that launches asked for, as shipped."""


_trial: Trial | None = None


def planned[F: Callable](maxsize: int | None = None) -> Callable[[F], F]:
    """``lru_cache`` of what depends on tuning, so that it is looked up once and not by each launch."""

    def decorate(function: F) -> F:
        _planned.append(lru_cache(maxsize)(function))
        return _planned[-1]

    return decorate


def forget() -> None:
    """Let launches ask anew."""
    for cached in (*_planned, table):
        cached.cache_clear()


@contextmanager
def trying(chosen: dict[str, Tuning]) -> Iterator[dict[str, Tuning]]:
    """Run these settings so and all others as shipped, whatever the file says; for one thread.

    Yields:
        What launches have asked for so far: settings and how they are shipped.
    """
    global _trial
    before, _trial = _trial, Trial(chosen, {})
    forget()
    try:
        yield _trial.asked
    finally:
        _trial = before
        forget()


def tuned(device: Device, shipped: Tuning, operation: str, *settings: object) -> Tuning:
    """How a setting is run on ``device``: as the file says, else as shipped. For ``planned`` functions."""
    name = " ".join(map(str, (operation, *settings)))
    if _trial is not None:
        _trial.asked[name] = shipped
        return _trial.chosen.get(name, shipped)
    before, found = table(device).get(name, (None, shipped))
    return found if before == shipped else shipped


def path() -> Path:
    """Where the file is, or is to be."""
    return Path(os.environ.get(FILE) or Path.home() / ".cache" / "taco_kernels" / "tuning.json")


def machine(device: Device) -> str:
    """What a tuning holds for."""
    major, minor = device.capability
    versions = f"triton {triton.__version__}, taco_kernels {taco_kernels.__version__}"
    return f"{device.name}, sm_{major}{minor}, {versions}"


@lru_cache
def table(device: Device) -> dict[str, tuple[Tuning, Tuning]]:
    """Of each setting in the file the shipped tuning and the one found; empty without a file for ``device``.

    A file that cannot be read, or is of other machines, is left alone with a line in the log.
    """
    file, own = path(), machine(device)
    if not device.name or not (file.exists() or os.environ.get(FILE)):
        return {}
    try:
        machines = json.loads(file.read_text())
        if own in machines:
            rows = machines[own].items()
            return {name: (Tuning(*shipped), Tuning(*found)) for name, (shipped, found) in rows}
        problem = f"is of {'; '.join(machines)}"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"cannot be read ({error})"
    _warn(f"{file} {problem}; kernels run as shipped on {own}. python -m taco_kernels.tune adds it")
    return {}


@lru_cache
def _warn(text: str) -> None:
    """A line of the log, once: tables are read again whenever something is tried."""
    logger.warning(text)


def save(device: Device, found: dict[str, tuple[Tuning, Tuning]], settled: set[str]) -> None:
    """Put ``found`` into the file; of ``settled`` settings that are not in it the shipped tuning is best.

    What the file says of other settings and machines stays.
    """
    file, own = path(), machine(device)
    machines = json.loads(file.read_text()) if file.exists() else {}
    kept = {name: row for name, row in machines.get(own, {}).items() if name not in settled}
    machines[own] = kept | found
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(machines, indent=1) + "\n")
    partial.replace(file)
    forget()


def candidates(tuning: Tuning) -> list[Tuning]:
    """Neighbours of ``tuning``: one thing changed, or tile and warps together. Not all of them fit."""
    tile, warps, stages, programs, registers = tuning
    sizes = [(2 * tile, warps), (tile // 2, warps), (tile, 2 * warps), (tile, warps // 2)]
    sizes += [(2 * tile, 2 * warps), (tile // 2, warps // 2)]
    found = [tuning._replace(tile=t, warps=w) for t, w in sizes if 1 <= w <= MOST_WARPS]
    if programs:  # persistent: a loop over tiles, in a pipeline
        found += [tuning._replace(programs=p) for p in (programs - 1, programs + 1) if p]
        found += [tuning._replace(stages=s) for s in (stages - 1, stages + 1) if 1 <= s <= MOST_STAGES]
    caps = {None, *((registers - 16, registers + 16) if registers else ())}
    if programs > 1:
        caps.add(REGISTERS // (32 * warps * programs) // 8 * 8)  # as many as let the programs fit
    usable = [cap for cap in caps - {registers} if cap is None or 32 <= cap <= MOST_REGISTERS]
    return found + [tuning._replace(registers=cap) for cap in sorted(usable, key=lambda cap: cap or 0)]
