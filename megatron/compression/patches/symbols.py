"""Replaces a symbol of another package: checked, once, with a line at debug level. Nothing else does it."""

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_MARK = "_megatron_taco_patch"


class PatchError(RuntimeError):
    """The symbol to replace is not what this version of the project expects."""


def replace(owner: Any, name: str, parameters: tuple[str, ...], wrap: Callable) -> None:
    """Replace the function ``owner.name`` by ``wrap(original)``, once, however often the same patch asks.

    Args:
        parameters: parameters that the function must have; empty for functions written in C.
    Raises: PatchError: there is no such function, it lacks a parameter, or another patch has replaced it.
    """
    where, patch = _where(owner, name), f"{wrap.__module__}.{wrap.__qualname__}"
    original = getattr(owner, name, None)
    if not callable(original):
        raise PatchError(
            f"{where} does not exist in this version; install those of constraints.txt"
        )
    if (before := getattr(original, _MARK, patch)) != patch:
        raise PatchError(f"{where} is replaced by {before} already; {patch} has to be part of that")
    if hasattr(original, _MARK):
        original = original.__wrapped__
    missing = set(parameters) - set(inspect.signature(original).parameters) if parameters else ()
    if missing:
        raise PatchError(
            f"{where} has no parameter {', '.join(sorted(missing))}; install the versions of constraints.txt"
        )
    replacement = functools.wraps(original)(wrap(original))
    setattr(replacement, _MARK, patch)
    setattr(owner, name, replacement)
    if os.environ.get("RANK", "0") == "0":
        logger.debug("patch: %s", where)


def around(owner: Any, name: str, parameters: tuple[str, ...], call: Callable) -> None:
    """Have ``call(original, *arguments)`` stand for ``owner.name``; else as ``replace``."""

    def wrap(original):
        def wrapper(*args, **kwargs):
            return call(original, *args, **kwargs)

        return wrapper

    wrap.__module__, wrap.__qualname__ = call.__module__, call.__qualname__
    replace(owner, name, parameters, wrap)


def follow(
    owner: Any, name: str, parameters: tuple[str, ...], after: Callable[[Any, dict], None]
) -> None:
    """Have ``after(result, arguments)``, arguments by name, called after each call of ``owner.name``; else as
    ``replace``."""

    def wrap(original):
        signature = inspect.signature(original)

        def wrapper(*args, **kwargs):
            result = original(*args, **kwargs)
            after(result, signature.bind(*args, **kwargs).arguments)
            return result

        return wrapper

    wrap.__module__, wrap.__qualname__ = after.__module__, after.__qualname__
    replace(owner, name, parameters, wrap)


def put(owner: Any, name: str, value: Any, why: str) -> None:
    """Set ``owner.name`` to a ``value`` that does not need the one before.

    Raises: PatchError: there is no such attribute.
    """
    if not hasattr(owner, name):
        where = _where(owner, name)
        raise PatchError(
            f"{where} does not exist in this version; install those of constraints.txt"
        )
    setattr(owner, name, value)
    logger.debug("patch: %s: %s", _where(owner, name), why)


def change_class(instance: Any, cls: type) -> None:
    """Make ``instance`` one of ``cls``: a subclass of its class that adds methods alone, or the way back.
    Why: classes that megatron-core names itself, outside its layer specs, cannot be chosen before."""
    logger.debug("patch: %s becomes %s.%s", type(instance).__name__, cls.__module__, cls.__name__)
    instance.__class__ = cls


def hide(package: str, why: str) -> None:
    """Have ``import package`` fail, and ``find_spec`` find nothing, as if it were not installed.

    Why: what tries an optional package passes over an ImportError and nothing else. Not reached: who holds
    the package, or a name of it, already.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = (
        None  # what the import system itself writes for a package that must not load
    )
    logger.debug("patch: %s is hidden: %s", package, why)


def _where(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__module__', '') or ''}.{owner.__name__}.{name}".lstrip(".")
