"""Sizes that every wire keeps to, and the check of a setting."""

from collections.abc import Sequence

import torch

ALIGNMENT = 16
"""Bytes: wires and their chunks start at multiples of it, so that kernels use 16-byte accesses."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's cdiv may be called by kernels, and takes microseconds on the host.)"""
    return -(-a // b)


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """``size`` bytes up to the next multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless the setting's value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(map(str, allowed))}")


def described(tensor: torch.Tensor) -> str:
    """Type, shape and strides of a tensor, for the messages of errors."""
    return f"{tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}"
