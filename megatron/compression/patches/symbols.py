"""Replaces symbols of other packages, checked and logged, and takes the replacements out. Nothing
else does.

Every replacement is registered. Two kinds:

lasting     repairs and stand-ins that a living model or the machine needs: they stay
others      serve runs: ``take_out`` restores the originals when the last run has been closed

A replacement serves whichever run is at work (see running.py), so one is enough for all runs of a
process, and one that serves no run does what the original does.
"""

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


class PatchError(RuntimeError):
    """The symbol to replace is not what this version of the project expects."""


@dataclass(eq=False)
class Replacement:
    """A symbol that is replaced."""

    original: Any
    """What its owner held: for a static method the ``staticmethod`` object."""
    function: Any
    """What its owner holds instead."""
    patch: Callable
    """The function that makes replacements, by which a second request is recognised."""
    inherited: bool
    """The owner has the symbol from a base class: to restore it, its own is removed."""
    lasting: bool
    calls: list[Callable]
    """What ``extend`` was given."""


_replacements: dict[tuple[Any, str], Replacement] = {}
"""By owner (a module or a class) and name."""


def replace(
    owner: Any,
    name: str,
    parameters: tuple[str, ...],
    wrap: Callable[[Callable], Callable],
    *,
    lasting: bool = False,
) -> None:
    """Replace the function ``owner.name`` by ``wrap(original)``, once, however often the same patch
    asks.

    Args:
        owner: a module or a class.
        name: the function's name there.
        parameters: parameters that the function must have; empty for functions written in C.
        wrap: a function of a module, the same at each request: it is how a patch is recognised.
        lasting: the replacement is a repair, which ``take_out`` leaves in place.

    Raises:
        PatchError: there is no such function, it lacks a parameter, or another patch has replaced
            it.
    """
    _register(owner, name, parameters, wrap, lambda original, calls: wrap(original), lasting)


def extend(
    owner: Any,
    name: str,
    parameters: tuple[str, ...],
    wrap: Callable[[Callable, list[Callable]], Callable],
    call: Callable,
) -> None:
    """Replace ``owner.name`` by ``wrap(original, calls)``; each request adds its ``call`` to
    ``calls``, once.

    Args:
        owner: a module or a class.
        name: the function's name there.
        parameters: parameters that the function must have.
        wrap: gets the list, which may grow later. The list is forgotten when the replacement is
            taken out.
        call: a function that the replacement is to call.

    Raises:
        PatchError: there is no such function, it lacks a parameter, or another patch has replaced
            it.
    """
    calls = _register(owner, name, parameters, wrap, wrap, lasting=False)
    if call not in calls:
        calls.append(call)


def retract(owner: Any, name: str, call: Callable) -> None:
    """Take back what ``extend`` was given; the last one restores the original.

    Args:
        owner: a module or a class.
        name: the function's name there.
        call: the function that ``extend`` was given; one that is not there is left out.
    """
    replacement = _replacements.get((owner, name))
    if replacement is None or call not in replacement.calls:
        return
    replacement.calls.remove(call)
    if not replacement.calls:
        _restore(owner, name)


def around(
    owner: Any,
    name: str,
    parameters: tuple[str, ...],
    call: Callable,
    *,
    lasting: bool = False,
) -> None:
    """Have ``call(original, *arguments)`` stand for ``owner.name``.

    Args:
        owner: a module or a class.
        name: the function's name there.
        parameters: parameters that the function must have; empty for functions written in C.
        call: a function of a module, the same at each request.
        lasting: as for ``replace``.

    Raises:
        PatchError: as for ``replace``.
    """

    def make(original: Callable, calls: list[Callable]) -> Callable:
        def wrapper(*args, **kwargs):
            return call(original, *args, **kwargs)

        return wrapper

    _register(owner, name, parameters, call, make, lasting)


def follow(
    owner: Any,
    name: str,
    parameters: tuple[str, ...],
    after: Callable[[Any, dict], None],
    *,
    lasting: bool = False,
) -> None:
    """Have ``after(result, arguments)`` called after each call of ``owner.name``.

    Args:
        owner: a module or a class.
        name: the function's name there.
        parameters: parameters that the function must have.
        after: a function of a module, the same at each request; gets the arguments by name.
        lasting: as for ``replace``.

    Raises:
        PatchError: as for ``replace``.
    """

    def make(original: Callable, calls: list[Callable]) -> Callable:
        signature = inspect.signature(original)

        def wrapper(*args, **kwargs):
            result = original(*args, **kwargs)
            after(result, signature.bind(*args, **kwargs).arguments)
            return result

        return wrapper

    _register(owner, name, parameters, after, make, lasting)


def take_out() -> None:
    """Restore the original of every symbol whose replacement is not ``lasting``.

    Where somebody else has put a wrapper over ours, both are left alone: ours then does what the
    original does, since it finds no run, and a later request of its patch finds it in place.
    """
    for (owner, name), replacement in list(_replacements.items()):
        if not replacement.lasting:
            _restore(owner, name)


