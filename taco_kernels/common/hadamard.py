"""Walsh-Hadamard transform of a tile of groups, as a product with a matrix of +-1 on the tensor
cores.

The matrix entries (+-1, or +-1/G for the mean) are exact in bf16 and fp16, products with bf16 or
fp16 values are exact in the fp32 accumulator, and an fp32 value is the exact sum of three bf16
values. What is left is the rounding of fp32 sums, as in a butterfly; sums of integer codes are
exact in any order.

Longer groups than a product (128 points, or 64: Device.point) take butterfly stages on top::

    x[R, G]  --to_blocks-->  [R * BLOCKS, POINT]  --product-->  [R * BLOCKS, POINT]  --across_blocks-->  [R, G]

``C`` is a ``Constants`` with R groups a tile, G values a group, POINT points of a product, BLOCKS =
G / POINT, and INTERPRET.
"""

import triton
import triton.language as tl


@triton.jit
def odd(x):
    """int32: parity of the bits of numbers below 256."""
    x = x ^ (x >> 4)
    x = x ^ (x >> 2)
    return (x ^ (x >> 1)) & 1


@triton.jit
def shuffled(column):
    """Numbers of columns in the order of ``shuffle``, of groups of 64 values and more.

    Bits 0 and 6 up stay. Bits 1-2 move up to bits 4-5, and bits 3-5 down to bits 1-3::

        bit      5  4  3  2  1         becomes        5  4  3  2  1
                 c  b  a  y  x                        y  x  c  b  a
    """
    return (column & ~62) | ((column & 6) << 3) | ((column >> 2) & 14)


@triton.jit
def sylvester(C: tl.constexpr, VALUE: tl.constexpr, SHUFFLED: tl.constexpr, dtype: tl.constexpr):
    """dtype[POINT, POINT]: VALUE * (-1)^popcount(i & j), a Hadamard matrix in Sylvester order.

    Args:
        C: constants of the tile.
        VALUE: magnitude of every entry, a power of two.
        SHUFFLED: whether the columns are in the order of ``shuffle``.
        dtype: bf16 or fp16, which holds VALUE exactly.
    """
    # Sylvester's matrix has -1 where row and column share an odd number of bits.
    row = tl.arange(0, C.POINT)[:, None]
    column = tl.arange(0, C.POINT)[None, :]
    if SHUFFLED and C.POINT >= 64:
        column = shuffled(column)
    return tl.where(odd(row & column) == 1, -VALUE, VALUE).to(dtype)


@triton.jit
def shuffle(x, C: tl.constexpr):
    """Columns of x[R, G] in the order in which the tensor cores' registers hold them.

    Of every 64 columns of an operand or accumulator a thread's registers hold pairs 8 apart: bits
    1-2 of the column's number choose the thread. Here bits 4-5 of an element's number become those,
    so that a thread holds 16 consecutive elements: 16-byte accesses. Permuting bits leaves the
    parity of i & j alone, so H stays H when its rows and columns are both shuffled.
    """
    if C.POINT >= 64:
        # [.., bits 4-5, bits 1-3, bit 0] of a column's number: the first two change places.
        x = tl.permute(tl.reshape(x, [C.R, C.G // 64, 4, 8, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(x, [C.R, C.G])


@triton.jit
def unshuffle(x, C: tl.constexpr):
    """Inverse of ``shuffle``."""
    if C.POINT >= 64:
        # And back.
        x = tl.permute(tl.reshape(x, [C.R, C.G // 64, 8, 4, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(x, [C.R, C.G])


@triton.jit
def upper_half(x):
    """fp32 with the upper 16 bits of x: a bf16."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def split_bf16(x):
    """Three bf16 tensors whose sum is x (fp32) exactly, the largest first.

    Each takes the upper 8 of the 24 mantissa bits that are left. They are truncated, so that
    nothing rounds up to infinity.
    """
    high = upper_half(x)
    # Exact: high has the same exponent, and what is left of the mantissa fits.
    rest = x - high
    middle = upper_half(rest)
    low = rest - middle
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), low.to(tl.bfloat16)


@triton.jit
def to_blocks(x, C: tl.constexpr):
    """x[R, G] as [R * BLOCKS, POINT], a group's blocks in rows 8 and 64 (of 4 blocks) apart.

    An accumulator's rows r and r + 8, and r and r + 64, lie in the same thread, so
    ``across_blocks`` adds registers of one thread.
    """
    LOW: tl.constexpr = 8 if C.R > 8 else C.R
    if C.BLOCKS == 2:
        # [8 groups, block, ..] becomes [block, 8 groups, ..] inside every 16 rows.
        x = tl.reshape(x, [C.R // LOW, LOW, 2, C.POINT])
        x = tl.permute(x, [0, 2, 1, 3])
    elif C.BLOCKS == 4:
        # [R / 8, 8, high bit, low bit, ..] of a block becomes [high bit, R / 8, low bit, 8, ..].
        x = tl.reshape(x, [C.R // LOW, LOW, 2, 2, C.POINT])
        x = tl.permute(x, [2, 0, 3, 1, 4])
    return tl.reshape(x, [C.R * C.BLOCKS, C.POINT])


@triton.jit
def across_blocks(h, C: tl.constexpr):
    """fp32[R, G]: the last butterflies, over the blocks of each group, of rows in the order of
    to_blocks."""
    LOW: tl.constexpr = 8 if C.R > 8 else C.R
    if C.BLOCKS == 2:
        # One butterfly: the blocks' sum and difference are the group's first and second half.
        h = tl.reshape(h, [C.R // LOW, 2, LOW, C.POINT])
        low, high = tl.split(tl.permute(h, [0, 2, 3, 1]))
        h = tl.permute(tl.join(low + high, low - high), [0, 1, 3, 2])
    elif C.BLOCKS == 4:
        # [high bit of the block, R / LOW, low bit, LOW, POINT]; the nearer blocks first
        h = tl.reshape(h, [2, C.R // LOW, 2, LOW, C.POINT])
        h = tl.permute(h, [1, 3, 4, 0, 2])
        low, high = tl.split(h)
        h = tl.permute(tl.join(low + high, low - high), [0, 1, 2, 4, 3])
        low, high = tl.split(h)
        h = tl.permute(tl.join(low + high, low - high), [0, 1, 4, 3, 2])
    return tl.reshape(h, [C.R, C.G])


@triton.jit
def transform(x, matrix, C: tl.constexpr):
    """fp32[R, G]: the Walsh-Hadamard transform of each group.

    Args:
        x: [R, G], bf16, fp16 or fp32.
        matrix: what ``sylvester`` gives, in x's type; bf16 where x is fp32.
        C: constants of the tile.
    """
    x = to_blocks(x, C)
    if C.INTERPRET:  # the interpreter's product of 16-bit operands is wrong
        h = tl.dot(x.to(tl.float32), matrix.to(tl.float32))
    elif x.dtype == tl.float32:
        # The smallest parts first: their sum is not yet rounded to the largest one's precision.
        high, middle, low = split_bf16(x)
        h = tl.dot(low, matrix)
        h = tl.dot(middle, matrix, h)
        h = tl.dot(high, matrix, h)
    else:
        h = tl.dot(x, matrix)
    # Each row is the transform of a block; groups of several blocks need the stages between them.
    return across_blocks(h, C)
