"""The three collectives, one kernel each: a step sends the next tiles and works on those that
arrived.

An all-reduce of two ranks in one exchange is done by the reduce-scatter's kernel, on the whole
tensor.

A tile of ``R`` groups is sent as a wire chunk of its own (taco's layout.py) in a slot of ``SLOT``
bytes. It is whole blocks, so its lists of outliers are the codec's. Of dual scales only the step is
sent that a decoder makes of them, s / (sqrt(G) alpha), 4 bytes a group instead of 8: the sender
computes what the receiver would.

Names that all kernels share:

    piece          the part of a tensor that one rank sums (or, in an all-gather, that it brings along)
    owner          the rank that sums a piece: piece p is owned by rank p
    first          number of a tile's first group inside its piece
    step           what a program does with one tile of every piece; see channel.py for how steps are counted
    steps_before   steps that this program had done when the kernel began
    i              iteration of a kernel's loop; it sends step steps_before + i, and works on what earlier
                   steps sent

Matrices lie in device memory and are loaded at the start of a phase: they follow each other in
shared memory, so that more programs fit on a multiprocessor.
"""

from typing import NamedTuple

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

# What differs between ranks or calls must not lead to different code, and numbers that are 1 stay
# numbers (Triton would compile a kernel of its own for them). These are no tuple, as this list does
# not reach into one.
UNSPECIALIZED = ["memory", "rank", "error", "timeout", "groups"]


class Extent(NamedTuple):
    """How the tensor is cut into pieces, in values; a kernel argument."""

    numel: int
    """Values in the tensor."""
    stride: int
    """Values from the start of one piece to the start of the next."""
    length: int
    """Values in a piece; the last piece may have fewer."""


class Pieces(NamedTuple):
    """An ``Extent`` and the number of groups in a piece, which kernels are not specialised on."""

    numel: int
    stride: int
    length: int
    groups: int


@triton.jit
def load_matrix(matrix, SPEC: tl.constexpr):
    """[POINT, POINT]: the Hadamard matrix at ``matrix``."""
    row = tl.arange(0, SPEC.POINT)[:, None]
    column = tl.arange(0, SPEC.POINT)[None, :]
    return tl.load(matrix + row * SPEC.POINT + column)


