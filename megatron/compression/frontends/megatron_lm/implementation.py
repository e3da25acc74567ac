"""Which layers a run is built of: Transformer Engine's where it works, torch-native ones elsewhere."""

import functools
import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.compression.errors import InputError, first_line
from megatron.compression.patches import symbols

SET_UP = "scripts/setup.sh --with-transformer-engine"
_FLAG = "--transformer-impl"
_NO_CUDA = "needs CUDA, and there is none here"


@dataclass(frozen=True)
class Engine:
    """What this machine has of Transformer Engine."""

    version: str = ""
    missing: str = ""
    """Why it cannot be used, after its name; empty where it can."""
    fix: str = ""
    """What a user does about that; empty where nothing can be done here."""


@functools.cache
def transformer_engine() -> Engine:
    """Look for Transformer Engine, once a process, before megatron.core is imported, and hide it where it
    cannot be used: a library that is missing would end in a trace, and without CUDA its Adam and norms would
    be taken."""
    import torch  # before Transformer Engine, whose library needs the NCCL that torch loads

    if importlib.util.find_spec("transformer_engine") is None:
        return Engine(missing="is not installed", fix=f"run {SET_UP}")
    if not torch.cuda.is_available():
        symbols.hide("transformer_engine", "its kernels need CUDA")
        return Engine(missing=_NO_CUDA)
    try:
        importlib.import_module("transformer_engine.pytorch")
        return Engine(version=importlib.import_module("transformer_engine").__version__)
    except Exception as error:  # OSError: a shared library; AssertionError: parts of two versions
        symbols.hide("transformer_engine", "it cannot be imported")
        said = f"{type(error).__name__}: {first_line(error)}"
        return Engine(missing=f"cannot be imported ({said})", fix=f"run {SET_UP}")


def needs_transformer_engine(what: str, otherwise: str) -> InputError:
    """The error for a flag ``what`` that torch-native layers do not serve; ``otherwise``: what else to do."""
    engine = transformer_engine()
    which = f", which {engine.missing}" if engine.missing else ""
    fix = engine.fix if engine.missing else f"add {_FLAG} transformer_engine"
    ways = ", or ".join(way for way in (fix, otherwise) if way)
    return InputError(f"{what} needs Transformer Engine{which}: {ways}")


def check_implementation(args: Namespace) -> None:
    """Raises: InputError where the layers that are asked for cannot be built, or contradict another flag."""
    if args.transformer_impl == "local":
        return
    if transformer_engine().missing:
        raise needs_transformer_engine(f"{_FLAG} {args.transformer_impl}", f"use {_FLAG} local")
    if getattr(getattr(args, "attention_backend", None), "name", None) == "local":
        raise InputError(f"--attention-backend local is of the local layers: add {_FLAG} local")


def describe(args: Namespace, command_line: Sequence[str]) -> str:
    """For the log: which layers, and why."""
    import torch

    engine = transformer_engine()
    if args.transformer_impl != "local":
        return f"layers: Transformer Engine {engine.version}"
    if any(word.split("=")[0] == _FLAG for word in command_line):
        return f"layers: torch-native ({_FLAG} local)"
    why = f"{engine.missing}; {SET_UP}" if torch.cuda.is_available() else _NO_CUDA
    return f"layers: torch-native (Transformer Engine {why})"


_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"
_FUSIONS = {
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion", _SOFTMAX),
    "apply_rope_fusion": (False, "--no-rope-fusion", "transformer_engine"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm", "apex"),
}
"""Argument -> its value without the extension, the flag that says the same, the module that it needs."""


def missing_extension_overrides(args: Namespace) -> list[str]:
    """Switch off in validated ``args`` what ``--transformer-impl local`` cannot run on this machine.

    Returns: One line for each value that changed, for the log.
    """
    if args.transformer_impl != "local":
        return []
    said = []
    for name, (value, flag, module) in _FUSIONS.items():
        if getattr(args, name) != value and importlib.util.find_spec(module) is None:
            setattr(args, name, value)
            said.append(f"{module} is not installed: {flag}")
    return said
