"""The memory of error feedback in plain torch: the definition that the kernel is tested against."""

import torch


def remember(
    held: torch.Tensor, total: torch.Tensor, decoded: torch.Tensor | None, keep: float, weight: float
) -> torch.Tensor:
    """See ``taco_kernels.error_feedback.remember``."""
    newest = (total.view(-1) - (0.0 if decoded is None else decoded.view(-1))) * weight
    if keep:
        newest = held.view(-1) * keep + newest
    held.view(-1).copy_(torch.where(torch.isfinite(newest), newest, held.view(-1)))
    return held
