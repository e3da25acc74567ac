"""Triton kernels of the owner's side: adding wires up, and peeling."""

import triton
import triton.language as tl


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
def column_mask(last, j: tl.constexpr, WIDTH: tl.constexpr):
    """hashing.column_masks of the fourth hash word."""
    mask = last & (WIDTH - 1)
    if j > 0:
        mask = mask ^ ((last >> (5 + 5 * j)) & 31)
    return mask


@triton.jit
def sign_of(last, j: tl.constexpr):
    """hashing.signs of the fourth hash word."""
    return 1 - ((last >> (20 + j)) & 1) * 2


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
def peel_kernel(
    cells,
    keys,
    words,
    exponents,
    hashes,
    values,
    counters,
    estimates,
    numel,
    rows,
    blocks,
    third,
    MANTISSA: tl.constexpr,
    FLOOR: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CELLS: tl.constexpr,
):
    """Decode one slab: 32 columns of one block's sketch, which no other program touches.

    1. Zero the keys; per element of the union add ``1 << SHIFT`` plus its row's number to three keys, and
       mark it in ``values`` (the canonical NaN's bits plus one); the others become 0, or NaN in a row that
       holds one.
    2. Subtable by subtable, a cell with one member gives its value, and it leaves its other two cells. Two
       cells of one subtable never hold the same element, so a pass over a subtable needs no order. Until
       nothing is found.
    3. What is still marked gets the median of its three signed cells and is counted, with how far these lie
       apart.

    A barrier stands wherever one pass reads what another wrote; ``.cg`` loads see other threads' atomics in
    L2. ``cells`` and ``keys`` are scratch; rows of ROWS, cells of CELLS are handled at a time.
    """
    SLABS: tl.constexpr = WIDTH // 32
    block = tl.program_id(0) // SLABS
    slab = tl.program_id(0) % SLABS
    lane = tl.arange(0, 32)
    local_rows = (rows - block + blocks - 1) // blocks
    sketch_rows = 3 * third
    first = block * sketch_rows
    MARK: tl.constexpr = 0x7FC00001

    at = 0
    while at < sketch_rows:
        k = at + tl.arange(0, ROWS)
        place = (first + k).to(tl.int64)[:, None] * WIDTH + slab * 32 + lane[None, :]
        tl.store(keys + place, tl.zeros([ROWS, 32], tl.int32), mask=(k < sketch_rows)[:, None])
        at += ROWS
    tl.debug_barrier()

    members = 0
    at = 0
    while at < local_rows:
        local = at + tl.arange(0, ROWS)
        inside = local < local_rows
        row = local * blocks + block
        last = tl.load(hashes + row * 4 + 3, mask=inside, other=0)
        mask = last & (WIDTH - 1)
        # lane in subtable 0 -> the word and the bit of the element's own column
        word = tl.load(words + row * SLABS + (slab ^ (mask >> 5)), mask=inside, other=0)
        bit = ((word[:, None] >> (lane[None, :] ^ (mask & 31)[:, None])) & 1) != 0
        members += tl.sum(tl.sum(bit.to(tl.int32), axis=1), axis=0)
        number = (1 << SHIFT) + local
        for j in tl.static_range(3):
            target = tl.load(hashes + row * 4 + j, mask=inside, other=0)
            shift = (last >> (5 + 5 * j)) & 31
            if j == 0:
                shift = shift * 0
            cell = target.to(tl.int64)[:, None] * WIDTH + slab * 32 + (lane[None, :] ^ shift[:, None])
            tl.atomic_add(
                keys + cell,
                tl.broadcast_to(number[:, None], [ROWS, 32]),
                mask=bit,
                sem="relaxed",
                scope="cta",
            )
        exponent = tl.load(exponents + row, mask=inside, other=0).to(tl.int32)
        empty = tl.where(exponent == 255, 0x7FC00000, 0)
        mark = tl.where(bit, MARK, tl.broadcast_to(empty[:, None], [ROWS, 32])).to(tl.float32, bitcast=True)
        place = row.to(tl.int64)[:, None] * WIDTH + ((slab * 32 + lane)[None, :] ^ mask[:, None])
        tl.store(values + place, mark, mask=inside[:, None] & (place < numel))
        at += ROWS
    tl.debug_barrier()

    found = 1
    resolved = 0
    while found > 0:
        found = 0
        for j in tl.static_range(3):
            at = 0
            while at < third * 32:
                index = at + tl.arange(0, CELLS)
                cell = (first + j * third + index // 32).to(tl.int64) * WIDTH + slab * 32 + index % 32
                key = tl.load(keys + cell, mask=index < third * 32, other=0, cache_modifier=".cg")
                single = (key >> SHIFT) == 1
                count = tl.sum(single.to(tl.int32), axis=0)
                if count > 0:
                    found += count
                    row = (key & ((1 << SHIFT) - 1)) * blocks + block
                    row = tl.where(single, row, 0)
                    last = tl.load(hashes + row * 4 + 3, mask=single, other=0)
                    exponent = tl.load(exponents + row, mask=single, other=0).to(tl.int32)
                    q = tl.load(cells + cell, mask=single, other=0, cache_modifier=".cg") * sign_of(last, j)
                    column = (slab * 32 + index % 32) ^ column_mask(last, j, WIDTH)
                    value = narrow(q, BITS).to(tl.float32) * step_of(exponent, MANTISSA, FLOOR)
                    tl.store(values + row.to(tl.int64) * WIDTH + column, value, mask=single)
                    tl.store(keys + cell, tl.zeros([CELLS], tl.int32), mask=single)
                    for other in tl.static_range(3):
                        if other != j:
                            target = tl.load(hashes + row * 4 + other, mask=single, other=0)
                            place = target.to(tl.int64) * WIDTH + (column ^ column_mask(last, other, WIDTH))
                            tl.atomic_add(keys + place, -key, mask=single, sem="relaxed", scope="cta")
                            tl.atomic_add(
                                cells + place,
                                -q * sign_of(last, other),
                                mask=single,
                                sem="relaxed",
                                scope="cta",
                            )
                at += CELLS
            tl.debug_barrier()
        resolved += found

    tl.atomic_add(counters, members, sem="relaxed")
    if resolved < members:
        tl.atomic_add(counters + 1, members - resolved, sem="relaxed")
        apart = 0.0
        size = 0.0
        at = 0
        while at < local_rows:
            local = at + tl.arange(0, ROWS)
            inside = local < local_rows
            row = local * blocks + block
            last = tl.load(hashes + row * 4 + 3, mask=inside, other=0)
            exponent = tl.load(exponents + row, mask=inside, other=0).to(tl.int32)
            column = (slab * 32 + lane)[None, :] ^ column_mask(last, 0, WIDTH)[:, None]
            place = row.to(tl.int64)[:, None] * WIDTH + column
            valid = inside[:, None] & (place < numel)
            value = tl.load(values + place, mask=valid, other=0.0, cache_modifier=".cg")
            left = value.to(tl.int32, bitcast=True) == MARK
            a = estimate(cells, hashes, row, last, column, left, 0, BITS, WIDTH)
            b = estimate(cells, hashes, row, last, column, left, 1, BITS, WIDTH)
            c = estimate(cells, hashes, row, last, column, left, 2, BITS, WIDTH)
            low, high = tl.minimum(a, b), tl.maximum(a, b)
            step = step_of(exponent, MANTISSA, FLOOR)[:, None]
            value = tl.maximum(low, tl.minimum(high, c)).to(tl.float32) * step
            tl.store(values + place, value, mask=left)
            # what is not left counts 0
            distance = (tl.maximum(high, c).to(tl.float32) - tl.minimum(low, c).to(tl.float32)) * step
            apart += tl.sum(tl.sum(distance, axis=1), axis=0)
            size += tl.sum(tl.sum(tl.abs(value), axis=1), axis=0)
            at += ROWS
        tl.atomic_add(estimates, apart, sem="relaxed")
        tl.atomic_add(estimates + 1, size, sem="relaxed")


@triton.jit
def estimate(
    cells, hashes, row, last, column, left, j: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr
):
    """int32: the signed cells of elements (row, column) in subtable j."""
    target = tl.load(hashes + row * 4 + j, mask=tl.max(left.to(tl.int32), axis=1) > 0, other=0)
    place = target.to(tl.int64)[:, None] * WIDTH + (column ^ column_mask(last, j, WIDTH)[:, None])
    cell = tl.load(cells + place, mask=left, other=0, cache_modifier=".cg")
    return narrow(cell * sign_of(last, j)[:, None], BITS)
