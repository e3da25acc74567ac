"""Triton kernels of the owner's side: adding wires up, and peeling."""

import triton
import triton.language as tl

from taco_kernels.count_sketch.encode_kernels import column_mask, sign_of


@triton.jit
def combine_kernel(
    wires, cells, words, count, wires_stride, words_at, word_count, W: tl.constexpr, T: tl.constexpr
):
    """Sum of W wires' cells (int16 or int32, as the pointer says) as int32, OR of their bitmaps."""
    place = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    inside = place < count
    total = tl.zeros([T], tl.int32)
    for w in tl.static_range(W):
        total += tl.load(wires + w * wires_stride + place, mask=inside, other=0).to(tl.int32)
    tl.store(cells + place, total, mask=inside)
    if tl.program_id(0) * T < word_count:
        inside = place < word_count
        bitmap = wires.to(tl.pointer_type(tl.int32)) + words_at
        stride = wires_stride * wires.dtype.element_ty.primitive_bitwidth // 32
        union = tl.zeros([T], tl.int32)
        for w in tl.static_range(W):
            union |= tl.load(bitmap + w * stride + place, mask=inside, other=0)
        tl.store(words + place, union, mask=inside)


@triton.jit
def step_of(exponent, MANTISSA: tl.constexpr, FLOOR: tl.constexpr):
    """reference.grid_steps of an int32 exponent below 255."""
    return ((tl.maximum(exponent, FLOOR) + 1 - MANTISSA) << 23).to(tl.float32, bitcast=True)


@triton.jit
def narrow(q, BITS: tl.constexpr):
    """q modulo 2^BITS with its sign."""
    if BITS == 16:
        q = (q << 16) >> 16
    return q


