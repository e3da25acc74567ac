"""Outliers, stored separately from the groups, inside kernels; outliers.py defines them.

A tile is whole blocks of BLOCK values, and a block has a list of SLOTS words. A word is 31 bits::

    30              12   11   10           0
    exponent, mantissa  sign  position in the block      0 stands for no value

so words order as the magnitudes of their values do. A tile without outliers takes none of the
branches here.

Names: ``C`` is a spec.Spec; ``first`` the tile's first group, int32; ``groups`` the number of
groups of the chunk that ``wire`` points to; ``words`` the lists of a tile's blocks.
"""

import triton
import triton.language as tl

from taco_kernels.common.hadamard import odd, transform, unshuffle
from taco_kernels.common.packing import aligned_bytes, wire_of
from taco_kernels.taco import outliers

THRESHOLD = tl.constexpr(outliers.THRESHOLD)
BLOCK = tl.constexpr(outliers.BLOCK)
SLOTS = tl.constexpr(outliers.SLOTS)
MAGNITUDE = tl.constexpr(0x7FFFF000)
SIGN = tl.constexpr(0x800)

# Lists on the wire


@triton.jit
def lists_of(wire, groups, C: tl.constexpr):
    """Pointer (int32) to the lists of a chunk, which follow its groups at a multiple of 16 bytes.

    Args:
        wire: pointer to the chunk.
        groups: of the chunk.
        C: constants of the tile.
    """
    used = tl.full((), C.BYTES, tl.int64) * groups
    return (wire + aligned_bytes(used)).to(tl.pointer_type(tl.int32))


