"""Which layers a run is built of: Transformer Engine's where it works, torch-native ones
elsewhere."""

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
    """Look for Transformer Engine, once a process, before megatron.core is imported.

    It is hidden where it cannot be used: a library that is missing would end in a trace, and
    without CUDA its Adam and norms would be taken.
    """
    import torch  # before Transformer Engine, whose library needs the NCCL that torch loads

    # find_spec does not load it.
    if importlib.util.find_spec("transformer_engine") is None:
        return Engine(missing="is not installed", fix=f"run {SET_UP}")
    if not torch.cuda.is_available():
        symbols.hide("transformer_engine", "its kernels need CUDA")
        return Engine(missing=_NO_CUDA)
    try:
        # The only way to know that its libraries are there.
        importlib.import_module("transformer_engine.pytorch")
        return Engine(version=importlib.import_module("transformer_engine").__version__)
    except Exception as error:  # OSError: a shared library; AssertionError: parts of two versions
        symbols.hide("transformer_engine", "it cannot be imported")
        reason = f"{type(error).__name__}: {first_line(error)}"
        return Engine(missing=f"cannot be imported ({reason})", fix=f"run {SET_UP}")


def needs_transformer_engine(flag: str, alternative: str) -> InputError:
    """Return the error for a flag that torch-native layers do not serve.

    Args:
        flag: with its value where that matters.
        alternative: what a user can do instead of using Transformer Engine.
    """
    engine = transformer_engine()
    if engine.missing:
        state = f", which {engine.missing}"
        fixes = [engine.fix, alternative]
    else:
        state = ""
        fixes = [f"add {_FLAG} transformer_engine", alternative]
    fix = ", or ".join(filter(None, fixes))
    return InputError(f"{flag} needs Transformer Engine{state}: {fix}")


def check_implementation(args: Namespace) -> None:
    """Refuse layers that cannot be built.

    Raises:
        InputError: Transformer Engine is missing, or its layers contradict another flag.
    """
    if args.transformer_impl == "local":
        return
    if transformer_engine().missing:
        raise needs_transformer_engine(f"{_FLAG} {args.transformer_impl}", f"use {_FLAG} local")
    if getattr(getattr(args, "attention_backend", None), "name", None) == "local":
        raise InputError(f"--attention-backend local is of the local layers: add {_FLAG} local")


def describe(args: Namespace, command_line: Sequence[str]) -> str:
    """Return for the log which layers the model is built of, and why.

    Args:
        args: Megatron's, validated.
        command_line: its words: whether the user has chosen the layers.
    """
    import torch

    engine = transformer_engine()
    if args.transformer_impl != "local":
        return f"layers: Transformer Engine {engine.version}"
    if any(word.split("=")[0] == _FLAG for word in command_line):
        return f"layers: torch-native ({_FLAG} local)"
    reason = _NO_CUDA
    if torch.cuda.is_available():
        reason = f"{engine.missing}; {SET_UP}"
    return f"layers: torch-native (Transformer Engine {reason})"


_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"
_FUSIONS = {
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion", _SOFTMAX),
    "apply_rope_fusion": (False, "--no-rope-fusion", "transformer_engine"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm", "apex"),
}
"""Argument -> its value without the extension, the flag that says the same, the module that it
needs."""


def missing_extension_overrides(args: Namespace) -> list[str]:
    """Switch off in validated ``args`` what ``--transformer-impl local`` cannot run on this
    machine.

    Returns:
        A line for each value that changed, for the log.
    """
    if args.transformer_impl != "local":
        return []
    lines = []
    for name, (value, flag, module) in _FUSIONS.items():
        if getattr(args, name) != value and importlib.util.find_spec(module) is None:
            # As the flag would have it.
            setattr(args, name, value)
            lines.append(f"{module} is not installed: {flag}")
    return lines
