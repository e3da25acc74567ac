"""Groups of a wire: writing and reading codes and steps, and the rotation."""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import odd, shuffled, transform, unshuffle
from taco_kernels.common.packing import store_groups
from taco_kernels.common.unpacking import add_products, load_code_words, magic_bits


@triton.jit
def rotation_matrix(VALUE: tl.constexpr, H: tl.constexpr, dtype: tl.constexpr):
    """dtype[POINT, POINT]: VALUE * (-1)^popcount(i & j) inside blocks of BLOCK, zero outside.

    Columns are in the order of ``common.hadamard.shuffle``.
    """
    row, column = tl.arange(0, H.POINT)[:, None], tl.arange(0, H.POINT)[None, :]
    column = shuffled(column)
    value = tl.where(odd(row & column & (H.BLOCK - 1)) == 1, -VALUE, VALUE)
    return tl.where((row // H.BLOCK) == (column // H.BLOCK), value, 0.0).to(dtype)


@triton.jit
def rotated(x, matrix, H: tl.constexpr):
    """fp32[RH, POINT] = x[RH, POINT] (bf16, fp16 or fp32) times rotation_matrix."""
    return unshuffle(transform(x, matrix, H), H)


@triton.jit
def larger(a, b):
    """The larger of two, or NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def steps_of(amax, C: tl.constexpr):
    """Steps fp32[R] of groups with these finite largest magnitudes, and their reciprocals."""
    qmax = tl.full([C.R], C.QMAX, tl.float32)
    if C.INTERPRET:  # whose fused multiply-add rounds twice
        step = tl.div_rn(amax, qmax)
    else:  # a quotient by a constant, correctly rounded (Markstein): a third of a division's instructions
        step = amax * (1.0 / C.QMAX)
        step = tl.fma(tl.fma(-step, qmax, amax), tl.full([C.R], 1.0 / C.QMAX, tl.float32), step)
    step = ((step.to(tl.int32, bitcast=True) + 0xFF) & -256).to(tl.float32, bitcast=True)
    if C.INTERPRET:
        inverse = tl.div_rn(tl.full([C.R], 1.0, tl.float32), step)
    else:
        inverse = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [step], tl.float32, True, 1)
    return step, inverse


@triton.jit
def write_groups(h, wire, first, groups, C: tl.constexpr):
    """Write h fp32[R, G] as groups first... of the row at wire; the first tile zeroes the row's padding."""
    if C.INTERPRET:  # slow with a function of ours
        amax = tl.max(tl.where(h == h, tl.abs(h), float("inf")), axis=1)
    else:
        amax = tl.reduce(tl.abs(h), 1, larger)
    bad = (amax < float("inf")) == 0
    zero = amax == 0.0
    step, inverse = steps_of(tl.maximum(tl.where(bad, 0.0, amax), C.FLOOR), C)
    inverse = tl.where(bad, 0.0, inverse)
    step = tl.where(bad, float("nan"), tl.where(zero, 0.0, step))
    row = first + tl.arange(0, C.R)
    steps = wire + tl.full((), C.PAYLOAD, tl.int64) * groups
    tl.store(steps.to(tl.pointer_type(tl.float32)) + row, step, mask=row < groups)
    used = tl.full((), C.PAYLOAD + 4, tl.int64) * groups
    pad = used + tl.arange(0, 16)
    end = tl.where(first == 0, (used + 15) // 16 * 16, 0)
    tl.store(wire + pad, tl.zeros([16], tl.uint8), mask=pad < end)
    store_groups(h, inverse, wire, first, groups, C)


@triton.jit
def load_steps(wire, first, groups, C: tl.constexpr):
    """fp32[R] steps of groups first..., 0 beyond the last."""
    row = first + tl.arange(0, C.R)
    steps = (wire + tl.full((), C.PAYLOAD, tl.int64) * groups).to(tl.pointer_type(tl.float32))
    return tl.load(steps + row, mask=row < groups, other=0.0)


@triton.jit
def decoded_groups(wire, first, groups, C: tl.constexpr):
    """fp32[R, G]: q * step of groups first... of the row at wire."""
    zero = tl.zeros([C.R, C.G // 4], tl.float32)
    words, step = load_code_words(wire, first, groups, C), load_steps(wire, first, groups, C)
    t0, t1, t2, t3 = add_products(zero, zero, zero, zero, words, step, magic_bits(groups), C)
    return tl.reshape(tl.join(tl.join(t0, t2), tl.join(t1, t3)), [C.R, C.G])
