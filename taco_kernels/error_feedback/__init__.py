"""What error feedback remembers of a compression, in one pass.

A Triton kernel on CUDA tensors, ``reference.py`` elsewhere.
"""

import torch

from taco_kernels.error_feedback import reference

__all__ = ["remember"]


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
    for name, tensor in (
        ("held", held),
        ("total", total),
        ("decoded", total if decoded is None else decoded),
    ):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.numel() != held.numel():
            raise ValueError(
                f"{name} is {tensor.dtype}{list(tensor.shape)}; needs contiguous fp32[{held.numel()}]"
            )
    if held.is_cuda:
        from taco_kernels.error_feedback import launch  # a CPU-only host may have no Triton

        return launch.remember(held, total, decoded, keep, weight)
    return reference.remember(held, total, decoded, keep, weight)
