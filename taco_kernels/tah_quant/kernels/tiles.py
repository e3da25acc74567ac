"""What both directions share: tiles of the tensor, the swap, planes of codes."""

import triton
import triton.language as tl

from taco_kernels.triton.planes import pack, store_plane, unpack


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
def section_bytes(tiles, P: tl.constexpr, padding):
    """Bytes of a plane of P bytes a tile, up to a multiple of ``padding``."""
    return (tl.full((), P, tl.int64) * tiles + padding - 1) // padding * padding


@triton.jit
def nibble_words(c, C: tl.constexpr):
    """Two int32[R, G / 16]: codes [R, G] below 16 as the first and second half of their 4-bit plane."""
    low, high = tl.split(tl.permute(tl.reshape(c, [C.R, C.G // 16, 2, 8]), [0, 1, 3, 2]))
    low, high = tl.split(tl.reshape(low | (high << 4), [C.R, C.G // 16, 2, 2, 2]))
    low, high = tl.split(low | (high << 8))
    return tl.split(low | (high << 16))


@triton.jit
def from_nibble_words(first, second, C: tl.constexpr):
    """int32[R, G], inverse of nibble_words."""
    c = tl.join(first, second)
    c = tl.join(c, c >> 16)
    c = tl.reshape(tl.join(c, c >> 8), [C.R, C.G // 16, 8])
    return tl.reshape(tl.permute(tl.join(c, c >> 4), [0, 1, 3, 2]), [C.R, C.G]) & 15


@triton.jit
def store_flat(out, values, first, tiles, C: tl.constexpr):
    """Store [R, P] as tiles first... of a plane of P elements a tile."""
    P: tl.constexpr = values.shape[1]
    flat = tl.arange(0, C.R * P)
    at = out + first.to(tl.int64) * P + flat
    tl.store(at, tl.reshape(values, [C.R * P]), mask=flat < (tiles - first) * P)


@triton.jit
def store_words(a, b, out, first, tiles, padding, FROM: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Store bits FROM to FROM + BITS of nibble words a and b as planes, each padded to ``padding`` bytes."""
    if BITS & 4:
        words = tl.reshape(tl.join(a, b), [C.R, C.G // 8])
        store_flat(out.to(tl.pointer_type(tl.int32)), words, first, tiles, C)
    if BITS & 2:
        words = ((a >> FROM) & 0x33333333) | (((b >> FROM) & 0x33333333) << 2)
        store_flat(out.to(tl.pointer_type(tl.int32)), words, first, tiles, C)
        out += section_bytes(tiles, C.G // 4, padding)
    if BITS & 1:
        BIT: tl.constexpr = FROM + (BITS & 2)
        words = ((a >> BIT) & 0x11111111) | (((b >> BIT) & 0x11111111) << 2)
        words = words | (words >> 15)
        store_flat(out.to(tl.pointer_type(tl.int16)), words.to(tl.int16), first, tiles, C)


@triton.jit
def spread_twos(word, TO: tl.constexpr):
    """Nibble words whose bits TO and TO + 1 are those of a 2-bit plane's int32 words."""
    return (word & 0x33333333) << TO, ((word >> 2) & 0x33333333) << TO


@triton.jit
def spread_ones(word, TO: tl.constexpr):
    """Nibble words whose bit TO is that of a 1-bit plane's int16 words."""
    word = word.to(tl.int32)
    word = (word & 0x5555) | ((word & 0xAAAA) << 15)
    return (word & 0x11111111) << TO, ((word >> 2) & 0x11111111) << TO


@triton.jit
def load_words(plane, at, mask, P: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """dtype[R, P]: tiles ``at`` of a plane of P elements a tile; zeros where masked."""
    where = at.to(tl.int64)[:, None] * P + tl.arange(0, P)[None, :]
    return tl.load(plane.to(tl.pointer_type(dtype)) + where, mask=mask[:, None], other=0)


@triton.jit
def load_nibbles(wire, at, mask, tiles, TO: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Nibble words with BITS bits from TO on of tiles ``at`` of planes of ``tiles`` tiles."""
    a = tl.zeros([C.R, C.G // 16], tl.int32)
    b = a
    if BITS & 4:
        words = load_words(wire, at, mask, C.G // 8, tl.int32, C)
        a, b = tl.split(tl.reshape(words, [C.R, C.G // 16, 2]))
    if BITS & 2:
        a, b = spread_twos(load_words(wire, at, mask, C.G // 16, tl.int32, C), TO)
        wire += section_bytes(tiles, C.G // 4, 16)
    if BITS & 1:
        BIT: tl.constexpr = TO + (BITS & 2)
        c, d = spread_ones(load_words(wire, at, mask, C.G // 16, tl.int16, C), BIT)
        a, b = a | c, b | d
    return a, b


@triton.jit
def store_bits(codes, out, first, tiles, padding, BITS: tl.constexpr, C: tl.constexpr):
    """store_words for codes [R, G] of up to 8 bits."""
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
def load_plane_at(plane, at, mask, P: tl.constexpr, C: tl.constexpr):
    """uint8[R, P]: tiles ``at`` of a plane of P bytes a tile; zeros where masked."""
    where = at.to(tl.int64)[:, None] * P + tl.arange(0, P)[None, :]
    return tl.load(plane + where, mask=mask[:, None], other=0)


@triton.jit
def load_bits(wire, at, mask, tiles, BITS: tl.constexpr, C: tl.constexpr):
    """int32[R, G] codes of BITS bits of tiles ``at`` of planes of ``tiles`` tiles."""
    codes = tl.zeros([C.R, C.G], tl.int32)
    if BITS & 8:
        codes = load_plane_at(wire, at, mask, C.G, C).to(tl.int32)
    if BITS & 4:
        codes = unpack(load_plane_at(wire, at, mask, C.G // 2, C), 4, C).to(tl.int32)
        wire += section_bytes(tiles, C.G // 2, 16)
    if BITS & 2:
        plane = unpack(load_plane_at(wire, at, mask, C.G // 4, C), 2, C).to(tl.int32)
        codes = codes | (plane << (BITS & 4))
        wire += section_bytes(tiles, C.G // 4, 16)
    if BITS & 1:
        plane = unpack(load_plane_at(wire, at, mask, C.G // 8, C), 1, C).to(tl.int32)
        codes = codes | (plane << (BITS & 6))
    return codes


@triton.jit
def tile_slots(slots, first, tiles, per_unit, C: tl.constexpr):
    """int32[R]: where the extra bits of tiles first... lie, counted in tiles; negative for low ones."""
    tile = first + tl.arange(0, C.R)
    unit = tile // per_unit
    slot = tl.load(slots + unit, mask=tile < tiles, other=-1)
    return tl.where(slot < 0, -1, slot * per_unit + tile % per_unit)
