"""The kernels, each a pass over memory. Same signatures as reference.py.

A program holds R whole rows at a time. Programs of the backward are persistent: each adds up the
columns of all its rows, and writes three sums of them at its end, which are added afterwards::

    program        0                1               ...
    rows           0..R-1, P R.. .  R..2R-1, ...    ...
    partial sums   [3, n]           [3, n]          ...  --sum-->  gamma, beta, bias

So the gradients do not depend on timing.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from taco_kernels.common import ceil_div, check_counted
from taco_kernels.common.device import Constants, as_tensor, device_for
from taco_kernels.common.fast_launch import start
from taco_kernels.residual_norm.reference import LONGEST_ROW, Normed, NormGradients

VALUES_A_PROGRAM = 4096
"""Values of each tensor that a program has in registers at a time, unless a row has more."""
VALUES_A_THREAD = 16
"""Values of each tensor that a thread has; the backward has three tensors and three sums of columns
in registers."""
THREADS = 512
"""Threads of the backward on a multiprocessor, so that its sums of columns fit into registers."""


@dataclass(frozen=True, repr=False, eq=False)
class RowSpec(Constants):
    """Constants of the kernels as one argument."""

    R: tl.constexpr
    """Rows a program holds."""
    N: tl.constexpr
    """Values a row."""
    WIDTH: tl.constexpr
    """Values a row in registers: a power of two."""
    CENTRES: tl.constexpr
    """Layer norm; else RMS norm."""
    ADDS: tl.constexpr
    """Whether there is what may be added last: in the forward the bias, in the backward the
    gradient of the residual stream."""
    ONE_MORE: tl.constexpr
    """Gamma is one more than what is stored."""
    EPS: tl.constexpr
    """Added to the variance; the backward does not read it."""


@lru_cache
def spec_of(n: int, centres: bool, adds: bool, one_more: bool, eps: float) -> RowSpec:
    """Return the constants of a call, cached.

    Args:
        n: values of a row.
        centres: layer norm; else RMS norm.
        adds: as ``RowSpec.ADDS``.
        one_more: gamma is one more than what is stored.
        eps: added to the variance.

    Raises:
        ValueError: rows longer than ``LONGEST_ROW``.
    """
    if n > LONGEST_ROW:
        raise ValueError(f"rows of {n} values, of at most {LONGEST_ROW}; add and normalise in turn")
    # A power of two that holds a row; the rest of it is masked.
    width = 1 << (n - 1).bit_length()
    rows = max(VALUES_A_PROGRAM // width, 1)
    return RowSpec.of(
        R=rows, N=n, WIDTH=width, CENTRES=centres, ADDS=adds, ONE_MORE=one_more, EPS=eps
    )


def warps_of(spec: RowSpec) -> int:
    """Return the warps of a program."""
    return max(spec.R.value * spec.WIDTH.value // (32 * VALUES_A_THREAD), 1)


@triton.jit
def rows_of(pointer, first, rows, C: tl.constexpr):
    """Load fp32 [R, WIDTH] of the rows from ``first`` on; values that do not exist are zeros."""
    row = first + tl.arange(0, C.R)
    column = tl.arange(0, C.WIDTH)[None, :]
    mask = (row < rows)[:, None] & (column < C.N)
    values = tl.load(pointer + row.to(tl.int64)[:, None] * C.N + column, mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit
def store_rows(pointer, values, first, rows, C: tl.constexpr):
    """Store [R, WIDTH] as the rows from ``first`` on, in the type of what ``pointer`` points to."""
    row = first + tl.arange(0, C.R)
    column = tl.arange(0, C.WIDTH)[None, :]
    mask = (row < rows)[:, None] & (column < C.N)
    pointers = pointer + row.to(tl.int64)[:, None] * C.N + column
    tl.store(pointers, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def columns_of(pointer, C: tl.constexpr):
    """Load fp32 [1, WIDTH] of a vector."""
    column = tl.arange(0, C.WIDTH)
    return tl.load(pointer + column, mask=column < C.N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def forward_kernel(
    residual, total, bias, gamma, beta, x, y, mean, inverse, rows, C: tl.constexpr
):  # fmt: skip
    """x, y and the statistics of R rows.

    Args:
        residual, total: pointers to [rows, N].
        bias, gamma, beta: pointers to [N].
        x, y: pointers to [rows, N], written.
        mean, inverse: pointers to fp32 [rows], written.
        rows: how many there are.
        C: RowSpec.
    """
    first = tl.program_id(0) * C.R
    stream = rows_of(residual, first, rows, C) + rows_of(total, first, rows, C)
    if C.ADDS:
        stream += columns_of(bias, C)
    # Rounded as it is stored: the backward has this one.
    rounded = stream.to(x.dtype.element_ty)
    store_rows(x, rounded, first, rows, C)
    stream = rounded.to(tl.float32)
    row = first + tl.arange(0, C.R)
    centre = tl.zeros([C.R], tl.float32)
    if C.CENTRES:
        centre = tl.sum(stream, axis=1) / C.N
    exists = (tl.arange(0, C.WIDTH) < C.N)[None, :]
    stream = tl.where(exists, stream - centre[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(stream * stream, axis=1) / C.N + C.EPS)
    tl.store(mean + row, centre, mask=row < rows)
    tl.store(inverse + row, scale, mask=row < rows)
    weight = columns_of(gamma, C)
    if C.ONE_MORE:
        weight += 1.0
    normed = stream * scale[:, None] * weight
    if C.CENTRES:
        normed += columns_of(beta, C)
    store_rows(y, normed, first, rows, C)


@triton.jit
def backward_kernel(
    grad_y, grad_x, x, mean, inverse, gamma, result, sums, rows, C: tl.constexpr
):  # fmt: skip
    """The gradient of x, and sums of columns. Persistent programs, R rows a step.

    Args:
        grad_y, grad_x, x: pointers to [rows, N].
        mean, inverse: pointers to fp32 [rows].
        gamma: pointer to [N].
        result: pointer to [rows, N], written.
        sums: pointer to fp32 [programs, 3, N], written.
        rows: how many there are.
        C: RowSpec; ADDS says that there is a grad_x.
    """
    weight = columns_of(gamma, C)
    if C.ONE_MORE:
        weight += 1.0
    # Sums of this thread's values; over the rows of a step they are added at the end.
    of_gamma = tl.zeros([C.R, C.WIDTH], tl.float32)
    of_beta = tl.zeros([C.R, C.WIDTH], tl.float32)
    of_bias = tl.zeros([C.R, C.WIDTH], tl.float32)
    for step in tl.range(tl.program_id(0), tl.cdiv(rows, C.R), tl.num_programs(0)):
        first = as_tensor(step) * C.R
        row = first + tl.arange(0, C.R)
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        gradient = rows_of(grad_y, first, rows, C)
        standardised = rows_of(x, first, rows, C)
        if C.CENTRES:
            standardised -= tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        # Values that do not exist have no gradient, so what they are here does not matter.
        standardised *= scale
        of_gamma += gradient * standardised
        of_beta += gradient
        gradient *= weight
        along = tl.sum(gradient * standardised, axis=1) / C.N
        update = gradient - standardised * along[:, None]
        if C.CENTRES:
            update -= (tl.sum(gradient, axis=1) / C.N)[:, None]
        update *= scale
        if C.ADDS:
            update += rows_of(grad_x, first, rows, C)
        store_rows(result, update, first, rows, C)
        of_bias += update
    column = tl.arange(0, C.WIDTH)
    mask = column < C.N
    target = sums + tl.program_id(0) * 3 * C.N + column
    tl.store(target, tl.sum(of_gamma, axis=0), mask=mask)
    tl.store(target + C.N, tl.sum(of_beta, axis=0), mask=mask)
    tl.store(target + 2 * C.N, tl.sum(of_bias, axis=0), mask=mask)


def forward(
    residual: torch.Tensor,
    total: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    one_more: bool = False,
) -> Normed:
    """Add and normalise; see reference.forward."""
    n = residual.shape[-1]
    rows = residual.numel() // n
    check_counted("rows", rows, "use smaller messages")
    spec = spec_of(n, beta is not None, bias is not None, one_more, eps)
    residual = residual.contiguous()
    x = torch.empty_like(residual)
    y = torch.empty_like(residual, dtype=gamma.dtype)
    mean, inverse = torch.empty((2, rows), dtype=torch.float32, device=x.device)
    # What is not read still needs an address.
    tensors = (
        residual,
        total.contiguous(),
        gamma if bias is None else bias,
        gamma,
        gamma if beta is None else beta,
        x,
        y,
        mean,
        inverse,
    )
    grid = (ceil_div(rows, spec.R.value),)
    # A grid of no programs is refused by CUDA.
    if rows:
        start(forward_kernel, grid, tensors, (rows,), C=spec, num_warps=warps_of(spec))
    return Normed(x, y, mean, inverse)


def backward(
    grad_y: torch.Tensor,
    grad_x: torch.Tensor | None,
    normed: Normed,
    gamma: torch.Tensor,
    centres: bool,
    one_more: bool = False,
) -> NormGradients:
    """Return the gradients of ``forward``; see reference.backward."""
    x = normed.x
    n = x.shape[-1]
    rows = x.numel() // n
    spec = spec_of(n, centres, grad_x is not None, one_more, 0.0)
    warps = warps_of(spec)
    device = device_for(x)
    programs = max(THREADS // (32 * warps), 1) * device.multiprocessors
    programs = min(ceil_div(rows, spec.R.value), programs)
    result = torch.empty_like(x)
    sums = torch.empty((programs, 3, n), dtype=torch.float32, device=x.device)
    grad_y = grad_y.contiguous()
    tensors = (
        grad_y,
        grad_y if grad_x is None else grad_x.contiguous(),
        x,
        normed.mean,
        normed.inverse,
        gamma,
        result,
        sums,
    )
    if rows:
        start(backward_kernel, (programs,), tensors, (rows,), C=spec, num_warps=warps)
    return NormGradients(result, sums.sum(0))
