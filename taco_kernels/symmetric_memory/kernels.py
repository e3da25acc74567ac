"""The three collectives, one kernel each: a step sends the next tiles and works on those that arrived. An
all-reduce of two ranks in one exchange is the reduce-scatter's, of the whole tensor.

A tile of R groups is sent as a wire chunk of its own (taco's layout.py) in a slot of SLOT bytes. It is whole
blocks, so its lists of outliers are the codec's. Of dual scales only the step is sent that a decoder makes of
them, s / (sqrt(G) alpha), 4 bytes a group instead of 8: the sender computes what the receiver would.

A message is (numel, stride, length, groups): values in the tensor; values from the start of one piece to the
next, values and groups in a piece. Matrices lie in device memory and are loaded at the start of a phase: they
follow each other in shared memory, so that more programs fit on a multiprocessor.
"""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import shuffle, transform, unshuffle
from taco_kernels.common.packing import load_plane, store_plane
from taco_kernels.symmetric_memory.channel import (
    ack_flag,
    arrival,
    data_flag,
    publish,
    returned,
    wait,
)
from taco_kernels.taco.outlier_kernels import (
    add_lists,
    any_list,
    empty_lists,
    list_places,
    rotate,
    split_and_rotate,
    store_lists,
    sum_lists,
)
from taco_kernels.taco.wire import (
    add_sender,
    decode_groups,
    decode_two,
    dual_step,
    encode_groups,
    load_tile,
    store_tile,
    sum_senders,
)

# What differs between ranks or calls must not lead to different code, and numbers that are one stay numbers.
UNSPECIALIZED = ["memory", "rank", "error", "timeout", "groups"]


@triton.jit
def load_matrix(matrix, C: tl.constexpr):
    """[POINT, POINT] at ``matrix``."""
    return tl.load(
        matrix + tl.arange(0, C.POINT)[:, None] * C.POINT + tl.arange(0, C.POINT)[None, :]
    )


