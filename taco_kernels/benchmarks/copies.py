"""What a device copy takes: the denominator of the kernels' rates."""

import torch
import triton
import triton.language as tl

from taco_kernels.benchmarks.timing import buffers_for, microseconds

TILE = 4096


@triton.jit
def copy_kernel(source, target, count, T: tl.constexpr):
    """target = source, T elements a program."""
    place = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count)


def copy_times(numel: int, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of a copy by torch, which calls the driver, and by a kernel."""
    pairs = [
        (torch.randn(numel, device="cuda").to(dtype), torch.empty(numel, device="cuda", dtype=dtype))
        for _ in range(buffers_for(2 * numel * dtype.itemsize))
    ]
    grid = (triton.cdiv(numel, TILE),)
    return {
        "torch": microseconds([lambda a=a, b=b: b.copy_(a) for a, b in pairs]),
        "kernel": microseconds([lambda a=a, b=b: copy_kernel[grid](a, b, numel, T=TILE) for a, b in pairs]),
    }


def copy_rate(numel: int, dtype: torch.dtype) -> tuple[float, float]:
    """Microseconds and GB/s (bytes read and written) of the faster copy.

    Of 1 GiB the driver's is slower than kernels that read and write as much.
    """
    us = min(copy_times(numel, dtype).values())
    return us, 2 * numel * dtype.itemsize / us / 1e3
