"""Symbols of megatron.core and megatron.training that take a CUDA device for granted."""

import functools
import importlib
import sys
import warnings

import torch


def _import_without_compile(name: str):
    """Import a Megatron module with torch.compile as the identity.

    Why: `megatron.core.jit.jit_fuser` is torch.compile, applied to small elementwise functions while the
    modules load. On CPU that costs seconds of C++ compilation in each process and gains nothing.
    """
    compile_ = torch.compile
    torch.compile = lambda fn=None, **_: fn if fn is not None else (lambda f: f)
    try:
        return importlib.import_module(name)
    finally:
        torch.compile = compile_


def install() -> None:
    """Replace Megatron's own symbols; loads megatron.training on the way."""
    if "megatron.core.jit" in sys.modules:  # too late for the import below: leave the functions uncompiled
        import torch._dynamo

        torch._dynamo.config.disable = True
    training = _import_without_compile("megatron.training.training")

    # initialize_megatron asserts CUDA unless told otherwise; training.py holds it by name.
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)

    from megatron.core.tensor_parallel import random as tracker
    from megatron.host import rng

    rng.install_tracker(tracker)

    # Data loaders ask for pinned memory, which torch refuses with a warning in every process.
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
