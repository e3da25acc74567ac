"""Outliers, stored separately from the groups, inside kernels; outliers.py defines them.

A tile is whole blocks. One without outliers takes none of the branches here.
"""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import odd, transform, unshuffle
from taco_kernels.taco import outliers

THRESHOLD = tl.constexpr(outliers.THRESHOLD)
BLOCK = tl.constexpr(outliers.BLOCK)
SLOTS = tl.constexpr(outliers.SLOTS)
MAGNITUDE = tl.constexpr(0x7FFFF000)
SIGN = tl.constexpr(0x800)


@triton.jit
def lists_of(wire, groups, C: tl.constexpr):
    """Pointer to the words that follow ``groups`` groups."""
    used = tl.full((), C.BYTES, tl.int64) * groups
    return (wire + (used + 15) // 16 * 16).to(tl.pointer_type(tl.int32))


@triton.jit
def list_places(first, groups, C: tl.constexpr):
    """int64[R * G / BLOCK * SLOTS]: the words of the blocks from group ``first`` on; and a mask."""
    word = (first // (BLOCK // C.G)).to(tl.int64) * SLOTS + tl.arange(0, C.R * C.G // BLOCK * SLOTS)
    return word, word < tl.cdiv(groups, BLOCK // C.G).to(tl.int64) * SLOTS


@triton.jit
def load_lists(wire, first, groups, C: tl.constexpr):
    """int32 words of the tile's blocks, 0 beyond the last."""
    word, inside = list_places(first, groups, C)
    return tl.load(lists_of(wire, groups, C) + word, mask=inside, other=0)


@triton.jit
def store_lists(words, wire, first, groups, C: tl.constexpr):
    """Write int32[R * G / BLOCK, SLOTS] as the lists of the tile's blocks."""
    word, inside = list_places(first, groups, C)
    tl.store(lists_of(wire, groups, C) + word, tl.reshape(words, word.shape), mask=inside)


@triton.jit
def value_of(word):
    """fp32 values of words."""
    return ((word & MAGNITUDE) | ((word & SIGN) << 20)).to(tl.float32, bitcast=True)


@triton.jit
def blocks_of_words(x, wanted, C: tl.constexpr):
    """int32[R * G / BLOCK, BLOCK]: the values of x[R, G] that are wanted as words, 0 for the others."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    words = (((bits & 0x7FFFFFFF) + 0x800) & MAGNITUDE) | ((bits >> 20) & SIGN)
    words = words | (tl.arange(0, C.R) % (BLOCK // C.G) * C.G)[:, None]
    words = (
        words | tl.arange(0, C.G)[None, :]
    )  # two steps: a place of each value would stay in registers
    words = tl.where(wanted & ((bits << 1) != 0), words, 0)
    return tl.reshape(words, [C.R * C.G // BLOCK, BLOCK])


@triton.jit
def split_words(words, C: tl.constexpr):
    """The SLOTS largest words of each block, and the others with 0 in their places."""
    best = empty_lists(C)
    for slot in range(SLOTS):
        largest = tl.max(words, axis=1)[:, None]
        best = tl.where(tl.arange(0, SLOTS)[None, :] == slot, largest, best)
        words = tl.where(words == largest, 0, words)
    return best, words


@triton.jit
def largest_of_eight(x, C: tl.constexpr):
    """[R, G / 8, 2] of x[R, G]: of each 8 values two with the largest magnitudes, in either sign.

    Without MAGNITUDE_MAX x must not be negative.
    """
    kind: tl.constexpr = "bf16x2" if x.dtype == tl.bfloat16 else "f16x2"
    text: tl.constexpr = ("max.xorsign.abs." if C.MAGNITUDE_MAX else "max.") + kind + " $0, $1, $2;"
    x = tl.permute(
        tl.reshape(x, [C.R, C.G // 8, 2, 2, 2]), [0, 1, 4, 2, 3]
    )  # pairs stay in their registers
    even, odd = tl.split(x)
    x = tl.inline_asm_elementwise(text, "=r,r,r", [even, odd], dtype=x.dtype, is_pure=True, pack=2)
    even, odd = tl.split(x)
    return tl.inline_asm_elementwise(
        text, "=r,r,r", [even, odd], dtype=x.dtype, is_pure=True, pack=2
    )


@triton.jit
def find_outliers(x, left, C: tl.constexpr):
    """Whether the first ``left`` groups of x[R, G] have outliers, and what those exceed, fp32[R]."""
    if C.INTERPRET or x.dtype == tl.float32:
        magnitude = tl.abs(x.to(tl.float32))
        total = tl.sum(magnitude, axis=1)
        largest = tl.max(tl.reshape(magnitude, [C.R, C.G // 8, 8]), axis=2)
    else:  # sums on the tensor cores, 16 times the same; two values an instruction for the maxima
        magnitude = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x7FFF7FFF;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
        )
        ones = tl.full([C.POINT, 16], 1.0 / 16, x.dtype)
        sums = tl.dot(tl.reshape(magnitude, [C.R * C.BLOCKS, C.POINT]), ones)
        total = tl.sum(tl.reshape(sums, [C.R, C.BLOCKS * 16]), axis=1)
        x = x if C.MAGNITUDE_MAX else magnitude
        largest = tl.max(tl.abs(largest_of_eight(x, C).to(tl.float32)), axis=2)
    limit = total * (THRESHOLD / C.G)
    found = (largest > limit[:, None]) & (tl.arange(0, C.R) < left)[:, None]
    return tl.max(found.to(tl.int32)) > 0, limit


@triton.jit
def split_outliers(x, limit, left, C: tl.constexpr):
    """x[R, G] without the outliers of its first ``left`` groups, and the lists of its blocks."""
    outlier = (tl.abs(x.to(tl.float32)) > limit[:, None]) & (tl.arange(0, C.R) < left)[:, None]
    best, others = split_words(blocks_of_words(x, outlier, C), C)
    listed = outlier & (tl.reshape(others, [C.R, C.G]) == 0)
    return tl.where(listed, 0.0, x.to(tl.float32)).to(x.dtype), best


@triton.jit
def rotate(x, matrix, C: tl.constexpr):
    """fp32[R, G]: x in the codes' domain."""
    if C.HADAMARD:
        h = unshuffle(transform(x, matrix, C), C)
    else:
        h = x.to(tl.float32)
    return h


@triton.jit
def split_and_rotate(x, left, matrix, C: tl.constexpr):
    """rotate() of x without the outliers of its first ``left`` groups, and the lists of its blocks."""
    words = empty_lists(C)
    found, limit = find_outliers(x, left, C)
    h = rotate(x, matrix, C)  # reads x where it was copied to; what changes x needs another one
    if found:
        others, words = split_outliers(x, limit, left, C)
        h = rotate(others, matrix, C)
    return h, words


@triton.jit
def empty_lists(C: tl.constexpr):
    """int32[R * G / BLOCK, SLOTS]"""
    return tl.zeros([C.R * C.G // BLOCK, SLOTS], tl.int32)


@triton.jit
def add_list(x, wire, first, groups, C: tl.constexpr):
    """x fp32[R, G] plus the lists of its blocks."""
    GROUPS: tl.constexpr = BLOCK // C.G
    row = first + tl.arange(0, C.R)
    at = lists_of(wire, groups, C) + (row // GROUPS).to(tl.int64) * SLOTS
    for slot in range(SLOTS):
        word = tl.load(at + slot, mask=row < groups, other=0)
        column = tl.where(word > 0, (word & (BLOCK - 1)) - row % GROUPS * C.G, -1)
        hit = tl.arange(0, C.G)[None, :] == column[:, None]
        x = tl.where(hit, x + value_of(word)[:, None], x)
    return x


@triton.jit
def any_list(wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """int32[R * G / BLOCK * SLOTS], positive somewhere if any of W senders' lists of the tile has a word."""
    found = load_lists(wires, first, groups, C)
    if W <= C.UNROLLED:
        for w in tl.static_range(1, W):
            found = tl.maximum(
                found, load_lists(wires + tl.full((), w, tl.int64) * wire_stride, first, groups, C)
            )
    else:
        for w in range(1, W):
            found = tl.maximum(
                found, load_lists(wires + w * wire_stride.to(tl.int64), first, groups, C)
            )
    return found


@triton.jit
def add_every_list(x, wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """x fp32[R, G] plus the lists of W senders, in their order."""
    for w in range(0, W):
        x = add_list(x, wires + (tl.full((), 0, tl.int64) + w) * wire_stride, first, groups, C)
    return x


@triton.jit
def add_lists(x, found, wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """add_every_list where ``found``, what any_list has loaded, has a word."""
    if tl.max(found, axis=0) > 0:
        x = add_every_list(x, wires, wire_stride, first, groups, W, C)
    return x


@triton.jit
def put_back(h, word, C: tl.constexpr):
    """h fp32[R, G], in the codes' domain, plus one word of each block, int32[R * G / BLOCK]; 0: none."""
    GROUPS: tl.constexpr = BLOCK // C.G
    word = tl.reshape(tl.broadcast_to(word[:, None], [C.R // GROUPS, GROUPS]), [C.R])
    place = word & (BLOCK - 1)
    here = (word > 0) & (place // C.G == tl.arange(0, C.R) % GROUPS)
    column, own = tl.arange(0, C.G)[None, :], (place % C.G)[:, None]
    value = tl.broadcast_to(value_of(word)[:, None], [C.R, C.G])
    if C.HADAMARD:  # a value's transform is its row of the matrix
        crossed = column & own
        value = tl.where(odd(crossed ^ (crossed >> 8)) == 1, -value, value) * (1.0 / C.G)
        changed = h + value
        h = tl.where(here[:, None], changed, h)
    else:
        h = tl.where(here[:, None] & (column == own), h + value, h)
    return h


@triton.jit
def sum_lists(h, wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """h with what finds no slot in the lists of the sum, and those, int32[R * G / BLOCK, SLOTS]."""
    total = add_every_list(
        tl.zeros([C.R, C.G], tl.float32), wires, wire_stride, first, groups, W, C
    )
    best, others = split_words(blocks_of_words(total, total != 0.0, C), C)
    largest = tl.max(others, axis=1)
    while tl.max(largest, axis=0) > 0:
        h = put_back(h, largest, C)
        others = tl.where(others == largest[:, None], 0, others)
        largest = tl.max(others, axis=1)
    return h, best
