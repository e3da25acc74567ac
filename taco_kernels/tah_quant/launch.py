"""TAH-Quant in Triton: a kernel to encode and one to decode. Same signatures as reference.py.

Each reads the tensor, or the wire, once. To encode, codes of all tiles are made at their full
width; the extra bits go to scratch memory with the sums that entropies are made of, and
reference.py chooses whose extra bits are sent, without waiting for the host::

    x --encode_kernel--> base planes, scales, pivots    on the wire
                         extra bits of every tile       scratch   \
                         sum |x|, sum |x| log2 |x|      scratch   --reference.write_high--> extra plane, widths

To decode, codes are small integers, of which the Hadamard transform is exact.

Moving element i to i ^ p before a Hadamard transform flips the sign of its output j where p & j has
odd parity: the kernels flip signs instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from taco_kernels.common import addressable, ceil_div, check_counted, check_tensor
from taco_kernels.common.device import Constants, as_tensor, device_for
from taco_kernels.common.fast_launch import start
from taco_kernels.common.hadamard import odd, sylvester, transform
from taco_kernels.common.packing import aligned_bytes, load_plane, pack, store_plane, unpack
from taco_kernels.tah_quant import reference
from taco_kernels.tah_quant.reference import TahConfig, TahLayout, layout_of

HELD_BYTES = 8192
"""Bytes of the tensor that a program holds: in bf16 64 tiles of 64, as many rows as the tensor
cores take."""
WARPS = 4
"""Warps a program."""
PROGRAMS = 4
"""Programs a multiprocessor."""
CODE_AT = tl.constexpr(16)
"""Lowest bit of a code in an fp32 number that is 2^7 more: 16 bits of fraction are below it."""
LARGEST_SUM = tl.constexpr(reference.LARGEST_SUM)


@dataclass(frozen=True, repr=False, eq=False)
class TahSpec(Constants):
    """Constants of the kernels as one argument; common/hadamard.py and packing.py read some of
    them."""

    R: tl.constexpr
    """Tiles a program holds at a time."""
    G: tl.constexpr
    """Values a tile."""
    POINT: tl.constexpr
    """Points of the transform: G."""
    BLOCKS: tl.constexpr
    """Transforms a tile: 1."""
    ROW: tl.constexpr
    """Tiles are not in chunks: 0."""
    LOW: tl.constexpr
    """Bits of a low code."""
    EXTRA: tl.constexpr
    """Bits that a high code has more."""
    LEVELS: tl.constexpr
    """Largest code."""
    PADDED: tl.constexpr
    """Rows are not whole tiles."""
    INTERPRET: tl.constexpr
    """Running under TRITON_INTERPRET=1."""


@lru_cache
def spec_of(config: TahConfig, itemsize: int, padded: bool, interpret: bool) -> TahSpec:
    """Return the kernels' constants, cached.

    Args:
        config: of the codec.
        itemsize: bytes of a value of the tensor.
        padded: whether rows are not whole tiles.
        interpret: whether kernels run in Triton's interpreter.
    """
    size = config.tile_size
    return TahSpec.of(
        R=HELD_BYTES // (size * itemsize),
        G=size,
        POINT=size,
        BLOCKS=1,
        ROW=0,
        LOW=config.low_bits,
        EXTRA=config.extra_bits,
        LEVELS=config.levels,
        PADDED=padded,
        INTERPRET=interpret,
    )


# Kernels. ``row`` are the numbers [R] of a program's tiles, ``tiles`` how many the tensor has.


@triton.jit
def tile_pointers(x, row, tiles, per_row, channels, C: tl.constexpr):
    """Pointers [R, G] to the values of tiles, and a mask of the values that exist.

    Args:
        x: pointer to the tensor, contiguous.
        row: int32[R], numbers of the tiles.
        tiles: of the tensor.
        per_row: tiles of a row.
        channels: values of a row.
        C: constants of the tile.
    """
    column = tl.arange(0, C.G)[None, :]
    mask = (row < tiles)[:, None]
    if C.PADDED:
        # A row may have 2^31 values and more, so its tiles begin at 64-bit offsets. What remains of
        # it is cut to a tile, so that the mask of the values is of 32 bits.
        begin = (row % per_row).to(tl.int64) * C.G
        remaining = tl.minimum(channels - begin, C.G).to(tl.int32)
        begin = (row // per_row).to(tl.int64) * channels + begin
        pointers = x + begin[:, None] + column
        mask = mask & (column < remaining[:, None])
    else:
        pointers = x + row.to(tl.int64)[:, None] * C.G + column
    return pointers, mask


@triton.jit
def after_plane(plane, tiles, BITS: tl.constexpr, C: tl.constexpr):
    """Pointer to the section after a plane, at a multiple of 16 bytes.

    Args:
        plane: pointer to the plane.
        tiles: of the tensor.
        BITS: of the plane.
        C: constants of the tile.
    """
    plane_bytes = tl.full((), C.G * BITS // 8, tl.int64) * tiles
    return plane + aligned_bytes(plane_bytes)


@triton.jit
def round_down_fp16(x):
    """int32 bits of the largest fp16 that is not above x (fp32).

    The next smaller fp16 has the next smaller bits where it is positive, the next larger where it
    is negative; below zero comes the smallest negative number.
    """
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -32767, bits + 1))
    return tl.where(half.to(tl.float32) > x, below, bits)


@triton.jit
def round_up_fp16(x):
    """int32 bits of the smallest fp16 that is not below x (fp32, not negative)."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(half.to(tl.float32) < x, bits + 1, bits)


