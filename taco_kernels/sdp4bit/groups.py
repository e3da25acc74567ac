"""Groups of a wire: writing and reading codes and steps, and the rotation.

Two views of a row. To encode, and to add without a rotation, a tile is groups: ``C`` is a
launch.Tile with R groups of G values. Sums are of blocks of 32 values (``B``, a Tile of N blocks),
each held by one thread, so that the rotation moves nothing.

A thread reads 16 or 32 bytes of codes of every sender. The five stages of a 32-point transform are
then additions of its own registers; on the tensor cores an fp32 sum would be three operands, and
pass through shared memory twice.

``first`` is the tile's first group (or block), int32; ``groups`` the number of groups of the row
that ``wire`` points to; ``blocks`` that of its blocks.
"""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import odd, shuffled
from taco_kernels.common.packing import (
    add_products,
    aligned_bytes,
    four_joined,
    load_code_words,
    magic_bits,
    store_groups,
    wire_of,
)

# Groups


@triton.jit
def rotation_matrix(VALUE: tl.constexpr, H: tl.constexpr, dtype: tl.constexpr):
    """dtype[POINT, POINT]: VALUE * (-1)^popcount(i & j) inside blocks of BLOCK, zero outside.

    Columns are in the order of ``common.hadamard.shuffle``.

    Args:
        VALUE: magnitude of the entries.
        H: a launch.Rotation.
        dtype: bf16 or fp16.
    """
    row = tl.arange(0, H.POINT)[:, None]
    # Two transforms of 32 points next to each other, so that a product has the 64 that shuffle
    # needs.
    column = shuffled(tl.arange(0, H.POINT)[None, :])
    # Numbers inside a block are the lowest bits.
    negative = odd(row & column & (H.BLOCK - 1)) == 1
    value = tl.where(negative, -VALUE, VALUE)
    return tl.where((row // H.BLOCK) == (column // H.BLOCK), value, 0.0).to(dtype)


@triton.jit
def larger(a, b):
    """The larger of two numbers, or NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def steps_of(amax, C: tl.constexpr):
    """Steps fp32[R] of groups with these finite largest magnitudes, and their reciprocals.

    A step is amax / qmax, correctly rounded, then rounded up to 16 mantissa bits.
    """
    qmax = tl.full([C.R], C.QMAX, tl.float32)
    if C.INTERPRET:  # whose fused multiply-add rounds twice
        step = tl.div_rn(amax, qmax)
    else:
        # A quotient by a constant, correctly rounded (Markstein): its remainder corrects the
        # product with the reciprocal. A third of a division's instructions.
        step = amax * (1.0 / C.QMAX)
        remainder = tl.fma(-step, qmax, amax)
        step = tl.fma(remainder, tl.full([C.R], 1.0 / C.QMAX, tl.float32), step)
    step = ((step.to(tl.int32, bitcast=True) + 0xFF) & -256).to(tl.float32, bitcast=True)
    if C.INTERPRET:
        inverse = tl.div_rn(tl.full([C.R], 1.0, tl.float32), step)
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [step], tl.float32, True, 1
        )
    return step, inverse


@triton.jit
def steps_at(wire, groups, C: tl.constexpr):
    """Pointer (fp32) to the steps of a row, behind its codes.

    Args:
        wire: pointer to the row's wire.
        groups: of the row.
        C: constants of the tile.
    """
    codes = tl.full((), C.PAYLOAD, tl.int64) * groups
    return (wire + codes).to(tl.pointer_type(tl.float32))


@triton.jit
def write_groups(h, wire, first, groups, C: tl.constexpr):
    """Write a tile's groups: steps, then codes; the first tile of a row zeroes its padding.

    Args:
        h: fp32[R, G], in the codes' domain.
        wire: pointer to the row's wire.
        first: the tile's first group.
        groups: of the row.
        C: constants of the tile.
    """
    if C.INTERPRET:  # slow with a function of ours
        amax = tl.max(tl.where(h == h, tl.abs(h), float("inf")), axis=1)
    else:
        amax = tl.reduce(tl.abs(h), 1, larger)
    # Also where amax is NaN.
    bad = (amax < float("inf")) == 0
    zero = amax == 0.0
    step, inverse = steps_of(tl.maximum(tl.where(bad, 0.0, amax), C.FLOOR), C)
    inverse = tl.where(bad, 0.0, inverse)
    step = tl.where(bad, float("nan"), tl.where(zero, 0.0, step))
    row = first + tl.arange(0, C.R)
    # The row's layout (reference.py): codes | steps | zeros up to 16 bytes.
    tl.store(steps_at(wire, groups, C) + row, step, mask=row < groups)
    used = tl.full((), C.PAYLOAD + 4, tl.int64) * groups
    pad = used + tl.arange(0, 16)
    end = tl.where(first == 0, aligned_bytes(used), 0)
    tl.store(wire + pad, tl.zeros([16], tl.uint8), mask=pad < end)
    store_groups(h, inverse, wire, first, groups, C)


@triton.jit
def decoded_groups(wire, first, groups, C: tl.constexpr):
    """fp32[R, G]: q * step of a tile's groups.

    Args:
        wire: pointer to the row's wire.
        first: the tile's first group.
        groups: of the row.
        C: constants of the tile.
    """
    zero = tl.zeros([C.R, C.G // 4], tl.float32)
    row = first + tl.arange(0, C.R)
    step = tl.load(steps_at(wire, groups, C) + row, mask=row < groups, other=0.0)
    # A sum of one sender: 0 + q * step, which is exact.
    words = load_code_words(wire, first, groups, C)
    t0, t1, t2, t3 = add_products(zero, zero, zero, zero, words, step, magic_bits(groups), C)
    return tl.reshape(four_joined(t0, t1, t2, t3), [C.R, C.G])


# Blocks

BLOCK = tl.constexpr(32)
"""Values that one thread holds and rotates."""


@triton.jit
def load_quads(plane, first, blocks, STRIDE: tl.constexpr, SKIP: tl.constexpr, N: tl.constexpr):
    """int32[N, 4]: 16 bytes of the codes of each of N blocks, 0 beyond the last.

    Args:
        plane: pointer to the row's codes.
        first: the first block.
        blocks: of the row.
        STRIDE: bytes from one block to the next.
        SKIP: bytes of a block before the 16.
        N: blocks.
    """
    block = tl.arange(0, N)[:, None]
    begin = plane + first.to(tl.int64) * STRIDE + SKIP
    words = begin.to(tl.pointer_type(tl.int32))
    pointers = words + block * (STRIDE // 4) + tl.arange(0, 4)[None, :]
    return tl.load(pointers, mask=block < blocks - first, other=0)


@triton.constexpr_function
def masked_xor(mask):
    """Return PTX: bits of the first operand under the mask, exclusive or with the second."""
    return f"lop3.b32 $0, $1, {mask}, $2, 0x6A;"


@triton.jit
def code(words, magic, SHIFT: tl.constexpr, B: tl.constexpr):
    """fp32: the code that begins with bit SHIFT <= 16 of each word, below bit 23.

    It stays where it is; the exponent that the magic number is given makes its lowest bit worth 1.
    In PTX, or the compiler shares masks between codes, at two instructions each.

    Args:
        words: int32 codes.
        magic: what ``packing.magic_bits`` gives, the bits of 2^23.
        SHIFT: the code's lowest bit.
        B: constants of the tile.
    """
    MASK: tl.constexpr = (2**B.BITS - 1) << SHIFT
    OFFSET: tl.constexpr = 2 ** (B.BITS - 1)
    magic = magic - (SHIFT << 23)  # 2^(23 - SHIFT)
    if B.BITS == 8:  # two's complement: the sign's bit is inverted
        magic = magic + (OFFSET << SHIFT)
    if B.INTERPRET:
        bits = (words & MASK) ^ magic
    else:
        assembly: tl.constexpr = masked_xor(MASK)
        bits = tl.inline_asm_elementwise(assembly, "=r,r,r", [words, magic], tl.int32, True, 1)
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - SHIFT) + OFFSET)


@triton.jit
def add_nibbles(t, words, step, magic, B: tl.constexpr):
    """t[q] + code q * step for the eight codes of each word, each rounded once; eight fp32[N, 4].

    Args:
        t: eight fp32[N, 4], sums so far.
        words: int32[N, 4], eight codes of 4 bits each.
        step: fp32[N, 4], steps of the blocks.
        magic: what ``packing.magic_bits`` gives.
        B: constants of the tile.
    """
    t0, t1, t2, t3, t4, t5, t6, t7 = t
    t0 = tl.fma(code(words, magic, 0, B), step, t0)
    t1 = tl.fma(code(words, magic, 4, B), step, t1)
    t2 = tl.fma(code(words, magic, 8, B), step, t2)
    t3 = tl.fma(code(words, magic, 12, B), step, t3)
    t4 = tl.fma(code(words, magic, 16, B), step, t4)
    words = words >> 20  # a code must lie below bit 23
    t5 = tl.fma(code(words, magic, 0, B), step, t5)
    t6 = tl.fma(code(words, magic, 4, B), step, t6)
    t7 = tl.fma(code(words, magic, 8, B), step, t7)
    return t0, t1, t2, t3, t4, t5, t6, t7


@triton.jit
def add_bytes(t0, t1, t2, t3, words, step, magic, B: tl.constexpr):
    """t_k + code k * step for the four codes of each word, each rounded once; four fp32[N, 4].

    Args:
        t0, t1, t2, t3: fp32[N, 4], sums so far.
        words: int32[N, 4], four codes of 8 bits each.
        step: fp32[N, 4], steps of the blocks.
        magic: what ``packing.magic_bits`` gives.
        B: constants of the tile.
    """
    t0 = tl.fma(code(words, magic, 0, B), step, t0)
    t1 = tl.fma(code(words, magic, 8, B), step, t1)
    words = words >> 16
    t2 = tl.fma(code(words, magic, 0, B), step, t2)
    t3 = tl.fma(code(words, magic, 8, B), step, t3)
    return t0, t1, t2, t3


@triton.jit
def add_sender(t, wire, first, blocks, groups, magic, B: tl.constexpr):
    """The eight sums fp32[N, 4] with the products of one sender's codes and steps added.

    Args:
        t: the sums so far.
        wire: pointer to the sender's wire of the row.
        first: the tile's first block.
        blocks: of the row.
        groups: of the row.
        magic: what ``packing.magic_bits`` gives.
        B: constants of the tile.
    """
    block = first + tl.arange(0, B.N)
    # A group's blocks share its step.
    steps = steps_at(wire, groups, B) + block // (B.G // BLOCK)
    step = tl.load(steps, mask=block < blocks, other=0.0)
    step = tl.broadcast_to(step[:, None], [B.N, 4])
    if B.BITS == 4:
        t = add_nibbles(t, load_quads(wire, first, blocks, 16, 0, B.N), step, magic, B)
    else:
        t0, t1, t2, t3, t4, t5, t6, t7 = t
        low = load_quads(wire, first, blocks, 32, 0, B.N)
        high = load_quads(wire, first, blocks, 32, 16, B.N)
        t0, t1, t2, t3 = add_bytes(t0, t1, t2, t3, low, step, magic, B)
        t4, t5, t6, t7 = add_bytes(t4, t5, t6, t7, high, step, magic, B)
        t = t0, t1, t2, t3, t4, t5, t6, t7
    return t


@triton.jit
def sum_blocks(wires, sender_stride, first, blocks, groups, S: tl.constexpr, B: tl.constexpr):
    """fp32[N, 32]: sum over S senders of a tile's blocks, in their order.

    Args:
        wires: pointer to the first sender's wire of the row.
        sender_stride: bytes from one sender's wires to the next.
        first: the tile's first block.
        blocks: of the row.
        groups: of the row.
        S: senders.
        B: constants of the tile.
    """
    zero = tl.zeros([B.N, 4], tl.float32)
    t = (zero, zero, zero, zero, zero, zero, zero, zero)
    magic = magic_bits(groups)
    if S <= 8:  # unrolled, so that the senders' loads are in flight together
        for s in tl.static_range(0, S):
            wire = wire_of(wires, s, sender_stride)
            t = add_sender(t, wire, first, blocks, groups, magic, B)
    else:
        for s in range(0, S):
            wire = wire_of(wires, s, sender_stride)
            t = add_sender(t, wire, first, blocks, groups, magic, B)
    t0, t1, t2, t3, t4, t5, t6, t7 = t
    # From the order of codes on the wire to that of values.
    if B.BITS == 4:  # nibble 2k + p of word 2s + h is element 16s + 8p + 4h + k
        low = tl.reshape(four_joined(t0, t2, t4, t6), [B.N, 2, 8])
        high = tl.reshape(four_joined(t1, t3, t5, t7), [B.N, 2, 8])
        total = tl.permute(tl.join(low, high), [0, 1, 3, 2])
    else:  # byte k of word w of the second half is element 16 + 4w + k
        low = tl.reshape(four_joined(t0, t1, t2, t3), [B.N, 16])
        high = tl.reshape(four_joined(t4, t5, t6, t7), [B.N, 16])
        total = tl.permute(tl.join(low, high), [0, 2, 1])
    return tl.reshape(total, [B.N, BLOCK])


@triton.jit
def rotated_blocks(h, B: tl.constexpr):
    """WHT of h fp32[N, 32], without normalisation, in the order of additions of
    ``reference.hadamard``."""
    for stage in tl.static_range(5):  # butterflies of distance 2^stage
        pairs = tl.reshape(h, [B.N, BLOCK // 2 // 2**stage, 2, 2**stage])
        low, high = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
        pairs = tl.permute(tl.join(low + high, low - high), [0, 1, 3, 2])
        h = tl.reshape(pairs, [B.N, BLOCK])
    return h
