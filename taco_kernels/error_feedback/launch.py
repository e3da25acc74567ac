"""The kernel of error feedback's memory, and its launch."""

import torch
import triton
import triton.language as tl

from taco_kernels.common.fast_launch import start
from taco_kernels.common.sizes import ceil_div
from taco_kernels.error_feedback.reference import check

TILE, WARPS = 2048, 4
"""Values a program; 16 a thread."""


@triton.jit
def remember_kernel(
    held, total, decoded, numel,
    DECODED: tl.constexpr, KEEP: tl.constexpr, WEIGHT: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """held = KEEP * held + WEIGHT * (total - decoded) where finite."""
    place = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    inside = place < numel
    newest = tl.load(total + place, mask=inside, other=0.0)
    if DECODED:
        newest -= tl.load(decoded + place, mask=inside, other=0.0)
    newest = newest * WEIGHT
    if KEEP != 0.0:
        newest = tl.load(held + place, mask=inside, other=0.0) * KEEP + newest
    finite = (newest.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    tl.store(held + place, newest, mask=inside & finite)


def remember(
    held: torch.Tensor, total: torch.Tensor, decoded: torch.Tensor | None, keep: float, weight: float
) -> torch.Tensor:
    """See reference.remember. What stays is not written, nor read if keep is 0."""
    check(held, total, decoded)
    start(
        remember_kernel,
        (ceil_div(held.numel(), TILE),),
        (held, total, total if decoded is None else decoded),
        (held.numel(),),
        DECODED=decoded is not None,
        KEEP=keep,
        WEIGHT=weight,
        T=TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return held