@triton.jit
def from_fp16(bits):
    """fp32 of the fp16 in the low 16 bits of int32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def grid_of(low, high, fits, C: tl.constexpr):
    """The grids of tiles between their smallest and largest values.

    Three [R]: int32, step and zero point in fp16, the step in the lower half (NaN where a tile does
    not fit); fp32, the inverse of the step; fp32, the zero point.

    Args:
        low: fp32[R], the smallest value of each tile.
        high: fp32[R], the largest.
        fits: bool[R], whether the tile is finite (LARGEST_SUM).
        C: constants of the tile.
    """
    zero_bits = round_down_fp16(tl.where(fits, low, 0.0))
    zero = from_fp16(zero_bits)
    span = tl.maximum(tl.where(fits, high, 0.0) - zero, 0.0)
    levels = tl.full([C.R], C.LEVELS, tl.float32)
    step_bits = round_up_fp16(tl.div_rn(span, levels))
    step = from_fp16(step_bits)
    ones = tl.full([C.R], 1.0, tl.float32)
    inverse = tl.where(step > 0.0, tl.div_rn(ones, tl.where(step > 0.0, step, 1.0)), 0.0)
    # 0x7E00 is fp16's NaN.
    return (tl.where(fits, step_bits, 0x7E00) & 0xFFFF) | (zero_bits << 16), inverse, zero


@triton.jit
def outlier_of(magnitude, fits, C: tl.constexpr):
    """bool[R], which tiles have one outlier; and int32[R], its element.

    An outlier is at least twice the second largest magnitude, so it alone is above half of the
    largest.

    Args:
        magnitude: fp32[R, G], of the values.
        fits: bool[R], whether the tile is finite.
        C: constants of the tile.
    """
    column = tl.arange(0, C.G)[None, :]
    above_half = magnitude > 0.5 * tl.max(magnitude, axis=1)[:, None]
    # One sum gives both: the elements' numbers, below 256, and 256 for each of them.
    sums = tl.sum(tl.where(above_half, column + 256, 0), axis=1)
    return ((sums >> 8) == 1) & fits, sums & (C.G - 1)


@triton.jit
def encode_kernel(x, base, extra, scales, pivots, sums, tiles, per_row, channels, C: tl.constexpr):
    """Everything but the widths and the choice of extra bits. Persistent programs, R tiles a step.

    Each step: values; sums for the entropy; the outlier; the transform, of tiles that have one; the
    grid; codes; planes.

    Args:
        x: pointer to the tensor, contiguous, bf16, fp16 or fp32.
        base: pointer to the wire's base planes, uint8.
        extra: pointer to the extra bits of every tile, uint8 [tiles, G * EXTRA / 8].
        scales: pointer to the wire's scales, int32 [tiles].
        pivots: pointer to the wire's pivots, uint8 [tiles].
        sums: pointer to each tile's sum of |x|, fp32 [tiles], and sum of |x| log2 |x|, [tiles].
        tiles: of the tensor.
        per_row: tiles of a row.
        channels: values of a row.
        C: TahSpec.
    """
    # An fp32 value is rotated as three bf16 values.
    dot_type: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    matrix = sylvester(C, 1.0, False, dot_type)
    column = tl.arange(0, C.G)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(tiles, C.R), tl.num_programs(0)):
        first = as_tensor(block) * C.R
        row = first + tl.arange(0, C.R)
        inside = row < tiles
        pointers, mask = tile_pointers(x, row, tiles, per_row, channels, C)
        value = tl.load(pointers, mask=mask, other=0.0)
        # Values that do not exist are zeros: they add nothing and are not the largest.
        y = value.to(tl.float32)
        magnitude = tl.abs(y)
        total = tl.sum(magnitude, axis=1)
        fits = total < LARGEST_SUM
        if C.EXTRA > 0:
            # The logarithm of a zero is cut at 2^-126, and multiplied by zero.
            weighted = tl.sum(magnitude * tl.log2(tl.maximum(magnitude, 2.0**-126)), axis=1)
            tl.store(sums + row, total, mask=inside)
            tl.store(sums + tiles + row, weighted, mask=inside)
        chosen, pivot = outlier_of(magnitude, fits, C)
        pivot_byte = tl.where(chosen, pivot + 128, 0).to(tl.uint8)
        tl.store(pivots + row, pivot_byte, mask=inside)
        rotated = transform(value, matrix, C) * (1 / C.G**0.5)
        # Elements i and i ^ pivot change places before the transform: signs of its outputs, after
        # it.
        rotated = tl.where(odd(pivot[:, None] & column) == 1, -rotated, rotated)
        # Every tile is transformed; one without an outlier keeps its values.
        y = tl.where(chosen[:, None], rotated, y)
        pair, inverse, zero = grid_of(tl.min(y, axis=1), tl.max(y, axis=1), fits, C)
        tl.store(scales + row, pair, mask=inside)
        # (y - zero) * inverse + 1/2, with 2^7 more the code's bits are those from CODE_AT on: a
        # floor.
        offset = tl.fma(-zero, inverse, 2.0 ** (23 - CODE_AT) + 0.5)
        inverse = tl.broadcast_to(inverse[:, None], y.shape)
        codes = tl.fma(y, inverse, tl.broadcast_to(offset[:, None], y.shape))
        codes = (codes.to(tl.int32, bitcast=True) >> CODE_AT) & C.LEVELS
        if C.EXTRA > 0:
            plane = pack(codes & (2**C.EXTRA - 1), C.EXTRA, C)
            store_plane(extra, plane, first, tiles, C.G * C.EXTRA // 8, C)
            codes = codes >> C.EXTRA
        # Low bits of 3 are a plane of 2 and one of 1.
        if C.LOW == 4:
            store_plane(base, pack(codes, 4, C), first, tiles, C.G // 2, C)
        else:
            store_plane(base, pack(codes & 3, 2, C), first, tiles, C.G // 4, C)
        if C.LOW == 3:
            second = after_plane(base, tiles, 2, C)
            store_plane(second, pack(codes >> 2, 1, C), first, tiles, C.G // 8, C)


@triton.jit
def decode_kernel(
    x, base, extra, scales, pivots, slots, tiles, high_tiles, per_row, channels, C: tl.constexpr
):  # fmt: skip
    """The tensor of a wire. Persistent programs, R tiles a step.

    Args:
        x: pointer to the tensor, contiguous.
        base: pointer to the wire's base planes, uint8.
        extra: pointer to the wire's extra bits of high tiles, uint8 [high_tiles, G * EXTRA / 8].
        scales: pointer to the wire's scales, int32 [tiles].
        pivots: pointer to the wire's pivots, uint8 [tiles].
        slots: pointer to the row of ``extra`` of each tile, int64 [tiles]; high_tiles of low tiles.
        tiles: of the tensor.
        high_tiles: tiles with extra bits.
        per_row: tiles of a row.
        channels: values of a row.
        C: TahSpec.
    """
    matrix = sylvester(C, 1.0, False, tl.float16)
    column = tl.arange(0, C.G)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(tiles, C.R), tl.num_programs(0)):
        first = as_tensor(block) * C.R
        row = first + tl.arange(0, C.R)
        inside = row < tiles
        if C.LOW == 4:
            codes = unpack(load_plane(base, first, tiles, C.G // 2, C), 4, C)
        else:
            codes = unpack(load_plane(base, first, tiles, C.G // 4, C), 2, C)
        if C.LOW == 3:
            plane = load_plane(after_plane(base, tiles, 2, C), first, tiles, C.G // 8, C)
            codes = codes | (unpack(plane, 1, C) << 2)
        pair = tl.load(scales + row, mask=inside, other=0)
        step = from_fp16(pair)
        zero = from_fp16(pair >> 16)
        if C.EXTRA > 0:
            BYTES: tl.constexpr = C.G * C.EXTRA // 8
            slot = tl.load(slots + row, mask=inside, other=0)
            high = inside & (slot < high_tiles)
            # High tiles' extra bits lie without gaps, in the order of their slots.
            byte = tl.arange(0, BYTES)[None, :]
            pointers = extra + slot.to(tl.int64)[:, None] * BYTES + byte
            plane = tl.load(pointers, mask=high[:, None], other=0)
            codes = (codes << C.EXTRA) | unpack(plane, C.EXTRA, C)
            # Without its extra bits a code stands for the middle of its cell.
            zero = tl.where(high, zero, zero + step * ((2**C.EXTRA - 1) * 0.5))
        codes = codes.to(tl.float32)
        pivot = tl.load(pivots + row, mask=inside, other=0).to(tl.int32)
        chosen = (pivot >= 128)[:, None]
        pivot = (pivot & 127)[:, None]
        # The transform is its own inverse: signs of its inputs give elements i and i ^ pivot
        # exchanged.
        signed = tl.where(odd(pivot & column) == 1, -codes, codes)
        scale = step * (1 / C.G**0.5)
        rotated = transform(signed.to(tl.float16), matrix, C) * scale[:, None]
        # The transform of a constant, the zero point, is all in one element: the pivot.
        constant = zero * C.G**0.5
        rotated = tl.where(column == pivot, rotated + constant[:, None], rotated)
        y = tl.where(chosen, rotated, codes * step[:, None] + zero[:, None])
        pointers, mask = tile_pointers(x, row, tiles, per_row, channels, C)
        tl.store(pointers, y.to(x.dtype.element_ty), mask=mask)


# Launches


def _start(
    kernel, layout: TahLayout, tensors: Sequence[torch.Tensor], numbers: tuple[int, ...]
) -> None:
    """Start a kernel on the tiles of ``layout``; ``numbers`` follow the number of tiles."""
    check_counted("tiles", layout.tiles, "use a larger tile_size or smaller messages")
    device = device_for(tensors[0])
    padded = layout.channels % layout.config.tile_size != 0
    spec = spec_of(layout.config, tensors[0].element_size(), padded, device.interpret)
    programs = min(ceil_div(layout.tiles, spec.R.value), PROGRAMS * device.multiprocessors)
    numbers = (layout.tiles, *numbers, layout.tiles_per_row, layout.channels)
    start(kernel, (programs,), tensors, numbers, C=spec, num_warps=WARPS, enable_fp_fusion=False)


def _scales_and_pivots(wire: torch.Tensor, layout: TahLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both sections of the wire, scales as int32."""
    scales = reference.section(wire, "scales", layout)
    pivots = reference.section(wire, "pivots", layout)
    return scales.view(torch.int32), pivots


