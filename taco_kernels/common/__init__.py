"""What the codecs share: sizes and checks of wires, and the choice between a definition and its
kernels.

A codec is a package with a definition in plain torch (``reference.py``) and Triton kernels
(``launch.py``) that give the same bytes. ``dispatched`` makes one function of the two.

Modules here: ``reference`` has arithmetic in plain torch. ``device``, ``fast_launch``, ``hadamard``
and ``packing`` need Triton, which a host without a GPU may lack. ``graph_events`` tells of CUDA
graphs.
"""

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Concatenate

import torch

ALIGNMENT = 16
"""Bytes: wires and their chunks start at multiples of it, so that kernels use 16-byte accesses."""
MOST_COUNTED = 2**31 - 2**15
"""Kernels count groups, blocks, tiles and rows in 32 bits, up to a tile and a step beyond the last
one."""

# On AMD's GPUs ``is_cuda`` is true of tensors, too, but most kernels contain PTX, which is
# NVIDIA's.
AMD = torch.version.hip is not None
if AMD:
    logging.getLogger("taco_kernels").warning(
        "AMD GPU: codecs run as plain torch: the same bytes, far slower. The kernels need an NVIDIA GPU"
    )


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up.

    Kernels call Triton's ``cdiv`` instead, which takes microseconds on the host.
    """
    return -(-a // b)


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """Return the smallest multiple of ``alignment`` that is not below ``size`` (bytes)."""
    return ceil_div(size, alignment) * alignment


def check_counted(name: str, count: int, advice: str) -> None:
    """Refuse a call that has more groups, blocks or tiles than its kernel can count.

    Args:
        name: what is counted, for the message.
        count: how many the call has, over all rows and chunks.
        advice: what the caller can change, for the message.

    Raises:
        ValueError: ``count`` is MOST_COUNTED or more.
    """
    if count >= MOST_COUNTED:
        raise ValueError(f"{count} {name} in one call, of at most {MOST_COUNTED}; {advice}")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Refuse a setting whose value is not among those allowed.

    Args:
        name: the setting, for the message.
        value: what it was set to.
        allowed: the values that it can have.

    Raises:
        ValueError: ``value`` is not in ``allowed``.
    """
    if value not in allowed:
        choices = ", ".join(str(choice) for choice in allowed)
        raise ValueError(f"{name}={value!r} is not supported; choose one of {choices}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int | None],
    contiguous: bool = False,
) -> None:
    """Refuse a tensor that is not dtype[shape].

    Args:
        name: the argument, for the message.
        tensor: what was passed.
        dtype: the type that it must have.
        shape: the size of each dimension; None stands for any size.
        contiguous: whether the values of a row must be consecutive in memory, too.

    Raises:
        ValueError: the tensor has another type, shape or (if ``contiguous``) stride.
    """
    fits = len(tensor.shape) == len(shape) and all(
        expected in (None, size) for expected, size in zip(shape, tensor.shape, strict=True)
    )
    apart = contiguous and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
    if not fits or tensor.dtype != dtype or apart:
        sizes = ", ".join("*" if size is None else str(size) for size in shape)
        rows = " with contiguous rows" if contiguous else ""
        raise ValueError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}; "
            f"this layout needs {dtype}[{sizes}]{rows}"
        )


def addressable(wires: torch.Tensor) -> torch.Tensor:
    """Return ``wires`` if kernels can read each row with 16-byte accesses, else a contiguous copy.

    Wires are uint8 of any number of dimensions, the last one a row's bytes.
    """
    *steps, last = wires.stride()
    fits = last == 1 and not wires.data_ptr() % ALIGNMENT
    # A step between rows counts only where there is a second row.
    if fits and not any(
        step % ALIGNMENT and size > 1 for step, size in zip(steps, wires.shape, strict=False)
    ):
        return wires
    return wires.clone(memory_format=torch.contiguous_format)


def dispatched[**P, R](
    definition: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """Return an operation that runs its definition on the host and its kernels on an NVIDIA GPU.

    ``definition`` is a function of some ``reference.py`` whose first parameter is a tensor. For a
    tensor on an NVIDIA GPU the function of that name and signature in the package's ``launch.py``
    is called, which is imported at the first such call: it needs Triton.
    """
    package, _, _ = definition.__module__.rpartition(".")
    launched: Callable[Concatenate[torch.Tensor, P], R] | None = None

    @wraps(definition)
    def operation(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal launched
        if AMD or not tensor.is_cuda:
            return definition(tensor, *args, **kwargs)
        if launched is None:
            launched = getattr(import_module(f"{package}.launch"), definition.__name__)
        return launched(tensor, *args, **kwargs)

    return operation
