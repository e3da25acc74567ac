"""Groups of a wire: writing codes and steps, reading and summing them, and the rotation."""

import triton
import triton.language as tl

from taco_kernels.triton.hadamard import shuffle, transform, unshuffle
from taco_kernels.triton.planes import store_codes
from taco_kernels.triton.rounding import quantize
from taco_kernels.triton.unpacking import add_products, load_code_words, magic_bits


@triton.jit
def rotation_matrix(VALUE: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, dtype: tl.constexpr):
    """dtype[POINT, POINT]: VALUE * (-1)^popcount(i & j) inside blocks of BLOCK, zero outside.

    Columns, and with ROWS rows too, are in the order of ``shuffle``.
    """
    row, column = tl.arange(0, H.POINT)[:, None], tl.arange(0, H.POINT)[None, :]
    column = (column & ~62) | ((column & 6) << 3) | ((column >> 2) & 14)
    if ROWS:
        row = (row & ~62) | ((row & 6) << 3) | ((row >> 2) & 14)
    parity = row & column & (H.BLOCK - 1)
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    value = tl.where((parity & 1) == 1, -VALUE, VALUE)
    return tl.where((row // H.BLOCK) == (column // H.BLOCK), value, 0.0).to(dtype)


@triton.jit
def rotated(x, matrix, H: tl.constexpr):
    """fp32[RH, POINT] = x[RH, POINT] (bf16, fp16 or fp32) times rotation_matrix without ROWS."""
    return unshuffle(transform(x, matrix, H), H)


@triton.jit
def rotated_back(h, matrix, H: tl.constexpr):
    """fp32[RH, POINT] = h fp32[RH, POINT] times rotation_matrix with ROWS."""
    return unshuffle(transform(shuffle(h, H), matrix, H), H)


@triton.jit
def write_groups(h, wire, first, groups, C: tl.constexpr):
    """Write h fp32[R, G] as groups first... of the row at wire; the first tile zeroes the row's padding."""
    magnitude = tl.where(h == h, tl.abs(h), float("inf"))
    amax = tl.max(magnitude, axis=1)
    bad = amax == float("inf")
    zero = amax == 0.0
    amax = tl.maximum(tl.where(bad, 0.0, amax), C.FLOOR)
    step = tl.div_rn(amax, tl.full([C.R], C.QMAX, tl.float32))
    step = ((step.to(tl.int32, bitcast=True) + 0xFF) & -256).to(tl.float32, bitcast=True)
    inverse = tl.where(bad, 0.0, tl.div_rn(tl.full([C.R], 1.0, tl.float32), step))
    step = tl.where(bad, float("nan"), tl.where(zero, 0.0, step))
    row = first + tl.arange(0, C.R)
    steps = wire + tl.full((), C.PAYLOAD, tl.int64) * groups
    tl.store(steps.to(tl.pointer_type(tl.float32)) + row, step, mask=row < groups)
    used = tl.full((), C.PAYLOAD + 4, tl.int64) * groups
    pad = used + tl.arange(0, 16)
    tl.store(wire + pad, tl.zeros([16], tl.uint8), mask=(pad < (used + 15) // 16 * 16) & (first == 0))
    store_codes(quantize(h, inverse, 0, C), wire, first, groups, C)


@triton.jit
def load_steps(wire, first, groups, C: tl.constexpr):
    """fp32[R] steps of groups first..., 0 beyond the last."""
    row = first + tl.arange(0, C.R)
    steps = (wire + tl.full((), C.PAYLOAD, tl.int64) * groups).to(tl.pointer_type(tl.float32))
    return tl.load(steps + row, mask=row < groups, other=0.0)


@triton.jit
def sum_groups(wire, sender_stride, first, groups, S: tl.constexpr, C: tl.constexpr):
    """fp32[R, G]: sum over S senders of groups first... of the row at wire, in their order."""
    t0 = tl.zeros([C.R, C.G // 4], tl.float32)
    t1, t2, t3 = t0, t0, t0
    magic = magic_bits(groups)
    if S <= 8:  # unrolled, so that the senders' loads are in flight together
        for s in tl.static_range(0, S):
            sender = wire + tl.full((), s, tl.int64) * sender_stride
            words, step = load_code_words(sender, first, groups, C), load_steps(sender, first, groups, C)
            t0, t1, t2, t3 = add_products(t0, t1, t2, t3, words, step, magic, C)
    else:
        for s in range(0, S):
            sender = wire + (tl.full((), 0, tl.int64) + s) * sender_stride
            words, step = load_code_words(sender, first, groups, C), load_steps(sender, first, groups, C)
            t0, t1, t2, t3 = add_products(t0, t1, t2, t3, words, step, magic, C)
    return tl.reshape(tl.join(tl.join(t0, t2), tl.join(t1, t3)), [C.R, C.G])
