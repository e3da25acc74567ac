"""What both directions share: tiles of the tensor, the swap, planes of codes."""

import triton
import triton.language as tl

from taco_kernels.triton.planes import load_plane, pack, store_plane, unpack


@triton.jit
def tile_pointers(x, first, tiles, per_row, channels, C: tl.constexpr):
    """Pointers [R, G] to tiles first... of rows of ``channels`` values, and which of the values there are."""
    tile = first + tl.arange(0, C.R)
    column = tl.arange(0, C.G)[None, :]
    if C.PADDED:
        row = tile // per_row
        at = (tile % per_row)[:, None] * C.G + column
        start = row.to(tl.int64) * channels
        mask = (tile < tiles)[:, None] & (at < channels)
        pointers = x + start[:, None] + at
    else:
        pointers = x + first.to(tl.int64) * C.G + (tl.arange(0, C.R) * C.G)[:, None] + column
        mask = (tile < tiles)[:, None]
    return pointers, mask


@triton.jit
def starts(first, per_row, channels, C: tl.constexpr):
    """int64[R]: number of the first value of tiles first... in the tensor."""
    tile = (first + tl.arange(0, C.R)).to(tl.int64)
    if C.PADDED:
        tile = tile // per_row * channels + tile % per_row * C.G
    else:
        tile = tile * C.G
    return tile


@triton.jit
def element(x, column, C: tl.constexpr):
    """fp32[R]: x[r, column[r]]."""
    return tl.sum(tl.where(tl.arange(0, C.G)[None, :] == column[:, None], x, 0.0), axis=1)


@triton.jit
def swapped(x, pivot, C: tl.constexpr):
    """x[R, G] with element 0 of each row exchanged for element pivot[r]."""
    column = tl.arange(0, C.G)[None, :]
    head = element(x, pivot * 0, C)
    other = element(x, pivot, C)
    x = tl.where(column == pivot[:, None], head[:, None], x)
    return tl.where(column == 0, other[:, None], x)


@triton.jit
def store_bits(codes, out, first, tiles, padding, BITS: tl.constexpr, C: tl.constexpr):
    """Store int32 codes[R, G] of BITS bits as planes behind each other, each padded to 16 bytes if asked."""
    if BITS & 8:
        store_plane(out, codes.to(tl.uint8), first, tiles, C.G, C)
    if BITS & 4:
        store_plane(out, pack(codes & 15, 4, C), first, tiles, C.G // 2, C)
        out += section_bytes(tiles, C.G // 2, padding)
        codes = codes >> 4
    if BITS & 2:
        store_plane(out, pack(codes & 3, 2, C), first, tiles, C.G // 4, C)
        out += section_bytes(tiles, C.G // 4, padding)
        codes = codes >> 2
    if BITS & 1:
        store_plane(out, pack(codes & 1, 1, C), first, tiles, C.G // 8, C)


@triton.jit
def section_bytes(tiles, P: tl.constexpr, padding):
    """Bytes of a plane of P bytes a tile, up to a multiple of ``padding``."""
    return (tl.full((), P, tl.int64) * tiles + padding - 1) // padding * padding


@triton.jit
def load_bits(wire, first, tiles, BITS: tl.constexpr, C: tl.constexpr):
    """int32[R, G]: inverse of store_bits with padding 16."""
    codes = tl.zeros([C.R, C.G], tl.int32)
    if BITS & 8:
        codes = load_plane(wire, first, tiles, C.G, C).to(tl.int32)
    if BITS & 4:
        codes = unpack(load_plane(wire, first, tiles, C.G // 2, C), 4, C).to(tl.int32)
        wire += section_bytes(tiles, C.G // 2, 16)
    if BITS & 2:
        plane = unpack(load_plane(wire, first, tiles, C.G // 4, C), 2, C).to(tl.int32)
        codes = codes | (plane << (BITS & 4))
        wire += section_bytes(tiles, C.G // 4, 16)
    if BITS & 1:
        plane = unpack(load_plane(wire, first, tiles, C.G // 8, C), 1, C).to(tl.int32)
        codes = codes | (plane << (BITS & 6))
    return codes


@triton.jit
def gather_plane(plane, slot, P: tl.constexpr, C: tl.constexpr):
    """uint8[R, P]: tiles slot[R] of a plane of P bytes a tile; zeros where the slot is negative."""
    at = slot.to(tl.int64)[:, None] * P + tl.arange(0, P)[None, :]
    return tl.load(plane + at, mask=slot[:, None] >= 0, other=0)


@triton.jit
def gather_bits(wire, slot, high_tiles, BITS: tl.constexpr, C: tl.constexpr):
    """int32[R, G] codes of BITS bits of tiles slot[R] of ``high_tiles``; 0 where the slot is negative."""
    codes = tl.zeros([C.R, C.G], tl.int32)
    if BITS & 4:
        codes = unpack(gather_plane(wire, slot, C.G // 2, C), 4, C).to(tl.int32)
        wire += section_bytes(high_tiles, C.G // 2, 16)
    if BITS & 2:
        plane = unpack(gather_plane(wire, slot, C.G // 4, C), 2, C).to(tl.int32)
        codes = codes | (plane << (BITS & 4))
        wire += section_bytes(high_tiles, C.G // 4, 16)
    if BITS & 1:
        plane = unpack(gather_plane(wire, slot, C.G // 8, C), 1, C).to(tl.int32)
        codes = codes | (plane << (BITS & 6))
    return codes


@triton.jit
def tile_slots(slots, first, tiles, per_unit, C: tl.constexpr):
    """int32[R]: where the extra bits of tiles first... lie, counted in tiles; negative for low ones."""
    tile = first + tl.arange(0, C.R)
    unit = tile // per_unit
    slot = tl.load(slots + unit, mask=tile < tiles, other=-1)
    return tl.where(slot < 0, -1, slot * per_unit + tile % per_unit)