@triton.jit
def slot_of(memory, offset):
    """Pointer to the slot ``offset`` bytes into a rank's memory, which is given by its address."""
    return tl.multiple_of((memory + offset).to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def peer_slot(table, peer, offset):
    """Pointer to the slot ``offset`` bytes into a peer's memory; ``table`` has every rank's
    address."""
    return slot_of(tl.load(table + peer), offset)


@triton.jit
def rotated_tile(x, piece, first, pieces, rows, matrix, FLAGS: tl.constexpr, SPEC: tl.constexpr):
    """Load groups first... of a piece and rotate them into the domain in which they are quantised.

    Args:
        x: the tensor, contiguous or rows with strides (``FLAGS.STRIDED``, see taco's wire.py).
        piece: number of the piece.
        first: number of the tile's first group inside the piece.
        pieces: ``Pieces`` of the tensor.
        rows: (run, inner, stride_outer, stride_inner) of a strided tensor.
        matrix: [POINT, POINT], loaded.

    Returns:
        fp32[R, G]; and the tile's lists of outliers, int32[blocks, SLOTS], or a number that is not
        used.
    """
    if FLAGS.STRIDED:
        # Pieces of a strided tensor are whole groups, and its rows are counted from the tensor's
        # start.
        tile = load_tile(x, piece * pieces.groups + first, pieces.numel, rows, FLAGS, SPEC)
    else:
        start = piece.to(tl.int64) * pieces.stride
        inside = tl.minimum(pieces.numel - start, pieces.length)
        tile = load_tile(x + start, first, inside, rows, FLAGS, SPEC)
    if SPEC.OUTLIERS:
        rotated, lists = split_and_rotate(tile, pieces.groups - first, matrix, SPEC)
    else:
        rotated = rotate(tile, matrix, SPEC)
        lists = tl.full((), 0, tl.int32)  # not used
    return rotated, lists


@triton.jit
def store_wire(rotated, lists, slot, SPEC: tl.constexpr):
    """Encode a tile into a slot.

    Args:
        rotated: fp32[R, G], first result of ``rotated_tile``.
        lists: its second result.
        slot: pointer into the memory of the rank that is to have the tile.
    """
    zero = tl.full((), 0, tl.int32)
    full = tl.full((), SPEC.R, tl.int32)
    if SPEC.OUTLIERS:
        store_lists(lists, slot, zero, full, SPEC)
    encode_groups(rotated, slot, zero, full, SPEC)


@triton.jit
def send_tile(slot, x, piece, first, pieces, rows, matrix, FLAGS: tl.constexpr, SPEC: tl.constexpr):
    """Encode groups first... of a piece into a slot. Arguments as for ``rotated_tile``.

    Args:
        slot: pointer into the memory of the rank that is to have the tile.
    """
    rotated, lists = rotated_tile(x, piece, first, pieces, rows, matrix, FLAGS, SPEC)
    store_wire(rotated, lists, slot, SPEC)


@triton.jit
def decoded_slot(slot, matrix, SPEC: tl.constexpr):
    """fp32[R, G]: the values of the wire in a slot.

    Args:
        slot: pointer into this rank's memory.
        matrix: [POINT, POINT], loaded.
    """
    zero = tl.full((), 0, tl.int32)
    full = tl.full((), SPEC.R, tl.int32)
    # The lists are loaded before the codes, so that both loads are in flight together.
    if SPEC.OUTLIERS:
        lists = any_list(slot, zero, zero, full, 1, SPEC)
    values = decode_groups(slot, zero, full, matrix, SPEC)
    if SPEC.OUTLIERS:
        values = add_lists(values, lists, slot, zero, zero, full, 1, SPEC)
    return values


@triton.jit
def write_tile(out, values, piece, first, pieces, rows, FLAGS: tl.constexpr, SPEC: tl.constexpr):
    """Store fp32[R, G] as groups first... of a piece of the contiguous ``out``; nothing beyond the
    piece.

    Args:
        out: pointer to the tensor's start.
        values: fp32[R, G].
        piece: number of the piece.
        first: number of the tile's first group inside the piece.
        pieces: ``Pieces`` of the tensor.
        rows: not used, as ``out`` is contiguous.
    """
    start = piece.to(tl.int64) * pieces.stride
    inside = tl.minimum(pieces.numel - start, pieces.length)
    store_tile(out + start, values, first, inside, rows, FLAGS, SPEC)


@triton.jit
def copy_plane(
    wire,
    table,
    offset,
    before,
    first,
    groups,
    rank,
    PLANE: tl.constexpr,
    RANKS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Copy groups first... of one plane of a wire into the same slot of every rank.

    A wire of n groups is planes, one after the other, each with so many bytes a group; a slot is a
    wire of R groups. So the plane that follows ``before`` bytes a group begins at n * before and at
    R * before.

    Args:
        wire: pointer to the wire of ``groups`` groups.
        table: addresses of every rank's memory.
        offset: of the slot in each rank's memory, bytes.
        before: bytes a group of all planes before this one.
        first: number of the tile's first group.
        groups: groups in the wire.
        rank: of this process.
        PLANE: bytes a group of this plane.
        RANKS: ranks of the channel.
    """
    source = wire + tl.full((), 1, tl.int64) * groups * before
    plane = load_plane(source, first, groups, PLANE, SPEC)
    full = tl.full((), SPEC.R, tl.int32)
    # Each rank begins with its next neighbour, so that not all of them write to one rank at a time.
    for k in tl.static_range(1, RANKS + 1):
        slot = peer_slot(table, (rank + k) % RANKS, offset + SPEC.R * before)
        store_plane(slot, plane, tl.full((), 0, tl.int32), full, PLANE, SPEC)


@triton.jit
def copy_dual_steps(
    wire, table, offset, first, groups, rank, RANKS: tl.constexpr, SPEC: tl.constexpr
):
    """Merge the two scales of groups first... into fp32 steps, and store those in every rank's
    slot.

    Arguments as for ``copy_plane``.
    """
    row = first + tl.arange(0, SPEC.R)
    plane = wire + tl.full((), SPEC.PAYLOAD, tl.int64) * groups
    scales = (
        plane.to(tl.pointer_type(tl.float32)) + row
    )  # s of every group, then alpha of every group
    s = tl.load(scales, mask=row < groups, other=0.0)
    step = dual_step(s, tl.load(scales + groups, mask=row < groups, other=1.0), SPEC)
    for k in tl.static_range(1, RANKS + 1):
        slot = peer_slot(table, (rank + k) % RANKS, offset + SPEC.R * SPEC.PAYLOAD)
        tl.store(slot.to(tl.pointer_type(tl.float32)) + tl.arange(0, SPEC.R), step)


@triton.jit
def copy_lists(wire, table, offset, first, groups, rank, RANKS: tl.constexpr, SPEC: tl.constexpr):
    """Copy the lists of outliers of the blocks from group ``first`` on into every rank's slot.

    Arguments as for ``copy_plane``.
    """
    # A slot is a wire whose SPEC says that dual scales are merged; the wire here still has both of
    # them.
    SCALES: tl.constexpr = 8 if SPEC.DUAL else 2
    word, inside = list_places(first, groups, SPEC)
    used = tl.full((), SPEC.PAYLOAD + SCALES, tl.int64) * groups
    lists = (wire + (used + 15) // 16 * 16).to(tl.pointer_type(tl.int32)) + word
    words = tl.load(lists, mask=inside, other=0)
    for k in tl.static_range(1, RANKS + 1):
        slot = peer_slot(table, (rank + k) % RANKS, offset)
        store_lists(words, slot, tl.full((), 0, tl.int32), tl.full((), SPEC.R, tl.int32), SPEC)


@triton.jit
def copy_tile(wire, table, offset, first, groups, rank, RANKS: tl.constexpr, SPEC: tl.constexpr):
    """Copy groups first... of a wire of ``groups`` groups to the slot at ``offset`` of every rank.

    ::

        wire    codes of all groups: low plane | high plane | scales of all groups | lists of all blocks
        slot    the same of R groups, with a step instead of dual scales

    Arguments as for ``copy_plane``.
    """
    if SPEC.BITS == 8:
        copy_plane(wire, table, offset, 0, first, groups, rank, SPEC.G, RANKS, SPEC)
    else:
        # Codes of 5 and 6 bits are a plane of their lower 4 bits, G / 2 bytes a group, and one of
        # the rest.
        copy_plane(wire, table, offset, 0, first, groups, rank, SPEC.G // 2, RANKS, SPEC)
        if SPEC.BITS > 4:
            HIGH: tl.constexpr = SPEC.G * (SPEC.BITS - 4) // 8
            copy_plane(wire, table, offset, SPEC.G // 2, first, groups, rank, HIGH, RANKS, SPEC)
    if SPEC.DUAL:
        copy_dual_steps(wire, table, offset, first, groups, rank, RANKS, SPEC)
    else:
        copy_plane(wire, table, offset, SPEC.PAYLOAD, first, groups, rank, 2, RANKS, SPEC)
    if SPEC.OUTLIERS:
        copy_lists(wire, table, offset, first, groups, rank, RANKS, SPEC)


@triton.jit
def sum_and_return(
    slots, slot, table, rank, CHANNEL: tl.constexpr, HALF: tl.constexpr, HALF_OUT: tl.constexpr
):
    """Sum the senders' tiles of this rank's piece, and send the encoded sum to every rank.

    It stays in the Hadamard domain, where adding up gives the transform of the sum. A whole tile of
    sums does not fit in the registers, so it is done in two halves.

    Args:
        slots: pointer to sender 0's slot in this rank's memory; those of the others follow.
        slot: offset of the slot in every rank's memory that the sum goes to.
        table: addresses of every rank's memory.
        rank: of this process.
        CHANNEL: ``ChannelShape``.
        HALF: constants of the senders' codec for half a tile.
        HALF_OUT: constants of the sum's codec for half a tile.
    """
    full = tl.full((), 2 * HALF.R, tl.int32)
    distance = tl.full((), CHANNEL.SLOT, tl.int64)
    for half in range(2):
        row = half * HALF.R
        if HALF.OUTLIERS:
            senders_lists = any_list(slots, distance, row, full, CHANNEL.W, HALF)
        rotated = sum_senders(slots, distance, row, full, CHANNEL.W, HALF)
        if HALF.OUTLIERS:
            lists = empty_lists(HALF)
            if tl.max(senders_lists, axis=0) > 0:
                rotated, lists = sum_lists(rotated, slots, distance, row, full, CHANNEL.W, HALF)
        # This rank's copy comes last: the others wait longer for theirs. The arithmetic of the
        # encoder is the same for all, so the compiler has one copy of it, and W of the stores.
        for k in tl.static_range(1, CHANNEL.W + 1):
            target = peer_slot(table, (rank + k) % CHANNEL.W, slot)
            encode_groups(rotated, target, row, full, HALF_OUT)
            if HALF.OUTLIERS:
                store_lists(lists, target, row, full, HALF_OUT)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def all_reduce_kernel(
    x,
    out,
    to_wire,
    from_wire,
    table,
    steps_done,
    memory,
    rank,
    error,
    timeout,
    extent,
    groups,
    rows,
    FLAGS: tl.constexpr,
    OUT_FLAGS: tl.constexpr,
    SPEC: tl.constexpr,
    HALF: tl.constexpr,
    SUM_SPEC: tl.constexpr,
    HALF_SUM: tl.constexpr,
    CHANNEL: tl.constexpr,
):
    """out = sum of every rank's x, in W pieces of ``groups`` groups. A rank sends 2 (W - 1) / W
    payloads.

    A program works on tiles program, program + programs, ... of every piece, in a pipeline of three
    phases. Iteration i of its loop does this with its i-th tile (all counts are plus
    ``steps_before``)::

        iteration         0       1       2       3     ...  steps-1  steps   steps+1
        send              tile 0  tile 1  tile 2  tile 3     last     -       -        x -> owners' slots
        sum               -       tile 0  tile 1  tile 2     ...      last    -        arrival -> returned slots
        decode            -       -       tile 0  tile 1     ...      ...     last     returned slots -> out
        publishes data    1       2       3       4          steps    steps   -        tiles sent
        publishes ack     0       1       2       3          steps-1  steps   -        tiles read, sums sent

    *Who writes which flag.* Program p of rank r writes its own data and ack flag, (r, p), in the
    memory of every rank, and reads all (., p) in its own memory. Flags only grow.

    *Who waits for which*, and in which iteration peers publish that::

        send of tile i         acks >= i + 1 - DEPTH   iteration i + 1 - DEPTH   the arrival slot has been read
        sum of tile i - 1      data >= i               iteration i - 1           the senders' tiles are here
        decode of tile i - 2   acks >= i - 1           iteration i - 1           the owners' sums are here

    *Why no deadlock.* Every wait of iteration i is for what peers publish in an earlier iteration,
    so the program that is furthest behind never waits for ever. Program p waits for programs p
    alone, and all programs of a launch are resident (group.py), so that those it waits for run.

    *Why no slot is overwritten that is still read.* Arrival slots: the acks of DEPTH steps before.
    Returned slots: an owner writes sum n after it has seen this rank's data flag n + 1, which this
    rank publishes after it has decoded sum n - 3 or a later one, whose slot sum n takes.

    *Why a replay in a CUDA graph is safe.* Steps are counted from the channel's creation on, in
    ``steps_done`` in device memory: no argument of a launch depends on what ran before, and nothing
    is reset. Every rank makes the same calls in the same order (order.py), so program p has the
    same count on all of them.

    Args:
        x: this rank's tensor: contiguous, or rows with strides (``FLAGS.STRIDED``).
        out: contiguous tensor of the same values.
        to_wire: [POINT, POINT] matrix into the Hadamard domain, in device memory.
        from_wire: [POINT, POINT] matrix out of it.
        table: int64[W], the address of every rank's memory.
        steps_done: int64[PROGRAMS], steps of each program since the channel's creation.
        memory: address of this rank's memory.
        rank: of this process.
        error: address of the pinned int32 that says which rank a program gave up waiting for.
        timeout: nanoseconds that a program waits before it gives up.
        extent: ``Extent`` of the tensor, a piece a rank.
        groups: groups in a piece.
        rows: (run, inner, stride_outer, stride_inner) of a strided x.
        FLAGS: ``Flags`` of x.
        OUT_FLAGS: ``Flags`` of out.
        SPEC: ``Spec`` of what the ranks have; HALF the same for half a tile.
        HALF: see SPEC.
        SUM_SPEC: ``Spec`` of the sums; HALF_SUM the same for half a tile.
        HALF_SUM: see SUM_SPEC.
        CHANNEL: ``ChannelShape``.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pieces = Pieces(extent.numel, extent.stride, extent.length, groups)
    memory = memory.to(tl.int64)
    error = error.to(tl.int64)
    timeout = timeout.to(tl.int64)
    data = memory + data_flag(program, 0, CHANNEL)
    acks = memory + ack_flag(program, 0, CHANNEL)

    steps_before = tl.load(steps_done + program)
    # How many of the piece's tiles are program, program + programs, program + 2 programs, ...
    steps = tl.cdiv(tl.cdiv(groups, SPEC.R) - program, programs)
    # With outliers nothing is computed ahead of a loop: newer compilers would keep more than fits
    # in the registers through all three phases.
    for i in tl.range(steps + 2, disable_licm=SPEC.OUTLIERS):
        is_last_send = i >= steps - 1
        if i < steps:
            first = (program + i * programs) * SPEC.R
            slot = arrival(program, steps_before + i, rank, CHANNEL)
            matrix = load_matrix(to_wire, SPEC)
            wait(acks, steps_before + i + 1 - CHANNEL.DEPTH, error, timeout, CHANNEL)
            # Each rank begins with its next neighbour, so that not all of them write to one owner
            # at a time.
            for k in tl.range(CHANNEL.W, disable_licm=SPEC.OUTLIERS):
                owner = (rank + 1 + k) % CHANNEL.W
                target = peer_slot(table, owner, slot)
                send_tile(target, x, owner, first, pieces, rows, matrix, FLAGS, SPEC)
        if (i >= 1) & (i <= steps):
            wait(data, steps_before + i, error, timeout, CHANNEL)
            slots = slot_of(memory, arrival(program, steps_before + i - 1, 0, CHANNEL))
            slot = returned(program, steps_before + i - 1, rank, CHANNEL)
            sum_and_return(slots, slot, table, rank, CHANNEL, HALF, HALF_SUM)
        if is_last_send & (i <= steps):
            # Nothing more to send soon: the others are waiting for this. Else it comes after the
            # decoding, when the stores above are through, and the fence has nothing to wait for.
            sent = steps_before + tl.minimum(i + 1, steps)
            publish(table, program, rank, sent, steps_before + i, CHANNEL)
        if i >= 2:
            first = (program + (i - 2) * programs) * SPEC.R
            matrix = load_matrix(from_wire, SPEC)
            wait(acks, steps_before + i - 1, error, timeout, CHANNEL)
            for k in tl.range(CHANNEL.W, disable_licm=SPEC.OUTLIERS):
                owner = (rank + k) % CHANNEL.W
                slot = slot_of(memory, returned(program, steps_before + i - 2, owner, CHANNEL))
                values = decoded_slot(slot, matrix, SUM_SPEC)
                write_tile(out, values, owner, first, pieces, rows, OUT_FLAGS, SPEC)
        if not is_last_send:
            publish(table, program, rank, steps_before + i + 1, steps_before + i, CHANNEL)
    if CHANNEL.W == 2:
        # An empty step. The next kernel may be a reduce-scatter of the whole tensor, whose second
        # tiles go to the returned slots after an ack alone: so all sums must have been decoded
        # before the last ack.
        steps += 1
        publish(table, program, rank, steps_before + steps, steps_before + steps, CHANNEL)
        wait(acks, steps_before + steps, error, timeout, CHANNEL)
    tl.store(steps_done + program, steps_before + steps)


@triton.jit
def summed_slots(slots, from_wire, CHANNEL: tl.constexpr, SPEC: tl.constexpr):
    """fp32[R, G]: the sum of every sender's tile, out of the Hadamard domain.

    Args:
        slots: pointer to sender 0's slot in this rank's memory; those of the others follow.
        from_wire: matrix out of the Hadamard domain, in device memory.
        CHANNEL: ``ChannelShape``.
        SPEC: ``Spec`` of the senders' codec.
    """
    zero = tl.full((), 0, tl.int32)
    full = tl.full((), SPEC.R, tl.int32)
    distance = tl.full((), CHANNEL.SLOT, tl.int64)
    if SPEC.OUTLIERS:
        lists = any_list(slots, distance, zero, full, CHANNEL.W, SPEC)
    if CHANNEL.W == 2:
        total = decode_two(slots, distance, zero, full, load_matrix(from_wire, SPEC), SPEC)
    else:
        # Senders are added one after the other, which takes fewer registers, as the sum is
        # transformed.
        total = tl.zeros([SPEC.R, SPEC.G], tl.float32)
        for w in range(CHANNEL.W):
            total = add_sender(total, slots, w, distance, zero, full, SPEC)
        if SPEC.HADAMARD:
            shuffled = shuffle(total, SPEC)
            total = unshuffle(transform(shuffled, load_matrix(from_wire, SPEC), SPEC), SPEC)
    if SPEC.OUTLIERS:
        total = add_lists(total, lists, slots, distance, zero, full, CHANNEL.W, SPEC)
    return total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def reduce_scatter_kernel(
    x,
    out,
    to_wire,
    from_wire,
    table,
    steps_done,
    memory,
    rank,
    error,
    timeout,
    extent,
    groups,
    rows,
    FLAGS: tl.constexpr,
    OUT_FLAGS: tl.constexpr,
    SPEC: tl.constexpr,
    ONE_PIECE: tl.constexpr,
    CHANNEL: tl.constexpr,
):
    """out = piece number ``rank`` of the sum of every rank's x; with ONE_PIECE the sum of all of x.

    ::

        iteration         0       1       2     ...  steps-1  steps
        send              tile 0  tile 1  tile 2     last     -        x -> owners' arrival slots
        sum               -       tile 0  tile 1     ...      last     arrival slots -> out
        publishes data    1       2       3          steps    steps    tiles sent
        publishes ack     0       1       2          steps-1  steps    tiles read

    Sending tile i waits for acks >= i + 1 - DEPTH, summing tile i - 1 for data >= i: both are
    published in earlier iterations. Replays, slots and the absence of deadlock: see
    ``all_reduce_kernel``.

    With ONE_PIECE every rank sends its tile to all ranks, and a step has two tiles, the second one
    in the slots that an all-reduce has for returned sums. They are guarded by the same flags.

    Args:
        x: this rank's tensor: contiguous, or rows with strides (``FLAGS.STRIDED``).
        out: contiguous tensor of one piece's values.
        to_wire: [POINT, POINT] matrix into the Hadamard domain, in device memory.
        from_wire: [POINT, POINT] matrix out of it.
        table: int64[W], the address of every rank's memory.
        steps_done: int64[PROGRAMS], steps of each program since the channel's creation.
        memory: address of this rank's memory.
        rank: of this process.
        error: address of the pinned int32 that says which rank a program gave up waiting for.
        timeout: nanoseconds that a program waits before it gives up.
        extent: ``Extent`` of the tensor; with ONE_PIECE it is one.
        groups: groups in a piece.
        rows: (run, inner, stride_outer, stride_inner) of a strided x.
        FLAGS: ``Flags`` of x.
        OUT_FLAGS: ``Flags`` of out.
        SPEC: ``Spec`` of the codec.
        ONE_PIECE: every rank sums all of x.
        CHANNEL: ``ChannelShape``.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pieces = Pieces(extent.numel, extent.stride, extent.length, groups)
    memory = memory.to(tl.int64)
    error = error.to(tl.int64)
    timeout = timeout.to(tl.int64)
    zero = tl.full((), 0, tl.int32)
    data = memory + data_flag(program, 0, CHANNEL)
    acks = memory + ack_flag(program, 0, CHANNEL)
    TILES: tl.constexpr = 2 if ONE_PIECE else 1

    steps_before = tl.load(steps_done + program)
    steps = tl.cdiv(tl.cdiv(groups, SPEC.R * TILES) - program, programs)
    for i in range(steps + 1):
        if i < steps:
            matrix = load_matrix(to_wire, SPEC)
            wait(acks, steps_before + i + 1 - CHANNEL.DEPTH, error, timeout, CHANNEL)
            slot = arrival(program, steps_before + i, rank, CHANNEL)
            if ONE_PIECE:
                tiles_left = tl.cdiv(groups, SPEC.R) - (program + i * programs) * TILES
                for tile in range(tl.minimum(TILES, tiles_left)):
                    first = ((program + i * programs) * TILES + tile) * SPEC.R
                    rotated, lists = rotated_tile(x, zero, first, pieces, rows, matrix, FLAGS, SPEC)
                    # This rank's copy comes last; one copy of the arithmetic, W of the stores.
                    for k in tl.static_range(1, CHANNEL.W + 1):
                        peer = (rank + k) % CHANNEL.W
                        target = peer_slot(table, peer, slot + tile * CHANNEL.AREA)
                        store_wire(rotated, lists, target, SPEC)
            else:
                first = (program + i * programs) * SPEC.R
                for k in range(CHANNEL.W):
                    owner = (rank + 1 + k) % CHANNEL.W
                    target = peer_slot(table, owner, slot)
                    send_tile(target, x, owner, first, pieces, rows, matrix, FLAGS, SPEC)
            if i == steps - 1:  # the others are waiting for this; else it goes with the next ack
                read = steps_before + tl.maximum(i - 1, 0)
                publish(table, program, rank, steps_before + steps, read, CHANNEL)
        if i >= 1:
            wait(data, steps_before + i, error, timeout, CHANNEL)
            tiles_left = 1
            if ONE_PIECE:
                tiles_left = tl.cdiv(groups, SPEC.R) - (program + (i - 1) * programs) * TILES
            for tile in range(tl.minimum(TILES, tiles_left)):
                first = ((program + (i - 1) * programs) * TILES + tile) * SPEC.R
                slot = arrival(program, steps_before + i - 1, 0, CHANNEL) + tile * CHANNEL.AREA
                total = summed_slots(slot_of(memory, slot), from_wire, CHANNEL, SPEC)
                write_tile(out, total, zero, first, pieces, rows, OUT_FLAGS, SPEC)
        sent = steps_before + tl.minimum(i + 1, steps)
        publish(table, program, rank, sent, steps_before + i, CHANNEL)
    tl.store(steps_done + program, steps_before + steps)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def all_gather_kernel(
    x,
    out,
    to_wire,
    from_wire,
    table,
    steps_done,
    memory,
    rank,
    error,
    timeout,
    extent,
    groups,
    rows,
    FLAGS: tl.constexpr,
    OUT_FLAGS: tl.constexpr,
    SPEC: tl.constexpr,
    CHANNEL: tl.constexpr,
):
    """out = the values of every rank's wire x, a piece a rank.

    Iteration i copies tile i of the wire into every rank's arrival slots and decodes the tiles i -
    1 that arrived. Flags, waits and their reasons are those of ``reduce_scatter_kernel``.

    Args:
        x: this rank's wire, uint8, of ``groups`` groups.
        out: contiguous tensor of all ranks' values.
        to_wire: not used; kernels of a channel take the same arguments.
        from_wire: [POINT, POINT] matrix out of the Hadamard domain, in device memory.
        table: int64[W], the address of every rank's memory.
        steps_done: int64[PROGRAMS], steps of each program since the channel's creation.
        memory: address of this rank's memory.
        rank: of this process.
        error: address of the pinned int32 that says which rank a program gave up waiting for.
        timeout: nanoseconds that a program waits before it gives up.
        extent: ``Extent`` of out, a piece a rank.
        groups: groups in a piece.
        rows: not used, as out is contiguous.
        FLAGS: not used.
        OUT_FLAGS: ``Flags`` of out.
        SPEC: ``Spec`` of the codec.
        CHANNEL: ``ChannelShape``.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pieces = Pieces(extent.numel, extent.stride, extent.length, groups)
    memory = memory.to(tl.int64)
    error = error.to(tl.int64)
    timeout = timeout.to(tl.int64)
    data = memory + data_flag(program, 0, CHANNEL)
    acks = memory + ack_flag(program, 0, CHANNEL)

    steps_before = tl.load(steps_done + program)
    steps = tl.cdiv(tl.cdiv(groups, SPEC.R) - program, programs)
    for i in range(steps + 1):
        if i < steps:
            first = (program + i * programs) * SPEC.R
            slot = arrival(program, steps_before + i, rank, CHANNEL)
            wait(acks, steps_before + i + 1 - CHANNEL.DEPTH, error, timeout, CHANNEL)
            copy_tile(x, table, slot, first, groups, rank, CHANNEL.W, SPEC)
            if i == steps - 1:  # the others are waiting for this; else it goes with the next ack
                read = steps_before + tl.maximum(i - 1, 0)
                publish(table, program, rank, steps_before + steps, read, CHANNEL)
        if i >= 1:
            first = (program + (i - 1) * programs) * SPEC.R
            matrix = load_matrix(from_wire, SPEC)
            wait(data, steps_before + i, error, timeout, CHANNEL)
            for k in range(CHANNEL.W):
                owner = (rank + k) % CHANNEL.W
                slot = slot_of(memory, arrival(program, steps_before + i - 1, owner, CHANNEL))
                values = decoded_slot(slot, matrix, SPEC)
                write_tile(out, values, owner, first, pieces, rows, OUT_FLAGS, SPEC)
        sent = steps_before + tl.minimum(i + 1, steps)
        publish(table, program, rank, sent, steps_before + i, CHANNEL)
    tl.store(steps_done + program, steps_before + steps)
