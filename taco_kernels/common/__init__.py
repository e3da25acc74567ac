"""What the codecs share: sizes and checks of wires, and the choice between a definition and its kernels.

``reference`` has arithmetic in plain torch; ``device``, ``fast_launch``, ``hadamard`` and ``packing`` need
Triton, which a host without a GPU may lack.
"""

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Concatenate

import torch

ALIGNMENT = 16
"""Bytes: wires and their chunks start at multiples of it, so that kernels use 16-byte accesses."""
AMD = torch.version.hip is not None
"""There ``is_cuda`` is true of tensors, too; most kernels contain PTX, which is NVIDIA's."""
if AMD:
    logging.getLogger("taco_kernels").warning(
        "AMD GPU: codecs run as plain torch, to the same bytes and far slower; the kernels are NVIDIA's"
    )


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's cdiv may be called by kernels, and takes microseconds on the host.)"""
    return -(-a // b)


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """``size`` bytes up to the next multiple of ``alignment``."""
    return -(-size // alignment) * alignment


MOST_COUNTED = 2**31 - 2**15
"""Kernels count groups, blocks, tiles and rows in 32 bits, up to a tile and a step beyond the last one."""


def check_counted(name: str, count: int, advice: str) -> None:
    """Raise ValueError where a call has more groups, blocks or tiles than its kernel can count.

    Args:
        name: what is counted, for the message.
        count: how many the call has, over all rows and chunks.
        advice: what the caller can change, for the message.
    """
    if count >= MOST_COUNTED:
        raise ValueError(f"{count} {name} in one call, of at most {MOST_COUNTED}; {advice}")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless the setting's value is one of those allowed."""
    if value not in allowed:
        raise ValueError(
            f"{name}={value!r} is not supported; choose one of {', '.join(map(str, allowed))}"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int | None],
    contiguous: bool = False,
) -> None:
    """Raise ValueError unless ``tensor`` is dtype[shape], where None stands for any size.

    ``contiguous``: the values of a row must be consecutive in memory.
    """
    fits = len(tensor.shape) == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if (
        not fits
        or tensor.dtype != dtype
        or (contiguous and tensor.shape[-1] > 1 and tensor.stride(-1) != 1)
    ):
        sizes = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}; "
            f"this layout needs {dtype}[{sizes}]{' with contiguous rows' * contiguous}"
        )


def addressable(wires: torch.Tensor) -> torch.Tensor:
    """``wires`` if kernels can read each row with 16-byte accesses, else a contiguous copy."""
    *steps, last = wires.stride()
    fits = last == 1 and not wires.data_ptr() % ALIGNMENT
    if fits and not any(
        step % ALIGNMENT and size > 1 for step, size in zip(steps, wires.shape, strict=False)
    ):
        return wires
    return wires.clone(memory_format=torch.contiguous_format)


def dispatched[**P, R](
    definition: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """``definition``, a function of some ``reference.py`` that begins with a tensor; for a tensor on an
    NVIDIA GPU the function of that name and signature in the package's ``launch.py``."""
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
