"""Codes of all tiles at their full width: the tensor is read once.

The extra bits go to scratch memory, with the sums that the entropies are made of; select.py chooses whose
extra bits are sent.
"""

import triton
import triton.language as tl

from taco_kernels.tah_quant.kernels.tiles import nibble_words, starts, store_bits, store_words, tile_pointers
from taco_kernels.triton.hadamard import sylvester, transform, unshuffle
from taco_kernels.triton.rounding import MAGIC

LARGEST_SUM = tl.constexpr(2.0**100)


@triton.jit
def round_down_fp16(x):
    """Bits, int16, of the largest fp16 that is not above x (fp32)."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -32767, bits + 1))
    return tl.where(half.to(tl.float32) > x, below, bits).to(tl.int16)


@triton.jit
def round_up_fp16(x):
    """Bits, int16, of the smallest fp16 that is not below x (fp32, not negative)."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(half.to(tl.float32) < x, bits + 1, bits).to(tl.int16)


@triton.jit
def logarithm(magnitude, C: tl.constexpr):
    """log2, and something finite at 0."""
    magnitude = tl.maximum(magnitude, 2.0**-126)
    if C.INTERPRET:
        result = tl.log2(magnitude)
    else:  # one instruction: nothing here is subnormal
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [magnitude], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def encode_tiles(x, base, extra, steps, zeros, pivots, sums, first, counts, matrix, C: tl.constexpr):
    """Encode tiles first...; ``counts`` is (tiles, tiles of a row, channels)."""
    tiles, per_row, channels = counts
    pointers, mask = tile_pointers(x, first, tiles, per_row, channels, C)
    y = tl.load(pointers, mask=mask, other=0.0)
    plain = y.to(tl.float32)
    magnitude = tl.abs(plain)
    total = tl.sum(magnitude, axis=1)
    fits = total < LARGEST_SUM
    row = first + tl.arange(0, C.R)
    inside = row < tiles
    if C.EXTRA > 0:
        weighted = tl.sum(magnitude * logarithm(magnitude, C), axis=1)
        tl.store(sums + row, total, mask=inside)
        tl.store(sums + tiles + row, weighted, mask=inside)
    if C.TRANSFORM:
        # the largest is at least twice the second: it alone is larger than its half
        outlier = magnitude > 0.5 * tl.max(magnitude, axis=1)[:, None]
        found = tl.sum(tl.where(outlier, tl.arange(0, C.G)[None, :] + 256, 0), axis=1)
        chosen = (found >> 8 == 1) & fits
        start = starts(first, per_row, channels, C)
        head = tl.load(x + start, mask=inside, other=0.0)
        largest = tl.load(x + start + (found & 127), mask=chosen & inside, other=0.0).to(tl.float32)
        # Row 0 of the matrix is constant: element 0 may stay as it is, and its change is added to all.
        rotated = transform(tl.where(outlier, head[:, None], y), matrix, C)
        offset = (largest - head.to(tl.float32)) * (1 / C.G**0.5)
        rotated = unshuffle(tl.fma(rotated, 1 / C.G**0.5, offset[:, None]), C)
        plain = tl.where(chosen[:, None], rotated, plain)
        pivot = tl.where(chosen, (found & 127) + 128, 0)
        tl.store(pivots + row, pivot.to(tl.uint8), mask=inside)
    low = tl.where(fits, tl.min(plain, axis=1), 0.0)
    high = tl.where(fits, tl.max(plain, axis=1), 0.0)
    zero_bits = round_down_fp16(low)
    zero = zero_bits.to(tl.float16, bitcast=True).to(tl.float32)
    span = tl.maximum(high - zero, 0.0)
    step_bits = round_up_fp16(tl.div_rn(span, tl.full([C.R], C.LEVELS, tl.float32)))
    step = step_bits.to(tl.float16, bitcast=True).to(tl.float32)
    tl.store(zeros + row, zero_bits, mask=inside)
    tl.store(steps + row, tl.where(fits, step_bits, 0x7E00).to(tl.int16), mask=inside)  # fp16 NaN
    positive = fits & (step > 0.0)
    inverse = tl.div_rn(tl.full([C.R], 1.0, tl.float32), tl.where(positive, step, 1.0))
    inverse = tl.broadcast_to(tl.where(positive, inverse, 0.0)[:, None], [C.R, C.G])
    codes = tl.fma(plain - zero[:, None], inverse, MAGIC).to(tl.int32, bitcast=True) & C.LEVELS
    if C.LOW + C.EXTRA <= 4:
        a, b = nibble_words(codes, C)
        store_words(a, b, base, first, tiles, 16, C.EXTRA, C.LOW, C)
        if C.EXTRA > 0:
            store_words(a, b, extra, first, tiles, 1, 0, C.EXTRA, C)
    else:
        store_bits(codes >> C.EXTRA, base, first, tiles, 16, C.LOW, C)
        if C.EXTRA > 0:
            store_bits(codes & (2**C.EXTRA - 1), extra, first, tiles, 1, C.EXTRA, C)


@triton.jit
def encode_kernel(x, base, extra, steps, zeros, pivots, sums, tiles, per_row, channels, C: tl.constexpr):
    """Everything but the widths and the choice of extra bits. Persistent programs, R tiles a step."""
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    matrix = 0
    if C.TRANSFORM:
        matrix = sylvester(C, 1.0, True, dot_type)
    counts = (tiles, per_row, channels)
    if C.INTERPRET:  # no loops over run-time bounds there: one program a step
        first = tl.program_id(0) * C.R
        encode_tiles(x, base, extra, steps, zeros, pivots, sums, first, counts, matrix, C)
    else:
        blocks = tl.cdiv(tiles, C.R)
        for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=C.STAGES):
            encode_tiles(x, base, extra, steps, zeros, pivots, sums, block * C.R, counts, matrix, C)
