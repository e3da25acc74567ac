"""Groups of a wire in the Hadamard domain: encode_groups and its inverse, decode_groups (reference.py)."""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import shuffle, transform, unshuffle
from taco_kernels.common.packing import store_groups, store_integers
from taco_kernels.common.planes import across_chunks, behind, load_codes
from taco_kernels.common.rounding import code_values
from taco_kernels.common.unpacking import load_halves, load_singles, offset
from taco_kernels.taco import quadratic_kernels as quadratic


@triton.jit
def dual_step(s, alpha, C: tl.constexpr):
    """What codes are multiplied with, of a group's dual scales."""
    return tl.div_rn(s * (1.0 / C.ROOT), alpha)


@triton.jit
def scale_places(row, first, groups, SIZE: tl.constexpr, C: tl.constexpr):
    """Places [R] of the scales, of SIZE bytes each, of groups ``row``; how far behind the second ones lie."""
    if C.ROW:
        place, apart = across_chunks(first, 1, SIZE, C), C.ROW
    else:
        place, apart = row, groups
    return place, apart


@triton.jit
def load_step(wire, first, groups, C: tl.constexpr):
    """fp32[R] steps of groups first..., 0 beyond the last."""
    row = first + tl.arange(0, C.R)
    scales = behind(wire, C.PAYLOAD, groups, C)
    if C.DUAL:
        place, apart = scale_places(row, first, groups, 4, C)
        at = scales.to(tl.pointer_type(tl.float32)) + place
        step = tl.load(at, mask=row < groups, other=0.0)
        if not C.MERGED:
            step = dual_step(step, tl.load(at + apart, mask=row < groups, other=1.0), C)
    else:
        place, _ = scale_places(row, first, groups, 2, C)
        s = scales.to(tl.pointer_type(tl.bfloat16))
        step = tl.load(s + place, mask=row < groups, other=0.0).to(tl.float32)
    return step


@triton.jit
def decode_groups(wire, first, groups, matrix, C: tl.constexpr):
    """fp32[R, G]: groups first... of the chunk at wire, out of the Hadamard domain."""
    step = load_step(wire, first, groups, C)
    if C.INTEGER and not C.INTERPRET:
        q = load_halves(wire, first, groups, C)
        OFFSET: tl.constexpr = offset(C.BITS, C.BEND)
    else:
        q = code_values(load_codes(wire, first, groups, C), tl.float16, C)
        if C.BEND > 0:
            q = quadratic.value_of(q, 1.0, C)
        OFFSET: tl.constexpr = 0
    if C.HADAMARD:
        h = transform(shuffle(q, C), matrix, C)
        if OFFSET != 0:
            h = tl.where(tl.arange(0, C.G)[None, :] == 0, h - OFFSET * C.G, h)
        h = unshuffle(h * step[:, None], C)
    else:
        # Not a product: LLVM narrows one of fp16 and bf16 that is rounded to fp16, and loses small steps.
        h = tl.fma(q.to(tl.float32) - OFFSET, step[:, None], 0.0)
    return h


@triton.jit
def load_values(wire, first, groups, C: tl.constexpr):
    """Values fp32[R, G] of codes, and step fp32[R]: groups first... at wire."""
    if C.INTEGER:
        values = load_singles(wire, first, groups, C)
        if C.BEND > 0:
            values = quadratic.value_of(values, 1.0, C)
    else:
        values = code_values(load_codes(wire, first, groups, C), tl.float32, C)
    return values, load_step(wire, first, groups, C)


