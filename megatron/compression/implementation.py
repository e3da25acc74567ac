"""Which layers a run is built of: Transformer Engine's where it works, torch-native ones elsewhere."""

import functools
import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.compression import patches
from megatron.compression.errors import InputError, first_line

SET_UP = "scripts/setup.sh --with-transformer-engine"
_FLAG = "--transformer-impl"


@dataclass(frozen=True)
class Engine:
    """What this machine has of Transformer Engine."""

    version: str = ""
    missing: str = ""
    """Why it cannot be used, behind its name; empty where it can."""
    hint: str = ""
    """What a user may do about that."""


@functools.cache
def transformer_engine() -> Engine:
    """Look for Transformer Engine, once a process, and hide it where it cannot be used.

    megatron-core imports it in many places and passes over an ImportError alone: a library that is missing
    would end in a trace, and without CUDA its Adam and norms would be taken. Call it before megatron.core is
    imported.
    """
    import torch

    if importlib.util.find_spec("transformer_engine") is None:
        hint = SET_UP if torch.cuda.is_available() else "it needs CUDA, and there is none here"
        return Engine(missing="is not installed", hint=hint)
    if not torch.cuda.is_available():
        patches.hide("transformer_engine", "its kernels need CUDA")
        return Engine(missing="needs CUDA, and there is none here")
    try:
        importlib.import_module("transformer_engine.pytorch")
        return Engine(version=importlib.import_module("transformer_engine").__version__)
    except Exception as error:  # OSError: a shared library; AssertionError: parts of two versions
        patches.hide("transformer_engine", "it cannot be imported")
        said = f"{type(error).__name__}: {first_line(error)}"
        return Engine(missing=f"cannot be imported: {said}", hint=f"{SET_UP} builds it anew")


def default_implementation() -> str:
    """What ``--transformer-impl`` is where a script says nothing: Megatron's own default, if it can run."""
    return "local" if transformer_engine().missing else "transformer_engine"


def how_to_get_transformer_engine() -> str:
    """What a user of torch-native layers does to have Transformer Engine's, for an error's line."""
    engine = transformer_engine()
    return f"it {engine.missing}; run {SET_UP}" if engine.missing else f"add {_FLAG} transformer_engine"


def check_implementation(args: Namespace) -> None:
    """Raises: InputError where the layers that are asked for cannot be built, or contradict another flag."""
    engine, backend = transformer_engine(), getattr(args, "attention_backend", None)
    if args.transformer_impl == "local":
        return
    if engine.missing:
        asked = f"{_FLAG} {args.transformer_impl} needs Transformer Engine"
        raise InputError(f"{asked}: {how_to_get_transformer_engine()}, or use {_FLAG} local")
    if getattr(backend, "name", None) == "local":
        raise InputError(f"--attention-backend local is of the local layers: add {_FLAG} local")


def describe(args: Namespace, command_line: Sequence[str]) -> str:
    """For the log: which layers, and why."""
    engine = transformer_engine()
    if args.transformer_impl != "local":
        return f"layers: Transformer Engine {engine.version}"
    if any(word.split("=")[0] == _FLAG for word in command_line):
        return f"layers: torch-native ({_FLAG} local)"
    why = "; ".join(part for part in (f"Transformer Engine {engine.missing}", engine.hint) if part)
    return f"layers: torch-native ({why})"
