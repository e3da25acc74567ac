"""What a program does with one tile: send it encoded, sum what arrived, write the result.

A tile of R groups travels as a wire chunk of its own (layout.py) in a slot of SLOT bytes. Of dual scales only
the step travels that a decoder makes of them, s / (sqrt(G) alpha), 4 bytes a group instead of 8: the sender
computes what the receiver would.

A message is (numel, stride, length, groups): values in the tensor; values from the start of one piece to the
next, values and groups in a piece.
"""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import transform, unshuffle
from taco_kernels.common.planes import load_plane, store_plane
from taco_kernels.taco.kernels import add_sender, sum_senders
from taco_kernels.taco.tensor import load_tile, store_tile
from taco_kernels.taco.wire import decode_groups, dual_step, encode_groups


@triton.jit
def slot_of(memory, offset):
    """Pointer to the slot ``offset`` bytes into a rank's memory, given as an address."""
    return tl.multiple_of((memory + offset).to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def peer_slot(table, peer, offset):
    """Pointer to a slot in a peer's memory."""
    return slot_of(tl.load(table + peer), offset)


@triton.jit
def encoded_tile(x, piece, first, message, rows, matrix, FLAGS: tl.constexpr, C: tl.constexpr):
    """Groups first... of a piece in the Hadamard domain, fp32[R, G]."""
    numel, stride, length, groups = message
    if FLAGS.STRIDED:  # pieces are whole groups there, and rows are counted from the tensor's start
        h = load_tile(x, piece * groups + first, numel, rows, FLAGS, C)
    else:
        start = piece.to(tl.int64) * stride
        h = load_tile(x + start, first, tl.minimum(numel - start, length), rows, FLAGS, C)
    if C.HADAMARD:
        h = unshuffle(transform(h, matrix, C), C)
    else:
        h = h.to(tl.float32)
    return h


@triton.jit
def store_to_all(h, row, full, table, offset, rank, W: tl.constexpr, C: tl.constexpr):
    """Store h as groups ``row``... of the wire of ``full`` groups at ``offset`` of every rank, own last."""
    for k in tl.static_range(1, W + 1):  # the compiler keeps one copy of the arithmetic, and W of the stores
        encode_groups(h, peer_slot(table, (rank + k) % W, offset), row, full, C)


@triton.jit
def reduced_groups(slots, row, full, E: tl.constexpr, C: tl.constexpr):
    """Sum of the E.W slots from ``slots`` on, groups ``row``... of ``full``: fp32[R, G]."""
    return sum_senders(slots, tl.full((), E.SLOT, tl.int64), row, full, E.W, C)


@triton.jit
def summed_tile(slots, E: tl.constexpr, C: tl.constexpr):
    """``reduced_groups`` of a whole tile: one sender after the other, which saves registers where the result
    goes through a transform."""
    zero, full = tl.full((), 0, tl.int32), tl.full((), C.R, tl.int32)
    total = tl.zeros([C.R, C.G], tl.float32)
    for w in range(E.W):
        sender = tl.full((), 0, tl.int64) + w
        total = add_sender(total, slots, sender, tl.full((), E.SLOT, tl.int64), zero, full, C)
    return total


@triton.jit
def decoded_slot(slot, matrix, C: tl.constexpr):
    """fp32[R, G] of the wire in a slot."""
    return decode_groups(slot, tl.full((), 0, tl.int32), tl.full((), C.R, tl.int32), matrix, C)


@triton.jit
def write_tile(out, value, piece, first, message, rows, FLAGS: tl.constexpr, C: tl.constexpr):
    """Store fp32[R, G] as groups first... of a piece of the contiguous tensor, nothing beyond the piece."""
    numel, stride, length, _ = message
    start = piece.to(tl.int64) * stride
    store_tile(out + start, value, first, tl.minimum(numel - start, length), rows, FLAGS, C)


@triton.jit
def copy_plane(
    wire, table, offset, at, first, groups, rank, P: tl.constexpr, W: tl.constexpr, C: tl.constexpr
):
    """Groups first... of the plane of P bytes a group that starts ``at`` bytes a group in, to every rank."""
    plane = load_plane(wire + tl.full((), 1, tl.int64) * groups * at, first, groups, P, C)
    full = tl.full((), C.R, tl.int32)
    for k in tl.static_range(1, W + 1):
        slot = peer_slot(table, (rank + k) % W, offset + C.R * at)
        store_plane(slot, plane, tl.full((), 0, tl.int32), full, P, C)


@triton.jit
def copy_tile(wire, table, offset, first, groups, rank, W: tl.constexpr, C: tl.constexpr):
    """Groups first... of a wire of ``groups`` to the slot at ``offset`` of every rank."""
    if C.BITS == 8:
        copy_plane(wire, table, offset, 0, first, groups, rank, C.G, W, C)
    else:
        copy_plane(wire, table, offset, 0, first, groups, rank, C.G // 2, W, C)
        if C.BITS > 4:
            HIGH: tl.constexpr = C.G * (C.BITS - 4) // 8
            copy_plane(wire, table, offset, C.G // 2, first, groups, rank, HIGH, W, C)
    if C.DUAL:
        row = first + tl.arange(0, C.R)
        at = (wire + tl.full((), C.PAYLOAD, tl.int64) * groups).to(tl.pointer_type(tl.float32)) + row
        s = tl.load(at, mask=row < groups, other=0.0)
        step = dual_step(s, tl.load(at + groups, mask=row < groups, other=1.0), C)
        for k in tl.static_range(1, W + 1):
            slot = peer_slot(table, (rank + k) % W, offset + C.R * C.PAYLOAD)
            tl.store(slot.to(tl.pointer_type(tl.float32)) + tl.arange(0, C.R), step)
    else:
        copy_plane(wire, table, offset, C.PAYLOAD, first, groups, rank, 2, W, C)