@triton.jit
def sum_of_squares(h, C: tl.constexpr):
    """fp32[R] over the columns of h[R, G]."""
    if C.G < 64:
        total = tl.sum(h * h, axis=1)
    else:  # fused multiply-adds first, along columns that one thread holds
        even, odd = tl.split(tl.reshape(h, [C.R, C.G // 4, 2, 2]))
        a, b = tl.split(even)
        c, d = tl.split(odd)
        total = tl.sum(tl.fma(a, a, tl.fma(b, b, tl.fma(c, c, d * d))), axis=1)
    return total


@triton.jit
def extremes(h, C: tl.constexpr):
    """fp32[R] each of h[R, G]: the largest of h and of -h (of signed scales alone), and of |h|.

    The last is not below infinity where a number is not finite: the transform spreads a NaN over its group,
    where a maximum cannot miss it; without it, NaN counts as infinity.
    """
    if C.SIGNED:
        up = h
        if not C.HADAMARD:
            up = tl.where(h == h, h, float("inf"))
        high, low = tl.max(up, axis=1), -tl.min(h, axis=1)
        amax = tl.maximum(high, low)
    else:
        magnitude = tl.abs(h)
        if not C.HADAMARD:
            magnitude = tl.where(h == h, magnitude, float("inf"))
        amax = tl.max(magnitude, axis=1)
        high, low = amax, amax
    return high, low, amax


@triton.jit
def store_padding(wire, first, groups, C: tl.constexpr):
    """Zeros up to the next multiple of 16 bytes, behind the chunks whose first group is in the tile."""
    if C.ROW:
        USED: tl.constexpr = C.BYTES * C.ROW
        if USED % 16 != 0:
            chunk = (first // C.ROW).to(tl.int64) + tl.arange(0, C.R)[:, None]  # some are behind the tile's
            pad = USED + tl.arange(0, 16)[None, :]
            mask = (pad < (USED + 15) // 16 * 16) & (chunk * C.ROW < groups)
            tl.store(wire + chunk * C.STRIDE + pad, tl.zeros([C.R, 16], tl.uint8), mask=mask)
    else:
        used = tl.full((), C.BYTES, tl.int64) * groups
        pad = used + tl.arange(0, 16)
        end = tl.where(first == 0, (used + 15) // 16 * 16, 0)
        tl.store(wire + pad, tl.zeros([16], tl.uint8), mask=pad < end)


@triton.jit
def encode_groups(h, wire, first, groups, C: tl.constexpr):
    """Write h fp32[R, G] as groups first... of the chunk at wire."""
    high, low, amax = extremes(h, C)
    bad = (amax < float("inf")) == 0
    zero = amax == 0.0
    amax = tl.maximum(tl.where(bad, 0.0, amax), C.FLOOR)
    qmax = tl.full([C.R], C.QMAX, tl.float32)
    row = first + tl.arange(0, C.R)
    scales = behind(wire, C.PAYLOAD, groups, C)
    if C.DUAL:
        inverse = tl.div_rn(qmax, amax)
        mean_square = tl.where(bad, 0.0, sum_of_squares(h, C))
        if not C.HADAMARD:
            mean_square = mean_square * (1.0 / C.G)
        alpha = tl.div_rn(qmax, tl.sqrt_rn(mean_square + 1e-6))
        alpha = tl.minimum(tl.maximum(alpha, 1e-3), 1e3)
        s = tl.maximum(alpha * amax * (C.ROOT / C.QMAX), 1e-12)
        s = tl.where(bad, float("nan"), tl.where(zero, 0.0, s))
        place, apart = scale_places(row, first, groups, 4, C)
        at = scales.to(tl.pointer_type(tl.float32)) + place
        if C.MERGED:
            tl.store(at, dual_step(s, alpha, C), mask=row < groups)
        else:
            tl.store(at, s, mask=row < groups)
            tl.store(at + apart, alpha, mask=row < groups)
    else:
        if C.BEND > 0:
            near = tl.where(bad, 0.0, tl.minimum(high, low))
            step = tl.maximum(amax * C.FAR, near * C.NEAR)
        elif C.SIGNED:
            near = tl.div_rn(tl.where(bad, 0.0, tl.minimum(high, low)), qmax)
            step = tl.maximum(amax * 2.0 ** (1 - C.BITS), near)
        else:
            step = tl.div_rn(amax, qmax)
        ROUNDING: tl.constexpr = 0x8000 if C.BEND > 0 else 0xFFFF  # to the nearest bf16, or up
        step = ((step.to(tl.int32, bitcast=True) + ROUNDING) & -65536).to(tl.float32, bitcast=True)
        if C.SIGNED:
            step = tl.where(high > low, -step, step)
        inverse = tl.div_rn(tl.full([C.R], 1.0, tl.float32), step)
        step = tl.where(bad, float("nan"), tl.where(zero, 0.0, step))
        place, _ = scale_places(row, first, groups, 2, C)
        at = scales.to(tl.pointer_type(tl.bfloat16)) + place
        tl.store(at, step.to(tl.bfloat16), mask=row < groups)
    store_padding(wire, first, groups, C)
    inverse = tl.where(bad, 0.0, inverse)
    if C.BEND > 0:
        store_integers(quadratic.nearest_codes(h, inverse, C), wire, first, groups, C)
    else:
        store_groups(h, inverse, wire, first, groups, C)
