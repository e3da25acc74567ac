"""Bit planes of a wire: packing, unpacking, loading and storing (layout.py has the order)."""

import triton
import triton.language as tl


@triton.jit
def behind(wire, BYTES: tl.constexpr, groups, C: tl.constexpr):
    """Pointer to what lies behind BYTES for each group of a chunk.

    ``groups`` are a chunk's, or with C.ROW those up to the tile's last, which begins with a chunk; chunks
    then have C.ROW each and lie C.STRIDE bytes apart.
    """
    if C.ROW:
        at = wire + BYTES * C.ROW
    else:
        at = wire + tl.full((), BYTES, tl.int64) * groups
    return at


@triton.jit
def across_chunks(first, N: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr):
    """int64[R * N]: places of N units of SIZE bytes a group, in units, of groups first... with C.ROW."""
    flat = tl.arange(0, C.R * N)
    chunk = (first // C.ROW).to(tl.int64) + flat // (C.ROW * N)
    return chunk * (C.STRIDE // SIZE) + flat % (C.ROW * N)


@triton.jit
def unit_pointers(plane, first, P: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """Pointers [R * P / SIZE] to the units of ``dtype`` of groups first... of a plane of P bytes a group."""
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    if C.ROW:
        at = plane.to(tl.pointer_type(dtype)) + across_chunks(first, P // SIZE, SIZE, C)
    else:
        at = (plane + first.to(tl.int64) * P).to(tl.pointer_type(dtype)) + tl.arange(0, C.R * P // SIZE)
    return at


@triton.jit
def store_plane(plane, value, first, groups, P: tl.constexpr, C: tl.constexpr):
    """Store uint8[R, P] as groups first... of a plane of P bytes a group; nothing beyond the last group."""
    flat = tl.arange(0, C.R * P)
    left = (groups - first) * P
    at = unit_pointers(plane, first, P, tl.uint8, C)
    tl.store(at, tl.reshape(value, [C.R * P]), mask=flat < left)


@triton.jit
def load_plane(plane, first, groups, P: tl.constexpr, C: tl.constexpr):
    """uint8[R, P]: groups first... of a plane of P bytes a group; zeros beyond the last group."""
    flat = tl.arange(0, C.R * P)
    left = (groups - first) * P
    at = unit_pointers(plane, first, P, tl.uint8, C)
    return tl.reshape(tl.load(at, mask=flat < left, other=0), [C.R, P])


@triton.jit
def pack(c, BITS: tl.constexpr, C: tl.constexpr):
    """uint8[R, G * BITS / 8] of int32 codes [R, G] below 2^BITS (4, 2 or 1), bits from 8 on ignored."""
    low, high = tl.split(tl.permute(tl.reshape(c, [C.R, C.G // 16, 2, 8]), [0, 1, 3, 2]))
    c = low | (high << 4)
    if BITS < 4:
        low, high = tl.split(tl.permute(tl.reshape(c, [C.R, C.G // 16, 2, 4]), [0, 1, 3, 2]))
        c = low | (high << 2)
    if BITS < 2:
        low, high = tl.split(tl.permute(tl.reshape(c, [C.R, C.G // 16, 2, 2]), [0, 1, 3, 2]))
        c = low | (high << 1)
    return tl.reshape(c, [C.R, C.G * BITS // 8]).to(tl.uint8)


@triton.jit
def joined(low, high, J: tl.constexpr, C: tl.constexpr):
    """[R, G / 16, 2J]: high behind low, [R, G / 16, J] each."""
    return tl.reshape(tl.permute(tl.join(low, high), [0, 1, 3, 2]), [C.R, C.G // 16, 2 * J])


@triton.jit
def beside_nibbles(plane, BITS: tl.constexpr, C: tl.constexpr):
    """uint8[R, G / 16, 8] from a plane of 4, 2 or 1 bits.

    Byte j's bits from 0 on belong to element j of 16, its bits from 4 on to element 8 + j.
    """
    c = tl.reshape(plane, [C.R, C.G // 16, 2 * BITS])
    if BITS < 2:
        c = joined(c, c >> 1, 2, C)
    if BITS < 4:
        c = joined(c, c >> 2, 4, C)
    return c


@triton.jit
def unpack(plane, BITS: tl.constexpr, C: tl.constexpr):
    """Inverse of pack: uint8[R, G]."""
    c = beside_nibbles(plane, BITS, C)
    return tl.reshape(joined(c, c >> 4, 8, C) & (2**BITS - 1), [C.R, C.G])


@triton.jit
def store_codes(codes, wire, first, groups, C: tl.constexpr):
    """Store codes[R, G] as groups first... of the chunk at wire."""
    if C.BITS == 8:
        store_plane(wire, codes, first, groups, C.G, C)
    else:
        low = codes & 15 if C.BITS > 4 else codes
        store_plane(wire, pack(low, 4, C), first, groups, C.G // 2, C)
        if C.BITS > 4:
            codes = (codes >> 4) & (2 ** (C.BITS - 4) - 1)
            high = behind(wire, C.G // 2, groups, C)
            store_plane(high, pack(codes, C.BITS - 4, C), first, groups, C.G * (C.BITS - 4) // 8, C)


@triton.jit
def load_codes(wire, first, groups, C: tl.constexpr):
    """uint8[R, G] codes of groups first... of the chunk at wire."""
    if C.BITS == 8:
        codes = load_plane(wire, first, groups, C.G, C)
    else:
        codes = unpack(load_plane(wire, first, groups, C.G // 2, C), 4, C)
        if C.BITS > 4:
            high = behind(wire, C.G // 2, groups, C)
            plane = load_plane(high, first, groups, C.G * (C.BITS - 4) // 8, C)
            codes = codes | (unpack(plane, C.BITS - 4, C) << 4)
    return codes
