"""Device functions between a tensor, the Hadamard domain and a wire; reference.py defines them.

``rows`` is (run, inner, stride_outer, stride_inner). A tensor is contiguous, or (FLAGS.STRIDED) rows of
``run`` groups, each contiguous, row r at ``(r // inner) * stride_outer + (r % inner) * stride_inner``; see
launch.rows_of.
"""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import shuffle, transform, unshuffle
from taco_kernels.common.packing import (
    MAGIC,
    across_chunks,
    add_products,
    after_plane,
    code_values,
    load_code_words,
    load_codes,
    load_halves,
    load_singles,
    magic_bits,
    number,
    offset,
    store_groups,
    store_integers,
)
from taco_kernels.taco import reference


@triton.jit
def tile_pointers(x, first, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """Pointers [R, G] to groups first, first + 1, ..."""
    column = tl.arange(0, C.G)[None, :]
    if FLAGS.STRIDED:
        run, inner, stride_outer, stride_inner = rows
        group = first + tl.arange(0, C.R)
        row = group // run
        start = (row // inner).to(tl.int64) * stride_outer + (row % inner).to(
            tl.int64
        ) * stride_inner
        at = x + (start + (group % run).to(tl.int64) * C.G)[:, None] + column
    else:
        at = x + first.to(tl.int64) * C.G + (tl.arange(0, C.R) * C.G)[:, None] + column
    return at


@triton.jit
def tile_mask(first, numel, FLAGS: tl.constexpr, C: tl.constexpr):
    """Which of groups first... lie inside: [R, 1], or [R, G] where the last group is not whole (TAIL)."""
    left = numel - first.to(tl.int64) * C.G
    before = (tl.arange(0, C.R) * C.G)[:, None]
    if (
        FLAGS.TAIL
    ):  # 32 bits and few places of values: the compiler keeps them in registers through the loop
        left = tl.maximum(tl.minimum(left, C.R * C.G), 0).to(tl.int32)
        mask = tl.arange(0, C.G)[None, :] < left - before
    else:
        mask = before < left
    return mask


@triton.jit
def load_tile(x, first, numel, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """[R, G] groups first..., zeros beyond numel."""
    return tl.load(
        tile_pointers(x, first, rows, FLAGS, C), mask=tile_mask(first, numel, FLAGS, C), other=0.0
    )


@triton.jit
def store_tile(x, value, first, numel, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """Store [R, G] in x's type; nothing beyond numel."""
    at = tile_pointers(x, first, rows, FLAGS, C)
    tl.store(at, value.to(x.dtype.element_ty), mask=tile_mask(first, numel, FLAGS, C))


SIXTEENTHS = tl.constexpr(reference.SIXTEENTHS)
ONES = tl.constexpr(2.0**23)  # fp32 with this much added is an integer


@triton.jit
def quadratic_value_of(u, UNIT: tl.constexpr, C: tl.constexpr):
    """UNIT^2 times the values of codes, from u, UNIT times those: exact, in fp16 where UNIT is 1."""
    return u * (tl.abs(u) + UNIT * (2 * C.BEND + 1))


@triton.jit
def quadratic_codes(h, inverse, C: tl.constexpr):
    """int32[R, G]: codes of h[R, G] * inverse[R] plus 2^(BITS - 1), in the lowest bits. See fixed_point."""
    v = h * inverse[:, None]
    x = tl.abs(v) + (SIXTEENTHS + C.BEND * (C.BEND + 1))
    x = x - (SIXTEENTHS - 1.0 / 32)
    n = tl.sqrt(x) + (ONES - 0.5)  # the approximate root; rounds down, as no root is an integer
    u = n - (ONES + C.BEND)
    u = (u.to(tl.int32, bitcast=True) | (v.to(tl.int32, bitcast=True) & -0x80000000)).to(
        tl.float32, bitcast=True
    )
    return (u + (MAGIC + 2 ** (C.BITS - 1))).to(tl.int32, bitcast=True)


@triton.jit
def add_quadratic_products(t0, t1, t2, t3, words, step, magic, C: tl.constexpr):
    """unpacking.add_products of this grid. Every second value is 256^2 times too large in its place."""
    step = tl.broadcast_to(step[:, None], [C.R, C.G // 4])
    small = step * (1.0 / 65536.0)
    t0 = tl.fma(quadratic_value_of(number(words, magic, 0xFF, 1.0, C), 1.0, C), step, t0)
    t1 = tl.fma(quadratic_value_of(number(words, magic, 0xFF00, 256.0, C), 256.0, C), small, t1)
    words = words >> 16
    t2 = tl.fma(quadratic_value_of(number(words, magic, 0xFF, 1.0, C), 1.0, C), step, t2)
    t3 = tl.fma(quadratic_value_of(number(words, magic, 0xFF00, 256.0, C), 256.0, C), small, t3)
    return t0, t1, t2, t3


@triton.jit
def dual_step(s, alpha, C: tl.constexpr):
    """What codes are multiplied with, of a group's dual scales."""
    return tl.div_rn(s * (1.0 / C.ROOT), alpha)


@triton.jit
def scale_places(row, first, groups, SIZE: tl.constexpr, C: tl.constexpr):
    """Places [R] of the scales, of SIZE bytes each, of groups ``row``; the distance to the second ones."""
    if C.ROW:
        place, distance = across_chunks(first, 1, SIZE, C), C.ROW
    else:
        place, distance = row, groups
    return place, distance


@triton.jit
def load_step(wire, first, groups, C: tl.constexpr):
    """fp32[R] steps of groups first..., 0 beyond the last."""
    row = first + tl.arange(0, C.R)
    scales = after_plane(wire, C.PAYLOAD, groups, C)
    if C.DUAL:
        place, distance = scale_places(row, first, groups, 4, C)
        at = scales.to(tl.pointer_type(tl.float32)) + place
        step = tl.load(at, mask=row < groups, other=0.0)
        if not C.MERGED:
            step = dual_step(step, tl.load(at + distance, mask=row < groups, other=1.0), C)
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
            q = quadratic_value_of(q, 1.0, C)
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
def decode_two(wires, wire_stride, first, groups, matrix, C: tl.constexpr):
    """fp32[R, G]: the sum of two senders' groups. The transform of codes is one product each, and exact; that
    of a sum in fp32 is three."""
    one = decode_groups(wires, first, groups, matrix, C)
    return one + decode_groups(wires + wire_stride, first, groups, matrix, C)


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
    """Zeros up to the next multiple of 16 bytes, after the chunks whose first group is in the tile."""
    if C.ROW:
        USED: tl.constexpr = C.BYTES * C.ROW
        if USED % 16 != 0:
            chunk = (first // C.ROW).to(tl.int64) + tl.arange(0, C.R)[
                :, None
            ]  # some are after the tile's
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
    scales = after_plane(wire, C.PAYLOAD, groups, C)
    if C.DUAL:
        inverse = tl.div_rn(qmax, amax)
        mean_square = tl.where(bad, 0.0, sum_of_squares(h, C))
        if not C.HADAMARD:
            mean_square = mean_square * (1.0 / C.G)
        alpha = tl.div_rn(qmax, tl.sqrt_rn(mean_square + 1e-6))
        alpha = tl.minimum(tl.maximum(alpha, 1e-3), 1e3)
        s = tl.maximum(alpha * amax * (C.ROOT / C.QMAX), 1e-12)
        s = tl.where(bad, float("nan"), tl.where(zero, 0.0, s))
        place, distance = scale_places(row, first, groups, 4, C)
        at = scales.to(tl.pointer_type(tl.float32)) + place
        if C.MERGED:
            tl.store(at, dual_step(s, alpha, C), mask=row < groups)
        else:
            tl.store(at, s, mask=row < groups)
            tl.store(at + distance, alpha, mask=row < groups)
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
        store_integers(quadratic_codes(h, inverse, C), wire, first, groups, C)
    else:
        store_groups(h, inverse, wire, first, groups, C)


@triton.jit
def add_sender(total, wires, sender, wire_stride, first, groups, C: tl.constexpr):
    """total + q * step of one sender, one rounding; fp32[R, G]."""
    wire = wires + sender * wire_stride
    if C.INTEGER:
        q = load_singles(wire, first, groups, C)
        if C.BEND > 0:
            q = quadratic_value_of(q, 1.0, C)
    else:
        q = code_values(load_codes(wire, first, groups, C), tl.float32, C)
    step = load_step(wire, first, groups, C)
    return tl.fma(q, tl.broadcast_to(step[:, None], [C.R, C.G]), total)


@triton.jit
def add_sender_words(t, wires, sender, wire_stride, first, groups, magic, C: tl.constexpr):
    """add_sender in an integer format, for t, the sums of every fourth element: four fp32[R, G / 4]."""
    t0, t1, t2, t3 = t
    wire = wires + sender * wire_stride
    words, step = load_code_words(wire, first, groups, C), load_step(wire, first, groups, C)
    if C.BEND > 0:
        t = add_quadratic_products(t0, t1, t2, t3, words, step, magic, C)
    else:
        t = add_products(t0, t1, t2, t3, words, step, magic, C)
    return t


@triton.jit
def sum_senders(wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """fp32[R, G], summed in the order of the senders."""
    if C.INTEGER:
        zero = tl.zeros([C.R, C.G // 4], tl.float32)
        t = (zero, zero, zero, zero)
        magic = magic_bits(groups)
        if W <= C.UNROLLED:  # unrolled, so that the senders' loads are in flight together
            for w in tl.static_range(0, W):
                sender = tl.full((), w, tl.int64)
                t = add_sender_words(t, wires, sender, wire_stride, first, groups, magic, C)
        else:
            for w in range(0, W):
                sender = tl.full((), 0, tl.int64) + w
                t = add_sender_words(t, wires, sender, wire_stride, first, groups, magic, C)
        t0, t1, t2, t3 = t
        total = tl.reshape(tl.join(tl.join(t0, t2), tl.join(t1, t3)), [C.R, C.G])
    else:
        total = tl.zeros([C.R, C.G], tl.float32)
        if W <= C.UNROLLED:
            for w in tl.static_range(0, W):
                sender = tl.full((), w, tl.int64)
                total = add_sender(total, wires, sender, wire_stride, first, groups, C)
        else:
            for w in range(0, W):
                sender = tl.full((), 0, tl.int64) + w
                total = add_sender(total, wires, sender, wire_stride, first, groups, C)
    return total