def encode(x: torch.Tensor, config: TahConfig) -> torch.Tensor:
    """Return the wire uint8[wire_bytes] of a tensor; see reference.encode."""
    layout = layout_of(config, tuple(x.shape))
    # Zeros: padding between sections, which the kernel does not write.
    wire = torch.zeros(layout.wire_bytes, dtype=torch.uint8, device=x.device)
    if not layout.numel:
        return wire
    plane_bytes = config.tile_size * config.extra_bits // 8
    extra = torch.empty((layout.tiles, plane_bytes), dtype=torch.uint8, device=x.device)
    sums = torch.empty((2, layout.tiles), dtype=torch.float32, device=x.device)
    tensors = x.contiguous(), wire, extra, *_scales_and_pivots(wire, layout), sums
    _start(encode_kernel, layout, tensors, ())
    if config.extra_bits:
        reference.write_high(wire, extra, reference.entropies(*sums, layout), layout)
    return wire


def decode(
    wire: torch.Tensor, config: TahConfig, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Decode a wire; see reference.decode.

    Args:
        wire: uint8[wire_bytes].
        config: of the codec.
        shape: of the tensor.
        dtype: of the tensor: bf16, fp16 or fp32.
    """
    layout = layout_of(config, tuple(shape))
    check_tensor("wire", wire, torch.uint8, (layout.wire_bytes,))
    x = torch.empty(tuple(shape), dtype=dtype, device=wire.device)
    if not layout.numel:
        return x
    wire = addressable(wire)
    if config.extra_bits:
        slots = reference.slots_on(wire, layout)
    else:
        slots = wire  # is not read
    extra = reference.section(wire, "extra", layout)
    tensors = x, wire, extra, *_scales_and_pivots(wire, layout), slots
    _start(decode_kernel, layout, tensors, (layout.high_tiles,))
    return x
