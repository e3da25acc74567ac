"""The Triton kernels for CUDA tensors, the plain-torch definition for all others."""

import logging
from collections.abc import Callable
from functools import wraps
from importlib import import_module

import torch

AMD = torch.version.hip is not None
"""There ``is_cuda`` is true of tensors, too; most kernels hold PTX, which is NVIDIA's."""
if AMD:
    logging.getLogger("taco_kernels").warning(
        "AMD GPU: codecs run as plain torch, to the same bytes and far slower; the kernels are NVIDIA's"
    )


def dispatched[**P, R](definition: Callable[P, R]) -> Callable[P, R]:
    """``definition``, a function of some ``reference.py`` that begins with a tensor, on either device.

    Of a tensor on an NVIDIA GPU the function of that name and signature in the ``launch.py`` in its folder is
    called, which is imported then: a host without a GPU may have no Triton.
    """
    package, _, _ = definition.__module__.rpartition(".")
    name = definition.__name__
    launched: list[Callable[P, R]] = []

    @wraps(definition)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = args[0] if args else next(iter(kwargs.values()))
        if AMD or not tensor.is_cuda:
            return definition(*args, **kwargs)
        if not launched:
            launched.append(getattr(import_module(f"{package}.launch"), name))
        return launched[0](*args, **kwargs)

    return operation
