"""Symbols of megatron.core and megatron.training that take a CUDA device for granted."""

import functools
import importlib
import sys
import warnings

import torch

from megatron.compression.patches import put, replace

# What every process of a CPU run would say: fused kernels are absent, and so is memory to pin.
_EXPECTED_WARNINGS = (
    r"(Transformer Engine and )?Apex (is|are) not installed",
    r"Only transformer-engine>=",
    r".*pin_memory.*",
)


def _import_without_compile(name: str):
    """Import a Megatron module with torch.compile as the identity.

    Why: `megatron.core.jit.jit_fuser` is torch.compile, applied to small elementwise functions while the
    modules load. On CPU that costs seconds of C++ compilation in each process and gains nothing.
    """
    compile_, why = torch.compile, "small functions of the modules that load now stay as they are"
    put(torch, "compile", lambda fn=None, **_: fn if fn is not None else (lambda f: f), why)
    try:
        return importlib.import_module(name)
    finally:
        put(torch, "compile", compile_, "they have loaded")


def _with_own_generator(build):
    """For build_pretraining_data_loader: the loader draws its workers' seed from a generator of its own.

    On GPUs that draw comes from the CPU generator and dropout from the device's. Here both would come from
    one generator, and only tensor-parallel rank 0 has loaders: the ranks' dropout masks would part ways, and
    so would a resumed run from an uninterrupted one.
    """

    def build_pretraining_data_loader(*args, **kwargs):
        loader = build(*args, **kwargs)
        if isinstance(loader, torch.utils.data.DataLoader):
            loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        return loader

    return build_pretraining_data_loader


def _without_cuda(initialize):
    """For initialize_megatron, which asserts CUDA unless told otherwise; training.py holds it by name."""
    return functools.partial(initialize, allow_no_cuda=True)


def _as_numpy_from_here(move):
    """For maybe_move_tensor_to_cpu, which makes numpy splits of CUDA tensors alone: gloo wants numbers."""

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        tensor = move(tensor, as_numpy, record_stream)
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


def install_core() -> None:
    """Replace megatron-core's symbols."""
    _load("megatron.core.transformer")
    from megatron.core.tensor_parallel import random as tracker

    from megatron.host import rng

    rng.install_tracker(tracker)
    from megatron.core.transformer.moe import token_dispatcher

    replace(token_dispatcher, "maybe_move_tensor_to_cpu", ("tensor", "as_numpy"), _as_numpy_from_here)


def _load(name: str):
    if "megatron.core.jit" in sys.modules:  # too late for the import below: leave the functions uncompiled
        import torch._dynamo

        torch._dynamo.config.disable = True
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    return _import_without_compile(name)


def install() -> None:
    """Replace Megatron's own symbols; loads megatron.training on the way."""
    training = _load("megatron.training.training")
    replace(training, "initialize_megatron", ("allow_no_cuda",), _without_cuda)
    # It warms up functions that are not compiled here, and draws random numbers, how many depends on the
    # tensor-parallel size: weights from --use-cpu-initialization would differ between sizes.
    put(training, "set_jit_fusion_options", lambda tp_size=None: None, "nothing is compiled")
    replace(training, "build_pretraining_data_loader", (), _with_own_generator)
    install_core()
