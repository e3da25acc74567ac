"""The definition in plain torch, in fp32 (fp64 of fp64 tensors) with one rounding at the end."""

from typing import NamedTuple

import torch

LONGEST_ROW = 16384
"""Values of a row, at most: longer ones need more threads than a kernel's program has."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the arithmetic."""
    return torch.promote_types(dtype, torch.float32)


class Normed(NamedTuple):
    """The result of the forward, and the statistics that the backward needs."""

    x: torch.Tensor
    """The residual stream after the add, of the residual's shape and dtype."""
    y: torch.Tensor
    """Its norm, of the same shape and the weight's dtype."""
    mean: torch.Tensor
    """fp32 ``[rows]``; zeros without ``beta``."""
    inverse: torch.Tensor
    """fp32 ``[rows]``: one over the root of the variance, or of the mean square."""


class NormGradients(NamedTuple):
    """The gradients of one residual add and norm."""

    x: torch.Tensor
    """Of ``x`` in whole: by the norm and by the residual stream."""
    columns: torch.Tensor
    """fp32 ``[3, n]``: of gamma, of beta and of the bias."""


def forward(
    residual: torch.Tensor,
    total: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    one_more: bool = False,
) -> Normed:
    """Add and normalise.

    Args:
        residual: ``[..., n]``, bf16, fp16 or fp32.
        total: what is added, of its shape.
        bias: ``[n]``, added too; None: there is none.
        gamma: ``[n]``, whose dtype the norm gets.
        beta: ``[n]``; None: RMS norm.
        eps: added to the variance.
        one_more: gamma is one more than what is stored.
    """
    wide = _wide(residual.dtype)
    x = residual.to(wide) + total.to(wide)
    if bias is not None:
        x = x + bias.to(wide)
    # The norm is of the stream as it is stored, which is what its backward has.
    x = x.to(residual.dtype)
    rows = x.to(wide).reshape(-1, x.shape[-1])
    mean = torch.zeros(len(rows), dtype=wide, device=x.device)
    if beta is not None:
        mean = rows.mean(1)
    centred = rows - mean[:, None]
    inverse = torch.rsqrt(centred.square().mean(1) + eps)
    y = centred * inverse[:, None] * (gamma.to(wide) + one_more)
    if beta is not None:
        y = y + beta.to(wide)
    return Normed(x, y.to(gamma.dtype).view(x.shape), mean, inverse)


def backward(
    grad_y: torch.Tensor,
    grad_x: torch.Tensor | None,
    normed: Normed,
    gamma: torch.Tensor,
    centres: bool,
    one_more: bool = False,
) -> NormGradients:
    """Return the gradients of ``forward``.

    Args:
        grad_y: of the norm.
        grad_x: of the residual stream after the add; None: it has none.
        normed: what ``forward`` returned; its ``y`` is not read.
        gamma: as there.
        centres: whether it was a layer norm.
        one_more: as there.
    """
    n = grad_y.shape[-1]
    wide = _wide(normed.x.dtype)
    grad = grad_y.to(wide).reshape(-1, n)
    centred = normed.x.to(wide).reshape(-1, n) - normed.mean[:, None]
    standardised = centred * normed.inverse[:, None]
    scaled = grad * (gamma.to(wide) + one_more)
    result = scaled - standardised * (scaled * standardised).mean(1, keepdim=True)
    if centres:
        result = result - scaled.mean(1, keepdim=True)
    result = result * normed.inverse[:, None]
    if grad_x is not None:
        result = result + grad_x.to(wide).reshape(-1, n)
    columns = torch.stack([(grad * standardised).sum(0), grad.sum(0), result.sum(0)])
    return NormGradients(result.to(normed.x.dtype).view(normed.x.shape), columns)
