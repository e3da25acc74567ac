"""Bit planes of a wire: packing, unpacking, loading and storing (layout.py has the order)."""

import triton
import triton.language as tl


@triton.jit
def store_plane(plane, value, first, groups, P: tl.constexpr, C: tl.constexpr):
    """Store uint8[R, P] as groups first... of a plane of P bytes a group; nothing beyond the last group."""
    flat = tl.arange(0, C.R * P)
    left = (groups - first) * P
    tl.store(plane + first.to(tl.int64) * P + flat, tl.reshape(value, [C.R * P]), mask=flat < left)


@triton.jit
def load_plane(plane, first, groups, P: tl.constexpr, C: tl.constexpr):
    """uint8[R, P]: groups first... of a plane of P bytes a group; zeros beyond the last group."""
    flat = tl.arange(0, C.R * P)
    left = (groups - first) * P
    return tl.reshape(tl.load(plane + first.to(tl.int64) * P + flat, mask=flat < left, other=0), [C.R, P])


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
def unpack(c, BITS: tl.constexpr, C: tl.constexpr):
    """Inverse of pack: uint8[R, G]."""
    c = tl.reshape(c, [C.R, C.G // 16, 2 * BITS])
    if BITS < 2:
        c = joined(c, c >> 1, 2, C)
    if BITS < 4:
        c = joined(c, c >> 2, 4, C)
    c = joined(c, c >> 4, 8, C)
    return tl.reshape(c & (2**BITS - 1), [C.R, C.G])


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
            high = wire + groups.to(tl.int64) * (C.G // 2)
            store_plane(high, pack(codes, C.BITS - 4, C), first, groups, C.G * (C.BITS - 4) // 8, C)


@triton.jit
def load_codes(wire, first, groups, C: tl.constexpr):
    """uint8[R, G] codes of groups first... of the chunk at wire."""
    if C.BITS == 8:
        codes = load_plane(wire, first, groups, C.G, C)
    else:
        codes = unpack(load_plane(wire, first, groups, C.G // 2, C), 4, C)
        if C.BITS > 4:
            high = wire + groups.to(tl.int64) * (C.G // 2)
            plane = load_plane(high, first, groups, C.G * (C.BITS - 4) // 8, C)
            codes = codes | (unpack(plane, C.BITS - 4, C) << 4)
    return codes


@triton.jit
def spread(word, C: tl.constexpr):
    """int32[R, G / n, 2, 2]: words[R, G / n] shifted right by 0, 8, 16 and 24 bits."""
    return tl.join(tl.join(word, word >> 16), tl.join(word >> 8, word >> 24))


@triton.jit
def load_words(plane, first, groups, P: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """int32: a plane of P bytes a group as [R, G / 16, n] words of ``dtype``."""
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    flat = tl.arange(0, C.R * P // SIZE)
    at = (plane + first.to(tl.int64) * P).to(tl.pointer_type(dtype)) + flat
    words = tl.load(at, mask=flat < (groups - first) * (P // SIZE), other=0).to(tl.int32)
    return tl.reshape(words, [C.R, C.G // 16, 16 * P // C.G // SIZE])


@triton.jit
def load_integers(wire, first, groups, C: tl.constexpr):
    """int32[R, G]: codes plus 2^(BITS - 1) of an integer format, unpacked 32 bits at a time.

    The low 4 bits of element 8q + 4h + k of 16 are nibble 2k + q of word h; of the higher bits see layout.py.
    """
    if C.BITS == 8:
        codes = spread(load_words(wire, first, groups, C.G, tl.int32, C) ^ -2139062144, C) & 0xFF
    else:
        low = spread(load_words(wire, first, groups, C.G // 2, tl.int32, C), C)  # [R, G/16, h, k, k]
        high = wire + groups.to(tl.int64) * (C.G // 2)
        h = tl.arange(0, 2)[None, None, :]
        low = tl.join(low, low >> 4) & 15  # [R, G/16, h, k, k, q]
        if C.BITS == 6:  # bits 2(2q + h) of byte k
            word = load_words(high, first, groups, C.G // 4, tl.int32, C)
            word = spread(word >> (2 * h), C)
            low = low | ((tl.join(word, word >> 4) & 3) << 4)
        elif C.BITS == 5:  # bit 4q + 2h + (k >> 1) of byte k & 1
            word = load_words(high, first, groups, C.G // 8, tl.int16, C) >> (2 * h)
            word = tl.join(tl.join(word, word >> 8), tl.join(word >> 1, word >> 9))
            word = tl.permute(word, [0, 1, 2, 4, 3])
            low = low | ((tl.join(word, word >> 4) & 1) << 4)
        codes = tl.permute(low, [0, 1, 5, 2, 3, 4])
    return tl.reshape(codes, [C.R, C.G])