def _restore(owner: Any, name: str) -> None:
    """Put the original back, unless somebody else has put a wrapper over ours."""
    replacement = _replacements[owner, name]
    # Theirs lies over ours: to put the original there would undo theirs.
    if _current(owner, name) is not replacement.function:
        return
    if replacement.inherited:
        delattr(owner, name)
    else:
        setattr(owner, name, replacement.original)
    del _replacements[owner, name]
    logger.debug("patch: %s is the original again", _path(owner, name))


def _register(
    owner: Any,
    name: str,
    parameters: tuple[str, ...],
    patch: Callable,
    make: Callable[[Callable, list[Callable]], Callable],
    lasting: bool,
) -> list[Callable]:
    """Replace ``owner.name`` by ``make(original, calls)``, unless ``patch`` has done it; return its
    calls."""
    path = _path(owner, name)
    original = getattr(owner, name, None)
    if not callable(original):
        raise PatchError(f"{path} does not exist in this version; install those of constraints.txt")
    # Ours may stand there, or lie under what somebody else has put over it: then it is found
    # through their wrapper, and a second one would count everything twice.
    known = _replacements.get((owner, name))
    if known is not None and _reaches(_current(owner, name), known.function):
        if _describe(known.patch) != _describe(patch):
            raise PatchError(
                f"{path} is replaced by {_describe(known.patch)} already; {_describe(patch)} has "
                "to be part of that"
            )
        return known.calls
    if parameters:
        # The signature of the original, also through wrappers: ours copy it.
        missing = set(parameters) - set(inspect.signature(original).parameters)
        if missing:
            raise PatchError(
                f"{path} has no parameter {', '.join(sorted(missing))}; install the versions of "
                "constraints.txt"
            )
    # The list is the closure's and the registry's: what is added later is called, too.
    calls: list[Callable] = []
    function = functools.wraps(original)(make(original, calls))
    current = _current(owner, name)
    # A plain function in a class would become a method.
    if isinstance(current, staticmethod):
        function = staticmethod(function)
    inherited = name not in vars(owner)
    _replacements[owner, name] = Replacement(current, function, patch, inherited, lasting, calls)
    setattr(owner, name, function)
    # One rank says it; all have the same versions.
    if os.environ.get("RANK", "0") == "0":
        logger.debug("patch: %s", path)
    return calls


def _current(owner: Any, name: str) -> Any:
    """Return what a module or class holds under a name, unbound; of a base class if it holds
    none."""
    return inspect.getattr_static(owner, name)


def _reaches(function: Any, ours: Any) -> bool:
    """Return whether ``function`` is ``ours``, or a wrapper over it: by ``__wrapped__`` or in its
    closure."""
    # Whoever wraps a function keeps it: in __wrapped__ (functools.wraps), or in a cell of the
    # closure.
    pending = [function]
    seen: set[int] = set()
    while pending:
        candidate = pending.pop()
        if candidate is ours:
            return True
        if id(candidate) in seen or not callable(candidate):
            continue
        seen.add(id(candidate))
        pending.append(getattr(candidate, "__wrapped__", None))
        for cell in getattr(candidate, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                pending.append(cell.cell_contents)
    return False


def put(owner: Any, name: str, value: Any, reason: str) -> None:
    """Set ``owner.name`` to a value that does not need the one before. It is not registered, and
    stays.

    Args:
        owner: a module, a class or an object.
        name: an attribute that it has.
        value: what it is to hold.
        reason: for the log.

    Raises:
        PatchError: there is no such attribute.
    """
    if not hasattr(owner, name):
        path = _path(owner, name)
        raise PatchError(f"{path} does not exist in this version; install those of constraints.txt")
    setattr(owner, name, value)
    logger.debug("patch: %s: %s", _path(owner, name), reason)


def change_class(instance: Any, cls: type) -> None:
    """Make ``instance`` one of ``cls``: a subclass of its class that adds methods alone, or the way
    back.

    Why: classes that megatron-core names itself, outside its layer specs, cannot be chosen before.
    """
    logger.debug("patch: %s becomes %s.%s", type(instance).__name__, cls.__module__, cls.__name__)
    # Allowed by Python where both classes have the same layout, which a subclass without slots has.
    instance.__class__ = cls


def hide(package: str, reason: str) -> None:
    """Have ``import package`` fail, and ``find_spec`` find nothing, as if it were not installed.

    Why: what tries an optional package passes over an ImportError and nothing else. Not reached:
        who holds
    the package, or a name of it, already.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    # None is what the import system itself writes for a package that must not load.
    sys.modules[package] = None
    logger.debug("patch: %s is hidden: %s", package, reason)


def _path(owner: Any, name: str) -> str:
    module = getattr(owner, "__module__", "") or ""
    return f"{module}.{owner.__name__}.{name}".lstrip(".")


def _describe(patch: Callable) -> str:
    return f"{patch.__module__}.{patch.__qualname__}"
