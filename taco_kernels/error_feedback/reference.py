"""The memory of error feedback in plain torch: the definition that the kernel is tested against."""

import torch

from taco_kernels.common.sizes import described


def check(held: torch.Tensor, total: torch.Tensor, decoded: torch.Tensor | None) -> None:
    """Raise ValueError unless all are contiguous fp32 tensors of the same number of values."""
    for name, tensor in (("held", held), ("total", total), ("decoded", decoded)):
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.numel() != held.numel():
            raise ValueError(f"{name} is {described(tensor)}; needs contiguous float32[{held.numel()}]")


def remember(
    held: torch.Tensor, total: torch.Tensor, decoded: torch.Tensor | None, keep: float, weight: float
) -> torch.Tensor:
    """``held`` becomes ``keep * held + weight * (total - decoded)`` wherever that is finite; in place.

    LoCo's moving average (arXiv 2407.04480) for keep = 1 - weight; ``keep`` 0 and ``weight`` 1 remember the
    newest error alone. Every operation is rounded to fp32 by itself.

    Args:
        held: what is remembered, contiguous fp32.
        total: what was to be sent, contiguous fp32 of as many values.
        decoded: what has arrived, likewise; None: nothing, ``total`` is the error.

    Returns:
        ``held``.

    Raises:
        ValueError: the three are not contiguous fp32 tensors of the same number of values.
    """
    check(held, total, decoded)
    newest = (total.view(-1) - (0.0 if decoded is None else decoded.view(-1))) * weight
    if keep:
        newest = held.view(-1) * keep + newest
    held.view(-1).copy_(torch.where(torch.isfinite(newest), newest, held.view(-1)))
    return held
