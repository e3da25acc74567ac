"""The Hadamard matrices in device memory.

A kernel here has several phases with a matrix each. Made once and loaded at the start of a phase they take
turns in shared memory, so that more programs fit on a multiprocessor, and cost less than computing them.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from taco_kernels.common.hadamard import sylvester
from taco_kernels.taco.spec import Spec


@triton.jit
def sylvester_kernel(out, VALUE: tl.constexpr, SHUFFLED: tl.constexpr, C: tl.constexpr):
    """Write ``sylvester`` to out[POINT, POINT]."""
    at = out + tl.arange(0, C.POINT)[:, None] * C.POINT + tl.arange(0, C.POINT)[None, :]
    tl.store(at, sylvester(C, VALUE, SHUFFLED, out.dtype.element_ty))


@triton.jit
def load_matrix(matrix, C: tl.constexpr):
    """[POINT, POINT] at ``matrix``."""
    return tl.load(matrix + tl.arange(0, C.POINT)[:, None] * C.POINT + tl.arange(0, C.POINT)[None, :])


@lru_cache
def encode_matrix(spec: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What encode multiplies values of ``dtype`` with."""
    return _matrix(spec, 1 / spec.G.value, True, torch.bfloat16 if dtype == torch.float32 else dtype, device)


@lru_cache
def decode_matrix(spec: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What decode multiplies codes with (``dtype`` fp16), and decode_sum sums (bf16)."""
    return _matrix(spec, 1.0, False, dtype, device)


def _matrix(
    spec: Spec, value: float, shuffled: bool, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    out = torch.empty(spec.POINT.value, spec.POINT.value, dtype=dtype, device=device)
    sylvester_kernel[(1,)](out, VALUE=value, SHUFFLED=shuffled, C=spec)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams will read it
    return out