@triton.jit
def spot_of(index, first, slab, WIDTH: tl.constexpr):
    """Where cell ``index`` of a slab lies, counted from sketch row ``first``, row by row of 32."""
    return (first + index // 32).to(tl.int64) * WIDTH + slab * 32 + index % 32


@triton.jit
def rows_of(hashes, at, local_rows, block, blocks, ROWS: tl.constexpr):
    """ROWS rows of a block from number ``at``, 32 elements each side by side, so that a warp has one row.

    In one dimension: of a tile [ROWS, 32] Triton gives a warp 32 rows, wherever the columns are permuted.
    """
    index = tl.arange(0, ROWS * 32)
    local = at + index // 32
    inside = local < local_rows
    row = local * blocks + block
    last = tl.load(hashes + row * 4 + 3, mask=inside, other=0)
    return local, row, last, index % 32, inside


@triton.jit
def is_single(key, SHIFT: tl.constexpr):
    """Whether a cell with this key has one member."""
    return (key >> SHIFT) == 1


@triton.jit
def list_singles(
    queue, pairs, first, third, slab, SHIFT: tl.constexpr, WIDTH: tl.constexpr, CELLS: tl.constexpr
):
    """Write the cells of a subtable that have one member into its queue. Returns how many."""
    tail = 0
    at = 0
    while at < third * 32:
        index = at + tl.arange(0, CELLS)
        inside = index < third * 32
        pair = tl.load(pairs + spot_of(index, first, slab, WIDTH), mask=inside, other=0, cache_modifier=".cg")
        single = is_single(pair.to(tl.int32), SHIFT).to(tl.int32)
        rank = tail + tl.cumsum(single, axis=0) - single
        tl.store(queue + spot_of(rank, first, slab, WIDTH), index, mask=single != 0)
        tail += tl.sum(single, axis=0)
        at += CELLS
    return tail


@triton.jit
def leave(
    pairs, hashes, row, last, column, q, key, single, first, j: tl.constexpr, third, SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Take members off their cells of subtable j. Returns where these are and which have one member now."""
    target = tl.load(hashes + row * 4 + j, mask=single, other=0)
    moved = column ^ column_mask(last, j, WIDTH)
    place = target.to(tl.int64) * WIDTH + moved
    both = ((q * sign_of(last, j)).to(tl.int64) << 32) + key
    before = tl.atomic_add(pairs + place, -both, mask=single, sem="relaxed", scope="cta")
    becomes = single & is_single(before.to(tl.int32) - key, SHIFT)
    return (target - first - j * third) * 32 + moved % 32, becomes


@triton.jit
def peel_queue(
    queue, pairs, exponents, hashes, values, head, tail, tail_a, tail_b, resolved, first, third, slab,
    block, blocks, j: tl.constexpr, MANTISSA: tl.constexpr, FLOOR: tl.constexpr, BITS: tl.constexpr,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Peel what subtable j's queue holds from ``head`` to ``tail``.

    Cells that are left with one member go into the queues of their subtables, a = j + 1 and b = j + 2 modulo
    3. Returns these queues' new tails and, int32[CELLS], how many members were resolved.
    """
    A: tl.constexpr = (j + 1) % 3
    B: tl.constexpr = (j + 2) % 3
    at = head
    while at < tail:
        index = at + tl.arange(0, CELLS)
        inside = index < tail
        index = tl.load(
            queue + spot_of(index, first + j * third, slab, WIDTH), mask=inside, other=0, cache_modifier=".cg"
        )
        cell = spot_of(index, first + j * third, slab, WIDTH)
        pair = tl.load(pairs + cell, mask=inside, other=0, cache_modifier=".cg")
        key = pair.to(tl.int32)
        single = is_single(key, SHIFT)  # not if its member was found in another subtable since
        resolved += single.to(tl.int32)
        row = tl.where(single, (key & ((1 << SHIFT) - 1)) * blocks + block, 0)
        last = tl.load(hashes + row * 4 + 3, mask=single, other=0)
        exponent = tl.load(exponents + row, mask=single, other=0).to(tl.int32)
        q = (pair >> 32).to(tl.int32) * sign_of(last, j)
        column = (slab * 32 + index % 32) ^ column_mask(last, j, WIDTH)
        at_a, new_a = leave(pairs, hashes, row, last, column, q, key, single, first, A, third, SHIFT, WIDTH)
        at_b, new_b = leave(pairs, hashes, row, last, column, q, key, single, first, B, third, SHIFT, WIDTH)
        value = narrow(q, BITS).to(tl.float32) * step_of(exponent, MANTISSA, FLOOR)
        tl.store(values + row.to(tl.int64) * WIDTH + column, value, mask=single)
        new = new_a.to(tl.int32) + (new_b.to(tl.int32) << 16)
        rank = tl.cumsum(new, axis=0) - new
        place = spot_of(tail_a + (rank & 0xFFFF), first + A * third, slab, WIDTH)
        tl.store(queue + place, at_a, mask=new_a)
        place = spot_of(tail_b + (rank >> 16), first + B * third, slab, WIDTH)
        tl.store(queue + place, at_b, mask=new_b)
        count = tl.sum(new, axis=0)
        tail_a += count & 0xFFFF
        tail_b += count >> 16
        at += CELLS
    return tail_a, tail_b, resolved


@triton.jit
def peel_kernel(
    cells, pairs, words, exponents, hashes, values, counters, estimates, numel, rows, blocks, third,
    MANTISSA: tl.constexpr, FLOOR: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Decode one slab: 32 columns of one block's sketch, which no other program touches.

    1. A pair is a cell (upper 32 bits) and its key (lower): one load and one atomic serve both. Per element
       of the union add ``1 << SHIFT`` plus its row's number to three keys, and mark it in ``values`` (the
       canonical NaN's bits plus one); the others become 0, or NaN in a row that holds one.
    2. List the cells with one member, a queue a subtable, in the memory of ``cells``: a cell gets there once
       at most. Subtable by subtable, each listed cell gives its member's value, the member leaves its other
       two cells, and those that this leaves with one member are listed. Two cells of one subtable never hold
       the same element, so what a subtable has listed needs no order. Until the queues are empty.
    3. What is still marked gets the median of its three signed cells and is counted, with how far these lie
       apart.

    A barrier stands wherever one pass reads what another wrote; ``.cg`` loads see other threads' atomics in
    L2. ``cells`` and ``pairs`` are scratch; rows of ROWS, cells of CELLS are handled at a time.
    """
    SLABS: tl.constexpr = WIDTH // 32
    block = tl.program_id(0) // SLABS
    slab = tl.program_id(0) % SLABS
    local_rows = (rows - block + blocks - 1) // blocks
    sketch_rows = 3 * third
    first = block * sketch_rows
    MARK: tl.constexpr = 0x7FC00001
    LOOK: tl.constexpr = 4 * CELLS  # cells in a row: more loads under way

    at = 0
    while at < sketch_rows * 32:
        index = at + tl.arange(0, LOOK)
        inside = index < sketch_rows * 32
        place = spot_of(index, first, slab, WIDTH)
        cell = tl.load(cells + place, mask=inside, other=0)
        tl.store(pairs + place, cell.to(tl.int64) << 32, mask=inside)
        at += LOOK
    tl.debug_barrier()

    members = tl.zeros([ROWS * 32], tl.int32)
    at = 0
    while at < local_rows:
        local, row, last, lane, inside = rows_of(hashes, at, local_rows, block, blocks, ROWS)
        mask = column_mask(last, 0, WIDTH)
        # lane in subtable 0 -> the word and the bit of the element's own column
        word = tl.load(words + row * SLABS + (slab ^ (mask >> 5)), mask=inside, other=0)
        bit = ((word >> (lane ^ (mask & 31))) & 1) != 0
        members += bit.to(tl.int32)
        number = ((1 << SHIFT) + local).to(tl.int64)
        column = (slab * 32 + lane) ^ mask
        for j in tl.static_range(3):
            target = tl.load(hashes + row * 4 + j, mask=inside, other=0)
            cell = target.to(tl.int64) * WIDTH + (column ^ column_mask(last, j, WIDTH))
            tl.atomic_add(pairs + cell, number, mask=bit, sem="relaxed", scope="cta")
        exponent = tl.load(exponents + row, mask=inside, other=0).to(tl.int32)
        mark = tl.where(bit, MARK, tl.where(exponent == 255, 0x7FC00000, 0)).to(tl.float32, bitcast=True)
        place = row.to(tl.int64) * WIDTH + column
        tl.store(values + place, mark, mask=inside & (place < numel))
        at += ROWS
    members = tl.sum(members, axis=0)
    tl.debug_barrier()

    tail_0 = list_singles(cells, pairs, first, third, slab, SHIFT, WIDTH, LOOK)
    tail_1 = list_singles(cells, pairs, first + third, third, slab, SHIFT, WIDTH, LOOK)
    tail_2 = list_singles(cells, pairs, first + 2 * third, third, slab, SHIFT, WIDTH, LOOK)
    tl.debug_barrier()

    head_0 = 0
    head_1 = 0
    head_2 = 0
    resolved = tl.zeros([CELLS], tl.int32)
    while (head_0 < tail_0) | (head_1 < tail_1) | (head_2 < tail_2):
        if head_0 < tail_0:
            tail_1, tail_2, resolved = peel_queue(
                cells, pairs, exponents, hashes, values, head_0, tail_0, tail_1, tail_2, resolved,
                first, third, slab, block, blocks, 0, MANTISSA, FLOOR, BITS, SHIFT, WIDTH, CELLS,
            )  # fmt: skip
            head_0 = tail_0
            tl.debug_barrier()
        if head_1 < tail_1:
            tail_2, tail_0, resolved = peel_queue(
                cells, pairs, exponents, hashes, values, head_1, tail_1, tail_2, tail_0, resolved,
                first, third, slab, block, blocks, 1, MANTISSA, FLOOR, BITS, SHIFT, WIDTH, CELLS,
            )  # fmt: skip
            head_1 = tail_1
            tl.debug_barrier()
        if head_2 < tail_2:
            tail_0, tail_1, resolved = peel_queue(
                cells, pairs, exponents, hashes, values, head_2, tail_2, tail_0, tail_1, resolved,
                first, third, slab, block, blocks, 2, MANTISSA, FLOOR, BITS, SHIFT, WIDTH, CELLS,
            )  # fmt: skip
            head_2 = tail_2
            tl.debug_barrier()
    resolved = tl.sum(resolved, axis=0)

    tl.atomic_add(counters, members, sem="relaxed")
    if resolved < members:
        tl.atomic_add(counters + 1, members - resolved, sem="relaxed")
        apart = tl.zeros([ROWS * 32], tl.float32)
        size = tl.zeros([ROWS * 32], tl.float32)
        at = 0
        while at < local_rows:
            _, row, last, lane, inside = rows_of(hashes, at, local_rows, block, blocks, ROWS)
            exponent = tl.load(exponents + row, mask=inside, other=0).to(tl.int32)
            column = (slab * 32 + lane) ^ column_mask(last, 0, WIDTH)
            place = row.to(tl.int64) * WIDTH + column
            value = tl.load(values + place, mask=inside & (place < numel), other=0.0, cache_modifier=".cg")
            left = value.to(tl.int32, bitcast=True) == MARK
            a = estimate(pairs, hashes, row, last, column, left, 0, BITS, WIDTH)
            b = estimate(pairs, hashes, row, last, column, left, 1, BITS, WIDTH)
            c = estimate(pairs, hashes, row, last, column, left, 2, BITS, WIDTH)
            low, high = tl.minimum(a, b), tl.maximum(a, b)
            step = step_of(exponent, MANTISSA, FLOOR)
            value = tl.maximum(low, tl.minimum(high, c)).to(tl.float32) * step
            tl.store(values + place, value, mask=left)
            # what is not left counts 0
            apart += (tl.maximum(high, c).to(tl.float32) - tl.minimum(low, c).to(tl.float32)) * step
            size += tl.abs(value)
            at += ROWS
        tl.atomic_add(estimates, tl.sum(apart, axis=0), sem="relaxed")
        tl.atomic_add(estimates + 1, tl.sum(size, axis=0), sem="relaxed")


@triton.jit
def estimate(
    pairs, hashes, row, last, column, left, j: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr
):
    """int32: the signed cells of elements (row, column) in subtable j."""
    target = tl.load(hashes + row * 4 + j, mask=left, other=0)
    place = target.to(tl.int64) * WIDTH + (column ^ column_mask(last, j, WIDTH))
    cell = (tl.load(pairs + place, mask=left, other=0, cache_modifier=".cg") >> 32).to(tl.int32)
    return narrow(cell * sign_of(last, j), BITS)