@triton.jit
def list_places(first, groups, C: tl.constexpr):
    """int64[R * G / BLOCK * SLOTS]: numbers of the words of a tile's blocks; and a mask of those
    that exist.

    Args:
        first: the tile's first group, which begins a block.
        groups: of the chunk.
        C: constants of the tile.
    """
    GROUPS: tl.constexpr = BLOCK // C.G
    WORDS: tl.constexpr = C.R // GROUPS * SLOTS
    word = (first // GROUPS).to(tl.int64) * SLOTS + tl.arange(0, WORDS)
    return word, word < tl.cdiv(groups, GROUPS).to(tl.int64) * SLOTS


@triton.jit
def load_lists(wire, first, groups, C: tl.constexpr):
    """int32[R * G / BLOCK * SLOTS]: words of a tile's blocks, 0 beyond the last.

    Args:
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    word, inside = list_places(first, groups, C)
    return tl.load(lists_of(wire, groups, C) + word, mask=inside, other=0)


@triton.jit
def store_lists(words, wire, first, groups, C: tl.constexpr):
    """Store the lists of a tile's blocks; nothing beyond the last.

    Args:
        words: int32[R * G / BLOCK, SLOTS].
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    word, inside = list_places(first, groups, C)
    lists = lists_of(wire, groups, C)
    tl.store(lists + word, tl.reshape(words, word.shape), mask=inside)


# Values and their words


@triton.jit
def value_of(word):
    """fp32 values of words."""
    return ((word & MAGNITUDE) | ((word & SIGN) << 20)).to(tl.float32, bitcast=True)


@triton.jit
def blocks_of_words(x, listed, C: tl.constexpr):
    """int32[R * G / BLOCK, BLOCK]: the words of values, 0 for those that are not to be listed.

    Args:
        x: [R, G], values.
        listed: bool[R, G], which of them get a word.
        C: constants of the tile.
    """
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    # Half of the last bit that is kept is added: to nearest. A carry into the exponent is right,
    # too.
    words = (((bits & 0x7FFFFFFF) + 0x800) & MAGNITUDE) | ((bits >> 20) & SIGN)
    # Two steps: positions of single values, [R, G], would stay in registers.
    group_start = tl.arange(0, C.R) % (BLOCK // C.G) * C.G
    words = words | group_start[:, None]
    words = words | tl.arange(0, C.G)[None, :]
    # A zero of either sign has no word.
    words = tl.where(listed & ((bits << 1) != 0), words, 0)
    return tl.reshape(words, [C.R * C.G // BLOCK, BLOCK])


@triton.jit
def empty_lists(C: tl.constexpr):
    """int32[R * G / BLOCK, SLOTS] of zeros: lists without a value."""
    return tl.zeros([C.R * C.G // BLOCK, SLOTS], tl.int32)


@triton.jit
def split_words(words, C: tl.constexpr):
    """The SLOTS largest words of each block, and the words with 0 in place of those.

    Words of a block differ in their positions, so each step takes out one.
    """
    best = empty_lists(C)
    for slot in range(SLOTS):
        largest = tl.max(words, axis=1)[:, None]
        best = tl.where(tl.arange(0, SLOTS)[None, :] == slot, largest, best)
        words = tl.where(words == largest, 0, words)
    return best, words


# Finding outliers and taking them out, to encode


@triton.jit
def largest_of_eight(x, C: tl.constexpr):
    """[R, G / 8, 2] of x[R, G]: of each 8 values two with the largest magnitudes, in either sign.

    Two values an instruction. Without MAGNITUDE_MAX x must not be negative.
    """
    types: tl.constexpr = "bf16x2" if x.dtype == tl.bfloat16 else "f16x2"
    name: tl.constexpr = "max.xorsign.abs." if C.MAGNITUDE_MAX else "max."
    assembly: tl.constexpr = name + types + " $0, $1, $2;"
    # Pairs of neighbours stay in their registers.
    x = tl.permute(tl.reshape(x, [C.R, C.G // 8, 2, 2, 2]), [0, 1, 4, 2, 3])
    even, odd = tl.split(x)
    x = tl.inline_asm_elementwise(
        assembly, "=r,r,r", [even, odd], dtype=x.dtype, is_pure=True, pack=2
    )
    even, odd = tl.split(x)
    return tl.inline_asm_elementwise(
        assembly, "=r,r,r", [even, odd], dtype=x.dtype, is_pure=True, pack=2
    )


@triton.jit
def find_outliers(x, remaining, C: tl.constexpr):
    """True if a tile has outliers; and what they exceed, fp32[R], THRESHOLD times the mean
    magnitude.

    Args:
        x: [R, G], values.
        remaining: how many of the R groups exist.
        C: constants of the tile.
    """
    if C.INTERPRET or x.dtype == tl.float32:
        magnitude = tl.abs(x.to(tl.float32))
        total = tl.sum(magnitude, axis=1)
        largest = tl.max(tl.reshape(magnitude, [C.R, C.G // 8, 8]), axis=2)
    else:
        magnitude = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x7FFF7FFF;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
        )
        # Sums on the tensor cores: a product with 16 equal columns, each of 1/16.
        ones = tl.full([C.POINT, 16], 1.0 / 16, x.dtype)
        rows = tl.reshape(magnitude, [C.R * C.BLOCKS, C.POINT])
        sums = tl.dot(rows, ones)
        total = tl.sum(tl.reshape(sums, [C.R, C.BLOCKS * 16]), axis=1)
        x = x if C.MAGNITUDE_MAX else magnitude
        largest = tl.max(tl.abs(largest_of_eight(x, C).to(tl.float32)), axis=2)
    # THRESHOLD times the mean. NaN and infinity exceed nothing: their groups have no outlier.
    limit = total * (THRESHOLD / C.G)
    inside = tl.arange(0, C.R) < remaining
    exceeds = (largest > limit[:, None]) & inside[:, None]
    return tl.max(exceeds.to(tl.int32)) > 0, limit


@triton.jit
def split_outliers(x, limit, remaining, C: tl.constexpr):
    """x[R, G] without its outliers, and the lists of its blocks.

    Outliers that find no slot stay in x.

    Args:
        x: [R, G], values.
        limit: fp32[R], what outliers exceed.
        remaining: how many of the R groups exist.
        C: constants of the tile.
    """
    inside = (tl.arange(0, C.R) < remaining)[:, None]
    outlier = (tl.abs(x.to(tl.float32)) > limit[:, None]) & inside
    best, rest = split_words(blocks_of_words(x, outlier, C), C)
    # An outlier whose word is gone from the rest has found a slot.
    listed = outlier & (tl.reshape(rest, [C.R, C.G]) == 0)
    return tl.where(listed, 0.0, x.to(tl.float32)).to(x.dtype), best


@triton.jit
def rotate(x, matrix, C: tl.constexpr):
    """fp32[R, G]: x in the codes' domain, h of reference.py.

    Args:
        x: [R, G], values.
        matrix: [POINT, POINT] of hadamard.sylvester, of 1 / G.
        C: constants of the tile.
    """
    if C.HADAMARD:
        h = unshuffle(transform(x, matrix, C), C)
    else:
        h = x.to(tl.float32)
    return h


@triton.jit
def split_and_rotate(x, remaining, matrix, C: tl.constexpr):
    """``rotate`` of x without its outliers, and the lists of its blocks.

    Args:
        x: [R, G], values.
        remaining: how many of the R groups exist.
        matrix: as of ``rotate``.
        C: constants of the tile.
    """
    words = empty_lists(C)
    has_outliers, limit = find_outliers(x, remaining, C)
    # The first rotation reads x where it was copied to; x without outliers needs another copy.
    h = rotate(x, matrix, C)
    if has_outliers:
        rest, words = split_outliers(x, limit, remaining, C)
        h = rotate(rest, matrix, C)
    return h, words


# Adding lists, to decode


@triton.jit
def add_list(x, wire, first, groups, C: tl.constexpr):
    """fp32[R, G]: x plus the lists of its blocks.

    Args:
        x: fp32[R, G], values.
        wire: pointer to the chunk.
        first: the tile's first group.
        groups: of the chunk.
        C: constants of the tile.
    """
    GROUPS: tl.constexpr = BLOCK // C.G
    row = first + tl.arange(0, C.R)
    lists = lists_of(wire, groups, C) + (row // GROUPS).to(tl.int64) * SLOTS
    for slot in range(SLOTS):
        word = tl.load(lists + slot, mask=row < groups, other=0)
        # Its column in this group: outside 0 .. G - 1 if the value is another group's.
        column = (word & (BLOCK - 1)) - row % GROUPS * C.G
        column = tl.where(word > 0, column, -1)
        hit = tl.arange(0, C.G)[None, :] == column[:, None]
        x = tl.where(hit, x + value_of(word)[:, None], x)
    return x


@triton.jit
def any_list(wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """int32[R * G / BLOCK * SLOTS], positive somewhere if any sender's lists of the tile have a
    word.

    Args:
        wires: pointer to the first sender's wire.
        wire_stride: bytes from one sender's wire to the next.
        first: the tile's first group.
        groups: of a wire.
        W: senders.
        C: constants of the tile.
    """
    words = load_lists(wires, first, groups, C)
    if W <= C.UNROLLED:
        for w in tl.static_range(1, W):
            wire = wire_of(wires, w, wire_stride)
            words = tl.maximum(words, load_lists(wire, first, groups, C))
    else:
        for w in range(1, W):
            wire = wire_of(wires, w, wire_stride)
            words = tl.maximum(words, load_lists(wire, first, groups, C))
    return words


@triton.jit
def add_every_list(x, wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """fp32[R, G]: x plus the lists of all senders, in their order.

    Args:
        x: fp32[R, G], values.
        wires: pointer to the first sender's wire.
        wire_stride: bytes from one sender's wire to the next.
        first: the tile's first group.
        groups: of a wire.
        W: senders.
        C: constants of the tile.
    """
    for w in range(0, W):
        wire = wire_of(wires, w, wire_stride)
        x = add_list(x, wire, first, groups, C)
    return x


@triton.jit
def add_lists(x, words, wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """``add_every_list`` where there is anything to add.

    Args:
        x: fp32[R, G], values.
        words: what ``any_list`` gave, before x was decoded, so that the loads are on their way.
        wires: pointer to the first sender's wire.
        wire_stride: bytes from one sender's wire to the next.
        first: the tile's first group.
        groups: of a wire.
        W: senders.
        C: constants of the tile.
    """
    if tl.max(words, axis=0) > 0:
        x = add_every_list(x, wires, wire_stride, first, groups, W, C)
    return x


# Sums that stay encoded


@triton.jit
def add_word(h, word, C: tl.constexpr):
    """fp32[R, G]: h, in the codes' domain, plus one word of each block.

    Args:
        h: fp32[R, G], the groups.
        word: int32[R * G / BLOCK]; 0 adds nothing.
        C: constants of the tile.
    """
    GROUPS: tl.constexpr = BLOCK // C.G
    # The block's word, for each of its groups.
    word = tl.broadcast_to(word[:, None], [C.R // GROUPS, GROUPS])
    word = tl.reshape(word, [C.R])
    position = word & (BLOCK - 1)
    in_group = (word > 0) & (position // C.G == tl.arange(0, C.R) % GROUPS)
    column = tl.arange(0, C.G)[None, :]
    word_column = (position % C.G)[:, None]
    value = tl.broadcast_to(value_of(word)[:, None], [C.R, C.G])
    if C.HADAMARD:  # a value's transform is its row of the matrix
        crossed = column & word_column
        negative = odd(crossed ^ (crossed >> 8)) == 1
        value = tl.where(negative, -value, value) * (1.0 / C.G)
        changed = h + value
        h = tl.where(in_group[:, None], changed, h)
    else:
        h = tl.where(in_group[:, None] & (column == word_column), h + value, h)
    return h


@triton.jit
def sum_lists(h, wires, wire_stride, first, groups, W: tl.constexpr, C: tl.constexpr):
    """h with what finds no slot in the lists of the sum; and those, int32[R * G / BLOCK, SLOTS].

    Args:
        h: fp32[R, G], the sum of the groups, in the codes' domain.
        wires: pointer to the first sender's wire.
        wire_stride: bytes from one sender's wire to the next.
        first: the tile's first group.
        groups: of a wire.
        W: senders.
        C: constants of the tile.
    """
    # The sum of all lists as values: what two senders list in the same position adds up.
    zeros = tl.zeros([C.R, C.G], tl.float32)
    total = add_every_list(zeros, wires, wire_stride, first, groups, W, C)
    best, rest = split_words(blocks_of_words(total, total != 0.0, C), C)
    # One word of each block at a time, the largest first; most tiles have none.
    largest = tl.max(rest, axis=1)
    while tl.max(largest, axis=0) > 0:
        h = add_word(h, largest, C)
        rest = tl.where(rest == largest[:, None], 0, rest)
        largest = tl.max(rest, axis=1)
    return h, best