@triton.jit
def slot_of(memory, offset):
    """Pointer to the slot ``offset`` bytes into a rank's memory, given as an address."""
    return tl.multiple_of((memory + offset).to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def peer_slot(table, peer, offset):
    """Pointer to a slot in a peer's memory."""
    return slot_of(tl.load(table + peer), offset)


@triton.jit
def rotated_tile(x, piece, first, message, rows, matrix, FLAGS: tl.constexpr, C: tl.constexpr):
    """Groups first... of a piece, fp32[R, G] as they are quantised, and their lists of outliers."""
    numel, stride, length, groups = message
    if FLAGS.STRIDED:  # pieces are whole groups there, and rows are counted from the tensor's start
        tile = load_tile(x, piece * groups + first, numel, rows, FLAGS, C)
    else:
        start = piece.to(tl.int64) * stride
        tile = load_tile(x + start, first, tl.minimum(numel - start, length), rows, FLAGS, C)
    if C.OUTLIERS:
        h, words = split_and_rotate(tile, groups - first, matrix, C)
    else:
        h, words = rotate(tile, matrix, C), tl.full((), 0, tl.int32)  # no lists
    return h, words


@triton.jit
def store_wire(h, words, slot, C: tl.constexpr):
    """Encode what ``rotated_tile`` gave into a slot."""
    zero, full = tl.full((), 0, tl.int32), tl.full((), C.R, tl.int32)
    if C.OUTLIERS:
        store_lists(words, slot, zero, full, C)
    encode_groups(h, slot, zero, full, C)


@triton.jit
def send_tile(slot, x, piece, first, message, rows, matrix, FLAGS: tl.constexpr, C: tl.constexpr):
    """Encode groups first... of a piece into a slot."""
    h, words = rotated_tile(x, piece, first, message, rows, matrix, FLAGS, C)
    store_wire(h, words, slot, C)


@triton.jit
def decoded_slot(slot, matrix, C: tl.constexpr):
    """fp32[R, G] of the wire in a slot."""
    zero, full = tl.full((), 0, tl.int32), tl.full((), C.R, tl.int32)
    if C.OUTLIERS:
        found = any_list(slot, zero, zero, full, 1, C)
    h = decode_groups(slot, zero, full, matrix, C)
    if C.OUTLIERS:
        h = add_lists(h, found, slot, zero, zero, full, 1, C)
    return h


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
        at = (wire + tl.full((), C.PAYLOAD, tl.int64) * groups).to(
            tl.pointer_type(tl.float32)
        ) + row
        s = tl.load(at, mask=row < groups, other=0.0)
        step = dual_step(s, tl.load(at + groups, mask=row < groups, other=1.0), C)
        for k in tl.static_range(1, W + 1):
            slot = peer_slot(table, (rank + k) % W, offset + C.R * C.PAYLOAD)
            tl.store(slot.to(tl.pointer_type(tl.float32)) + tl.arange(0, C.R), step)
    else:
        copy_plane(wire, table, offset, C.PAYLOAD, first, groups, rank, 2, W, C)
    if C.OUTLIERS:
        SCALES: tl.constexpr = (
            8 if C.DUAL else 2
        )  # unlike in a slot both dual scales precede the lists
        word, inside = list_places(first, groups, C)
        used = tl.full((), C.PAYLOAD + SCALES, tl.int64) * groups
        at = (wire + (used + 15) // 16 * 16).to(tl.pointer_type(tl.int32)) + word
        words = tl.load(at, mask=inside, other=0)
        for k in tl.static_range(1, W + 1):
            slot = peer_slot(table, (rank + k) % W, offset)
            store_lists(words, slot, tl.full((), 0, tl.int32), tl.full((), C.R, tl.int32), C)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def all_reduce_kernel(
    x, out, to_wire, from_wire, table, steps_done, memory, rank, error, timeout, numel, stride, length,
    groups, run, inner, stride_outer, stride_inner, FLAGS: tl.constexpr, OUT_FLAGS: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, DHALF: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """out = sum of every rank's x, in W pieces of ``groups`` groups.

    In every step a program sends its next tiles to their owners, sums the tile of the step before and sends
    the sum to everybody, and decodes the sums of the step before that. A rank sends 2 (W - 1) / W payloads. C
    encodes what the ranks have, D the sums; HALF and DHALF are the same for half a tile.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    message, rows = (numel, stride, length, groups), (run, inner, stride_outer, stride_inner)
    memory, error, timeout = memory.to(tl.int64), error.to(tl.int64), timeout.to(tl.int64)
    full = tl.full((), C.R, tl.int32)
    data, acks = memory + data_flag(program, 0, E), memory + ack_flag(program, 0, E)
    distance = tl.full((), E.SLOT, tl.int64)

    done = tl.load(steps_done + program)
    steps = tl.cdiv(tl.cdiv(groups, C.R) - program, programs)
    for i in range(steps + 2):
        last = i >= steps - 1
        if i < steps:
            first = (program + i * programs) * C.R
            slot = arrival(program, done + i, rank, E)
            matrix = load_matrix(to_wire, C)
            wait(acks, done + i + 1 - E.DEPTH, error, timeout, E)
            for k in range(E.W):
                piece = (rank + 1 + k) % E.W
                to = peer_slot(table, piece, slot)
                send_tile(to, x, piece, first, message, rows, matrix, FLAGS, C)
        if (i >= 1) & (i <= steps):
            wait(data, done + i, error, timeout, E)
            slots = slot_of(memory, arrival(program, done + i - 1, 0, E))
            slot = returned(program, done + i - 1, rank, E)
            for half in range(2):  # a whole tile of sums does not fit in the registers
                row = half * HALF.R
                if C.OUTLIERS:
                    found = any_list(slots, distance, row, full, E.W, HALF)
                h = sum_senders(slots, distance, row, full, E.W, HALF)
                if C.OUTLIERS:
                    words = empty_lists(HALF)
                    if tl.max(found, axis=0) > 0:
                        h, words = sum_lists(h, slots, distance, row, full, E.W, HALF)
                for k in tl.static_range(
                    1, E.W + 1
                ):  # own last; one copy of the arithmetic, W of the stores
                    to = peer_slot(table, (rank + k) % E.W, slot)
                    encode_groups(h, to, row, full, DHALF)
                    if C.OUTLIERS:
                        store_lists(words, to, row, full, DHALF)
        if last & (i <= steps):  # nothing more to send soon: the others are waiting for this
            publish(table, program, rank, done + tl.minimum(i + 1, steps), done + i, E)
        if i >= 2:
            first = (program + (i - 2) * programs) * C.R
            matrix = load_matrix(from_wire, C)
            wait(acks, done + i - 1, error, timeout, E)
            for k in range(E.W):
                piece = (rank + k) % E.W
                slot = slot_of(memory, returned(program, done + i - 2, piece, E))
                value = decoded_slot(slot, matrix, D)
                write_tile(out, value, piece, first, message, rows, OUT_FLAGS, C)
        if not last:
            publish(table, program, rank, done + i + 1, done + i, E)
    if (
        E.W == 2
    ):  # an empty step: the next kernel may fill the slots of the sums, which must have been read
        steps += 1
        publish(table, program, rank, done + steps, done + steps, E)
        wait(acks, done + steps, error, timeout, E)
    tl.store(steps_done + program, done + steps)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def reduce_scatter_kernel(
    x, out, to_wire, from_wire, table, steps_done, memory, rank, error, timeout, numel, stride, length,
    groups, run, inner, stride_outer, stride_inner, FLAGS: tl.constexpr, OUT_FLAGS: tl.constexpr,
    C: tl.constexpr, WHOLE: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """out = piece number ``rank`` of the sum of every rank's x, pieces of ``length`` values.

    WHOLE: out = the whole sum; a step has two tiles, the second in the slots for what comes back.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    message, rows = (numel, stride, length, groups), (run, inner, stride_outer, stride_inner)
    memory, error, timeout = memory.to(tl.int64), error.to(tl.int64), timeout.to(tl.int64)
    zero, full = tl.full((), 0, tl.int32), tl.full((), C.R, tl.int32)
    data, acks = memory + data_flag(program, 0, E), memory + ack_flag(program, 0, E)
    distance = tl.full((), E.SLOT, tl.int64)
    TILES: tl.constexpr = 2 if WHOLE else 1

    done = tl.load(steps_done + program)
    steps = tl.cdiv(tl.cdiv(groups, C.R * TILES) - program, programs)
    for i in range(steps + 1):
        if i < steps:
            matrix = load_matrix(to_wire, C)
            wait(acks, done + i + 1 - E.DEPTH, error, timeout, E)
            slot = arrival(program, done + i, rank, E)
            if WHOLE:
                left = tl.cdiv(groups, C.R) - (program + i * programs) * TILES
                for tile in range(tl.minimum(TILES, left)):
                    first = ((program + i * programs) * TILES + tile) * C.R
                    h, words = rotated_tile(x, zero, first, message, rows, matrix, FLAGS, C)
                    for k in tl.static_range(1, E.W + 1):  # own last; one copy of the arithmetic
                        store_wire(
                            h, words, peer_slot(table, (rank + k) % E.W, slot + tile * E.AREA), C
                        )
            else:
                first = (program + i * programs) * C.R
                for k in range(E.W):
                    piece = (rank + 1 + k) % E.W
                    to = peer_slot(table, piece, slot)
                    send_tile(to, x, piece, first, message, rows, matrix, FLAGS, C)
            if i == steps - 1:  # the others are waiting for this; else it goes with the next ack
                publish(table, program, rank, done + steps, done + tl.maximum(i - 1, 0), E)
        if i >= 1:
            wait(data, done + i, error, timeout, E)
            left = 1
            if WHOLE:
                left = tl.cdiv(groups, C.R) - (program + (i - 1) * programs) * TILES
            for tile in range(tl.minimum(TILES, left)):
                first = ((program + (i - 1) * programs) * TILES + tile) * C.R
                slots = slot_of(memory, arrival(program, done + i - 1, 0, E) + tile * E.AREA)
                if C.OUTLIERS:
                    found = any_list(slots, distance, zero, full, E.W, C)
                if E.W == 2:
                    h = decode_two(slots, distance, zero, full, load_matrix(from_wire, C), C)
                else:
                    h = tl.zeros([C.R, C.G], tl.float32)
                    for w in range(
                        E.W
                    ):  # one after the other: fewer registers, as the sum is transformed
                        sender = tl.full((), 0, tl.int64) + w
                        h = add_sender(h, slots, sender, distance, zero, full, C)
                    if C.HADAMARD:
                        h = unshuffle(transform(shuffle(h, C), load_matrix(from_wire, C), C), C)
                if C.OUTLIERS:
                    h = add_lists(h, found, slots, distance, zero, full, E.W, C)
                write_tile(out, h, zero, first, message, rows, OUT_FLAGS, C)
        publish(table, program, rank, done + tl.minimum(i + 1, steps), done + i, E)
    tl.store(steps_done + program, done + steps)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def all_gather_kernel(
    x, out, to_wire, from_wire, table, steps_done, memory, rank, error, timeout, numel, stride, length,
    groups, run, inner, stride_outer, stride_inner, FLAGS: tl.constexpr, OUT_FLAGS: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """out = what every rank's wire x decodes to, pieces of ``length`` values."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    message, rows = (numel, stride, length, groups), (run, inner, stride_outer, stride_inner)
    memory, error, timeout = memory.to(tl.int64), error.to(tl.int64), timeout.to(tl.int64)
    data, acks = memory + data_flag(program, 0, E), memory + ack_flag(program, 0, E)

    done = tl.load(steps_done + program)
    steps = tl.cdiv(tl.cdiv(groups, C.R) - program, programs)
    for i in range(steps + 1):
        if i < steps:
            first = (program + i * programs) * C.R
            slot = arrival(program, done + i, rank, E)
            wait(acks, done + i + 1 - E.DEPTH, error, timeout, E)
            copy_tile(x, table, slot, first, groups, rank, E.W, C)
            if i == steps - 1:  # the others are waiting for this; else it goes with the next ack
                publish(table, program, rank, done + steps, done + tl.maximum(i - 1, 0), E)
        if i >= 1:
            first = (program + (i - 1) * programs) * C.R
            matrix = load_matrix(from_wire, C)
            wait(data, done + i, error, timeout, E)
            for k in range(E.W):
                piece = (rank + k) % E.W
                slot = slot_of(memory, arrival(program, done + i - 1, piece, E))
                value = decoded_slot(slot, matrix, C)
                write_tile(out, value, piece, first, message, rows, OUT_FLAGS, C)
        publish(table, program, rank, done + tl.minimum(i + 1, steps), done + i, E)
    tl.store(steps_done + program, done + steps)
