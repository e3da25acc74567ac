"""Which run a replaced function serves.

A replaced function is the process's, and several runs may be open: an actor and a critic, a teacher
and a student. It finds the run that it serves by what it was given, or by what is at work:

marks       An object that belongs to a run is marked with it when the run attaches: a model's
            chunk, the configuration of a model, a bucket group. ``run_of`` and ``run_of_model``
            look it up.
at work     Where nothing in a function's arguments tells, the innermost ``at_work`` does, which
            surrounds whatever knows its model: a schedule, a training step, an evaluation. An
            object without a run puts None there: what it sends is nobody's.

A run is open from ``open_run`` to ``close_run``, or until it is garbage. When the last one closes,
replaced symbols are the originals again (``symbols.take_out``). A run may be any object here; it is
a ``communication.site.Run``.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.compression.patches import symbols

_open: "dict[int, weakref.ref[Any]]" = {}
"""Open runs by their identity, the first opened first."""
_marks: dict[int, Any] = {}
"""Run by the identity of a marked object; removed when the object is garbage."""
_at_work: list[Any] = []
"""Runs that work now, the innermost last."""


def open_run(run: Any) -> None:
    """Count a run as open: replaced symbols stay replaced until it is closed. Idempotent."""
    key = id(run)
    if key not in _open:
        _open[key] = weakref.ref(run)
        # A run that nobody closes ends with its model, which alone keeps it: identities are used
        # again after that. At the end of the interpreter there is nothing to restore.
        weakref.finalize(run, _closed, key).atexit = False


def close_run(run: Any) -> None:
    """End a run: nothing is marked with it any more. The last one leaves the symbols as they
    were."""
    # A model may outlive its run: from here on it has none.
    for key in [key for key, marked in _marks.items() if marked is run]:
        del _marks[key]
    _closed(id(run))


def _closed(key: int) -> None:
    if _open.pop(key, None) is not None and not _open:
        symbols.take_out()


def open_runs() -> list[Any]:
    """Return the open runs, the first opened first."""
    runs = [reference() for reference in _open.values()]
    return [run for run in runs if run is not None]


def claim(chunks: Iterable[Any], run: Any) -> None:
    """Open a run, and mark a model's chunks and their configuration with it."""
    open_run(run)
    for chunk in chunks:
        mark(chunk, run)
        if getattr(chunk, "config", None) is not None:
            # megatron-core's communicators have the configuration, and no model.
            mark(chunk.config, run)


def mark(instance: Any, run: Any) -> None:
    """Remember that ``instance`` belongs to ``run``; of several runs the last one counts.

    The mark is kept beside the object, not in it: a copy of the object has no run.
    """
    key = id(instance)
    if key not in _marks:
        weakref.finalize(instance, _marks.pop, key, None).atexit = False
    _marks[key] = run


def run_of(instance: Any) -> Any:
    """Return the run that ``instance`` is marked with, or None."""
    return _marks.get(id(instance))


def run_of_model(model: Any) -> Any:
    """Return the run of a model chunk, or of the first of several: the chunk's, or what it wraps;
    or None."""
    # All chunks of a stage belong to one run.
    chunk = model[0] if isinstance(model, list | tuple) else model
    while chunk is not None:
        run = _marks.get(id(chunk))
        if run is not None:
            return run
        # DistributedDataParallel, Float16Module and FSDP keep what they wrap under this name.
        chunk = getattr(chunk, "module", None)
    return None


@contextmanager
def at_work(run: Any) -> Iterator[None]:
    """Have ``current`` return ``run``, which may be None, while the body runs."""
    begin(run)
    try:
        yield
    finally:
        end()


def begin(run: Any) -> None:
    """Put ``run`` to work, for hooks, which cannot surround a call; ``end`` must follow."""
    _at_work.append(run)


def end() -> None:
    """Take the innermost run from work."""
    _at_work.pop()


def current(otherwise: Any = None) -> Any:
    """Return the run at work, the innermost, which may be None; ``otherwise`` where nothing is at
    work."""
    return _at_work[-1] if _at_work else otherwise
