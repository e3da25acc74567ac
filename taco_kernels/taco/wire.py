"""Device functions between a tensor, the Hadamard domain and a wire; reference.py defines them.

A tile is R groups of G values, and goes these steps::

    encode   x --load_tile--> [R, G] --rotate (outlier_kernels)--> h --encode_groups--> scales, codes
    decode   codes, scales --decode_groups--> fp32[R, G] --store_tile--> x
    sums     codes, scales of W senders --sum_senders--> h, in the Hadamard domain

Names: ``C`` is a spec.Spec and ``FLAGS`` a spec.Flags. ``first`` is the tile's first group, int32;
``groups`` the number of groups of the chunk that ``wire`` points to (with C.ROW of all chunks up to
the tile's last).

``rows`` is (run, inner, stride_outer, stride_inner). A tensor is contiguous, or (FLAGS.STRIDED)
rows of ``run`` groups, each contiguous, row r at ``(r // inner) * stride_outer + (r % inner) *
stride_inner``; see launch.rows_of.
"""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import shuffle, transform, unshuffle
from taco_kernels.common.packing import (
    MAGIC,
    across_chunks,
    add_products,
    after_plane,
    aligned_bytes,
    code_under,
    code_values,
    four_joined,
    halves_offset,
    load_code_words,
    load_codes,
    load_halves,
    load_singles,
    magic_bits,
    store_groups,
    store_integers,
    wire_of,
)
from taco_kernels.taco import reference

# A tile of the tensor


@triton.jit
def tile_pointers(x, first, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """Pointers [R, G] to the values of a tile.

    Args:
        x: pointer to the tensor.
        first: the tile's first group.
        rows: how a strided tensor lies in memory.
        FLAGS: of the launch.
        C: constants of the tile.
    """
    column = tl.arange(0, C.G)[None, :]
    if FLAGS.STRIDED:
        run, inner, stride_outer, stride_inner = rows
        group = first + tl.arange(0, C.R)
        row = group // run
        # In 64 bits: a row by itself may have 2^31 values and more.
        outer_start = (row // inner).to(tl.int64) * stride_outer
        start = outer_start + (row % inner).to(tl.int64) * stride_inner
        start = start + (group % run).to(tl.int64) * C.G
        pointers = x + start[:, None] + column
    else:
        # 64 bits once a tile, 32 inside it.
        row_start = tl.arange(0, C.R) * C.G
        pointers = x + first.to(tl.int64) * C.G + row_start[:, None] + column
    return pointers


@triton.jit
def tile_mask(first, numel, FLAGS: tl.constexpr, C: tl.constexpr):
    """Mask of the values of a tile that lie inside the tensor.

    [R, 1], or [R, G] where the last group is not whole (FLAGS.TAIL).

    Args:
        first: the tile's first group.
        numel: values of the tensor.
        FLAGS: of the launch.
        C: constants of the tile.
    """
    # Of the tensor from the tile's first value on; may be more than a tile, or less than nothing.
    remaining = numel - first.to(tl.int64) * C.G
    before = (tl.arange(0, C.R) * C.G)[:, None]
    if FLAGS.TAIL:
        # In 32 bits and from few indices: the compiler keeps them in registers through the loop.
        remaining = tl.maximum(tl.minimum(remaining, C.R * C.G), 0).to(tl.int32)
        mask = tl.arange(0, C.G)[None, :] < remaining - before
    else:
        mask = before < remaining
    return mask


@triton.jit
def load_tile(x, first, numel, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """[R, G] values of a tile in x's type, zeros beyond numel.

    Args:
        x: pointer to the tensor.
        first: the tile's first group.
        numel: values of the tensor.
        rows: how a strided tensor lies in memory.
        FLAGS: of the launch.
        C: constants of the tile.
    """
    return tl.load(
        tile_pointers(x, first, rows, FLAGS, C), mask=tile_mask(first, numel, FLAGS, C), other=0.0
    )


@triton.jit
def store_tile(x, value, first, numel, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """Store values of a tile in x's type; nothing beyond numel.

    Args:
        x: pointer to the tensor.
        value: fp32[R, G].
        first: the tile's first group.
        numel: values of the tensor.
        rows: how a strided tensor lies in memory.
        FLAGS: of the launch.
        C: constants of the tile.
    """
    pointers = tile_pointers(x, first, rows, FLAGS, C)
    tl.store(pointers, value.to(x.dtype.element_ty), mask=tile_mask(first, numel, FLAGS, C))


# The quadratic grid (reference.py)

SIXTEENTHS = tl.constexpr(reference.SIXTEENTHS)
ONES = tl.constexpr(2.0**23)  # fp32 with this much added is an integer


@triton.jit
def quadratic_value_of(u, UNIT: tl.constexpr, C: tl.constexpr):
    """UNIT^2 times the values of codes, exact, in fp16 where UNIT is 1.

    Args:
        u: codes times UNIT.
        UNIT: 1.0 or 256.0.
        C: constants of the tile.
    """
    return u * (tl.abs(u) + UNIT * (2 * C.BEND + 1))


@triton.jit
def quadratic_codes(h, inverse, C: tl.constexpr):
    """int32[R, G]: codes of h * inverse plus 2^(BITS - 1), in the lowest bits. See
    packing.fixed_point.

    Args:
        h: fp32[R, G].
        inverse: fp32[R], reciprocals of the groups' steps.
        C: constants of the tile.
    """
    v = h * inverse[:, None]
    # |v| + a (a + 1) to the nearest sixteenth, and 1/32 more: the argument is no square.
    x = tl.abs(v) + (SIXTEENTHS + C.BEND * (C.BEND + 1))
    x = x - (SIXTEENTHS - 1.0 / 32)
    # The root may be approximate. It is rounded down, as no root is an integer.
    n = tl.sqrt(x) + (ONES - 0.5)
    # |u|, without the sign of v.
    magnitude = n - (ONES + C.BEND)
    sign_bit = v.to(tl.int32, bitcast=True) & -0x80000000
    u = (magnitude.to(tl.int32, bitcast=True) | sign_bit).to(tl.float32, bitcast=True)
    # As in fixed_point: an integer in the low mantissa bits.
    return (u + (MAGIC + 2 ** (C.BITS - 1))).to(tl.int32, bitcast=True)


@triton.jit
def quadratic_value_under(words, magic, MASK: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr):
    """fp32: UNIT^2 times the value of a code of each word.

    Args:
        words: int32, what ``load_code_words`` gives.
        magic: what ``magic_bits`` gives.
        MASK: bits of the code in its word.
        UNIT: what the lowest of them is worth: 1.0 or 256.0.
        C: constants of the tile.
    """
    return quadratic_value_of(code_under(words, magic, MASK, UNIT, C), UNIT, C)


@triton.jit
def add_quadratic_products(t0, t1, t2, t3, words, step, magic, C: tl.constexpr):
    """packing.add_products of this grid. Every second value is 256^2 times too large where it lies.

    Args:
        t0, t1, t2, t3: fp32[R, G / 4], sums so far of every fourth element.
        words: int32[R, G / 4], what ``load_code_words`` gives.
        step: fp32[R], steps of the groups.
        magic: what ``magic_bits`` gives.
        C: constants of the tile.
    """
    step = tl.broadcast_to(step[:, None], [C.R, C.G // 4])
    small = step * (1.0 / 65536.0)
    t0 = tl.fma(quadratic_value_under(words, magic, 0xFF, 1.0, C), step, t0)
    t1 = tl.fma(quadratic_value_under(words, magic, 0xFF00, 256.0, C), small, t1)
    words = words >> 16
    t2 = tl.fma(quadratic_value_under(words, magic, 0xFF, 1.0, C), step, t2)
    t3 = tl.fma(quadratic_value_under(words, magic, 0xFF00, 256.0, C), small, t3)
    return t0, t1, t2, t3


# Scales on the wire


@triton.jit
def dual_step(s, alpha, C: tl.constexpr):
    """fp32 factor of a group's codes, s / (sqrt(G) alpha).

    Args:
        s: fp32, step of the scaled group.
        alpha: fp32, its adaptive scale.
        C: constants of the tile.
    """
    return tl.div_rn(s * (1.0 / C.ROOT), alpha)


@triton.jit
def scale_offsets(row, first, groups, SIZE: tl.constexpr, C: tl.constexpr):
    """Offsets [R] of the scales of groups ``row``, in scales; and the distance from s to alpha.

    Args:
        row: int32[R], numbers of the groups.
        first: the tile's first group.
        groups: of the chunk.
        SIZE: bytes a scale.
        C: constants of the tile.
    """
    if C.ROW:
        offset = across_chunks(first, 1, SIZE, C)
        distance = C.ROW
    else:
        offset = row
        distance = groups
    return offset, distance


@triton.jit
def load_step(wire, first, groups, C: tl.constexpr):
    """fp32[R] steps of a tile's groups, 0 beyond the last.

    Args:
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    # Scales follow the codes: all s (or steps), then all alpha.
    row = first + tl.arange(0, C.R)
    scales = after_plane(wire, C.PAYLOAD, groups, C)
    if C.DUAL:
        offset, distance = scale_offsets(row, first, groups, 4, C)
        pointers = scales.to(tl.pointer_type(tl.float32)) + offset
        step = tl.load(pointers, mask=row < groups, other=0.0)
        if not C.MERGED:
            alpha = tl.load(pointers + distance, mask=row < groups, other=1.0)
            step = dual_step(step, alpha, C)
    else:
        offset, _ = scale_offsets(row, first, groups, 2, C)
        s = scales.to(tl.pointer_type(tl.bfloat16))
        step = tl.load(s + offset, mask=row < groups, other=0.0).to(tl.float32)
    return step


# Decoding


@triton.jit
def decode_groups(wire, first, groups, matrix, C: tl.constexpr):
    """fp32[R, G]: values of a tile's groups, out of the Hadamard domain.

    Args:
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        matrix: fp16[POINT, POINT] of hadamard.sylvester, of ones.
        C: constants of the tile.
    """
    step = load_step(wire, first, groups, C)
    if C.INTEGER and not C.INTERPRET:
        # 16 codes at a time in PTX, and too large by a constant: cheaper than to subtract it from
        # each.
        q = load_halves(wire, first, groups, C)
        OFFSET: tl.constexpr = halves_offset(C.BITS, C.BEND)
    else:
        q = code_values(load_codes(wire, first, groups, C), tl.float16, C)
        if C.BEND > 0:
            q = quadratic_value_of(q, 1.0, C)
        OFFSET: tl.constexpr = 0
    if C.HADAMARD:
        h = transform(shuffle(q, C), matrix, C)
        if OFFSET != 0:
            # The transform of a constant is all in its first element.
            column = tl.arange(0, C.G)[None, :]
            h = tl.where(column == 0, h - OFFSET * C.G, h)
        h = unshuffle(h * step[:, None], C)
    else:
        # Not a product: LLVM narrows one of fp16 and bf16 that is rounded to fp16, and loses small
        # steps.
        h = tl.fma(q.to(tl.float32) - OFFSET, step[:, None], 0.0)
    return h


@triton.jit
def decode_two(wires, wire_stride, first, groups, matrix, C: tl.constexpr):
    """fp32[R, G]: the sum of two senders' groups.

    The transform of codes is one product each, and exact; that of a sum in fp32 is three.

    Args:
        wires: pointer to the first sender's wire.
        wire_stride: bytes to the second one's.
        first: the tile's first group.
        groups: of the wire.
        matrix: as of ``decode_groups``.
        C: constants of the tile.
    """
    first_value = decode_groups(wires, first, groups, matrix, C)
    second_value = decode_groups(wires + wire_stride, first, groups, matrix, C)
    return first_value + second_value


# Encoding


@triton.jit
def sum_of_squares(h, C: tl.constexpr):
    """fp32[R] over the columns of h[R, G]."""
    if C.G < 64:
        total = tl.sum(h * h, axis=1)
    else:  # fused multiply-adds first, along columns that one thread holds
        even, odd = tl.split(tl.reshape(h, [C.R, C.G // 4, 2, 2]))
        a, b = tl.split(even)
        c, d = tl.split(odd)
        squares = tl.fma(b, b, tl.fma(c, c, d * d))
        total = tl.sum(tl.fma(a, a, squares), axis=1)
    return total


@triton.jit
def extremes(h, C: tl.constexpr):
    """The largest of h, of -h and of |h| over the columns of h[R, G], fp32[R] each.

    The first two are those only with signed scales; else they are the third.

    The third is not below infinity where a number is not finite: the transform spreads a NaN over
    its group, where a maximum cannot miss it; without it, NaN counts as infinity.
    """
    if C.SIGNED:
        # A maximum and a minimum may miss a NaN: as infinity the maximum finds it.
        finite_or_infinite = h
        if not C.HADAMARD:
            finite_or_infinite = tl.where(h == h, h, float("inf"))
        high = tl.max(finite_or_infinite, axis=1)
        low = -tl.min(h, axis=1)
        amax = tl.maximum(high, low)
    else:
        magnitude = tl.abs(h)
        if not C.HADAMARD:
            magnitude = tl.where(h == h, magnitude, float("inf"))
        amax = tl.max(magnitude, axis=1)
        high = amax
        low = amax
    return high, low, amax


@triton.jit
def store_padding(wire, first, groups, C: tl.constexpr):
    """Store zeros up to the next multiple of 16 bytes, after the chunks whose first group is in the
    tile.

    Args:
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    if C.ROW:
        USED: tl.constexpr = C.BYTES * C.ROW
        if USED % 16 != 0:
            # R numbers of chunks, of which some lie after the tile's.
            chunk = (first // C.ROW).to(tl.int64) + tl.arange(0, C.R)[:, None]
            pad = USED + tl.arange(0, 16)[None, :]
            mask = (pad < (USED + 15) // 16 * 16) & (chunk * C.ROW < groups)
            pointers = wire + chunk * C.STRIDE + pad
            tl.store(pointers, tl.zeros([C.R, 16], tl.uint8), mask=mask)
    else:
        # One tile of the chunk does it: that with its first group.
        used = tl.full((), C.BYTES, tl.int64) * groups
        pad = used + tl.arange(0, 16)
        end = tl.where(first == 0, aligned_bytes(used), 0)
        tl.store(wire + pad, tl.zeros([16], tl.uint8), mask=pad < end)


@triton.jit
def encode_groups(h, wire, first, groups, C: tl.constexpr):
    """Write a tile's groups, in the codes' domain, to the chunk at ``wire``.

    A group is written in this order, each step for all R groups at once::

        1. extremes    amax = max|h|, with signed scales also of either side of zero
        2. bad, zero   groups that are not finite, and those of zeros: their scale is NaN, or 0
        3. scales      store step, or s and alpha; inverse = 1 / step, 0 for bad groups
        4. padding     zeros behind the chunk, by the tile that has its first group
        5. codes       round(h * inverse), packed into planes

    Args:
        h: fp32[R, G].
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    high, low, amax = extremes(h, C)
    bad = (amax < float("inf")) == 0  # also where amax is NaN
    # Before the floor hides it.
    zero = amax == 0.0
    amax = tl.maximum(tl.where(bad, 0.0, amax), C.FLOOR)
    if C.DUAL:
        inverse = store_dual_scales(h, amax, bad, zero, wire, first, groups, C)
    else:
        inverse = store_single_scale(high, low, amax, bad, zero, wire, first, groups, C)
    store_padding(wire, first, groups, C)
    # Codes of a bad group mean nothing.
    inverse = tl.where(bad, 0.0, inverse)
    if C.BEND > 0:
        store_integers(quadratic_codes(h, inverse, C), wire, first, groups, C)
    else:
        store_groups(h, inverse, wire, first, groups, C)


@triton.jit
def store_dual_scales(h, amax, bad, zero, wire, first, groups, C: tl.constexpr):
    """Store s and alpha, or (C.MERGED) the step that they make; return fp32[R] reciprocals of the
    steps.

    Args:
        h: fp32[R, G], the groups.
        amax: fp32[R], their largest magnitudes, at least C.FLOOR.
        bad: bool[R], which groups are not finite.
        zero: bool[R], which groups are zeros.
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    row = first + tl.arange(0, C.R)
    qmax = tl.full([C.R], C.QMAX, tl.float32)
    inverse = tl.div_rn(qmax, amax)
    mean_square = tl.where(bad, 0.0, sum_of_squares(h, C))
    if not C.HADAMARD:
        # With the transform of the mean, sum(h^2) is the mean square of x already (Parseval).
        mean_square = mean_square * (1.0 / C.G)
    # alpha and s as TACO has them (arXiv 2604.24088); reference.py says why codes do not depend on
    # them.
    root = tl.sqrt_rn(mean_square + 1e-6)
    alpha = tl.div_rn(qmax, root)
    alpha = tl.minimum(tl.maximum(alpha, 1e-3), 1e3)
    s = tl.maximum(alpha * amax * (C.ROOT / C.QMAX), 1e-12)
    s = tl.where(bad, float("nan"), tl.where(zero, 0.0, s))
    offset, distance = scale_offsets(row, first, groups, 4, C)
    scales = after_plane(wire, C.PAYLOAD, groups, C).to(tl.pointer_type(tl.float32))
    pointers = scales + offset
    if C.MERGED:
        tl.store(pointers, dual_step(s, alpha, C), mask=row < groups)
    else:
        tl.store(pointers, s, mask=row < groups)
        tl.store(pointers + distance, alpha, mask=row < groups)
    return inverse


@triton.jit
def store_single_scale(high, low, amax, bad, zero, wire, first, groups, C: tl.constexpr):
    """Store the bf16 step of single and signed scales; return fp32[R] reciprocals of the steps.

    Args:
        high: fp32[R], the largest value of each group.
        low: fp32[R], the largest negated value.
        amax: fp32[R], the largest magnitude, at least C.FLOOR.
        bad: bool[R], which groups are not finite.
        zero: bool[R], which groups are zeros.
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    row = first + tl.arange(0, C.R)
    qmax = tl.full([C.R], C.QMAX, tl.float32)
    if C.BEND > 0:
        near = tl.where(bad, 0.0, tl.minimum(high, low))
        # The far extreme gets the outermost code below zero, the near one that above.
        step = tl.maximum(amax * C.FAR, near * C.NEAR)
    elif C.SIGNED:
        near = tl.div_rn(tl.where(bad, 0.0, tl.minimum(high, low)), qmax)
        # The far extreme gets the code -2^(BITS - 1), the near one qmax.
        step = tl.maximum(amax * 2.0 ** (1 - C.BITS), near)
    else:
        step = tl.div_rn(amax, qmax)
    # To the nearest bf16 on the quadratic grid, whose cells have room for that; else up.
    ROUNDING: tl.constexpr = 0x8000 if C.BEND > 0 else 0xFFFF
    step = ((step.to(tl.int32, bitcast=True) + ROUNDING) & -65536).to(tl.float32, bitcast=True)
    if C.SIGNED:
        # A negative step turns the grid round, so that far is below zero.
        step = tl.where(high > low, -step, step)
    inverse = tl.div_rn(tl.full([C.R], 1.0, tl.float32), step)
    step = tl.where(bad, float("nan"), tl.where(zero, 0.0, step))
    offset, _ = scale_offsets(row, first, groups, 2, C)
    scales = after_plane(wire, C.PAYLOAD, groups, C).to(tl.pointer_type(tl.bfloat16))
    tl.store(scales + offset, step.to(tl.bfloat16), mask=row < groups)
    return inverse


# Sums of senders, without leaving the Hadamard domain


@triton.jit
def add_sender(total, wires, sender, wire_stride, first, groups, C: tl.constexpr):
    """fp32[R, G]: total + q * step of one sender, one rounding.

    Args:
        total: fp32[R, G], sum of the senders before.
        wires: pointer to the first sender's wire.
        sender: its number.
        wire_stride: bytes from one sender's wire to the next.
        first: the tile's first group.
        groups: of a wire.
        C: constants of the tile.
    """
    wire = wire_of(wires, sender, wire_stride)
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
    """add_sender in an integer format, on words of four codes.

    Args:
        t: four fp32[R, G / 4], sums so far of every fourth element.
        wires: pointer to the first sender's wire.
        sender: its number.
        wire_stride: bytes from one sender's wire to the next.
        first: the tile's first group.
        groups: of a wire.
        magic: what ``magic_bits`` gives.
        C: constants of the tile.
    """
    # Element 4 i + k of the tile is element i of t_k.
    t0, t1, t2, t3 = t
    wire = wire_of(wires, sender, wire_stride)
    words = load_code_words(wire, first, groups, C)
    step = load_step(wire, first, groups, C)
    if C.BEND > 0:
        t = add_quadratic_products(t0, t1, t2, t3, words, step, magic, C)
    else:
        t = add_products(t0, t1, t2, t3, words, step, magic, C)
    return t


@triton.jit
def sum_senders(wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """fp32[R, G]: the sum of q * step over the senders, in their order.

    Up to C.UNROLLED senders the loop is unrolled, so that the senders' loads are in flight
    together.

    Args:
        wires: pointer to the first sender's wire.
        wire_stride: bytes from one sender's wire to the next.
        first: the tile's first group.
        groups: of a wire.
        W: senders.
        C: constants of the tile.
    """
    if C.INTEGER:
        zero = tl.zeros([C.R, C.G // 4], tl.float32)
        t = (zero, zero, zero, zero)
        magic = magic_bits(groups)
        if W <= C.UNROLLED:
            for w in tl.static_range(0, W):
                t = add_sender_words(t, wires, w, wire_stride, first, groups, magic, C)
        else:
            for w in range(0, W):
                t = add_sender_words(t, wires, w, wire_stride, first, groups, magic, C)
        t0, t1, t2, t3 = t
        total = tl.reshape(four_joined(t0, t1, t2, t3), [C.R, C.G])
    else:
        total = tl.zeros([C.R, C.G], tl.float32)
        if W <= C.UNROLLED:
            for w in tl.static_range(0, W):
                total = add_sender(total, wires, w, wire_stride, first, groups, C)
        else:
            for w in range(0, W):
                total = add_sender(total, wires, w, wire_stride, first, groups, C)
    return total
