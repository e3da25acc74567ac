"""Codes inside kernels: rounding to the grids of the formats and back, and the bit planes of a wire."""

import triton
import triton.language as tl

# fp32 with this much added keeps an integer in its low mantissa bits, rounded half to even.
MAGIC = tl.constexpr(12582912.0)


@triton.jit
def fp8_codes(v, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """int32 codes of |v| <= qmax in integer arithmetic: n steps of the binade that |v| lies in.

    LOWEST is the biased fp32 exponent of the smallest normal number. Codes are consecutive integers, so n
    adds to the binade's first code also where it carries or where the number is subnormal.
    """
    bits = v.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, LOWEST)
    scale = ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two
    n = (tl.abs(v) * scale + MAGIC).to(tl.int32, bitcast=True) & 0x3FFFFF
    return (((exponent - LOWEST) << MANTISSA) + n) | ((bits >> 24) & 0x80)


@triton.jit
def converted_to_fp8(v, FORMAT: tl.constexpr):
    """uint8 codes of fp32 v by PTX's conversion, four values at a time.

    On sm_89 Triton 3.6 takes fp16 on the way, towards zero: one code in 256 of e4m3 is then not the nearest.
    """
    kind: tl.constexpr = "e4m3x2" if FORMAT == "fp8-e4m3" else "e5m2x2"
    pair: tl.constexpr = "cvt.rn.satfinite." + kind + ".f32 "
    text: tl.constexpr = (
        "{ .reg .b16 lo, hi; " + pair + "lo, $2, $1; " + pair + "hi, $4, $3; mov.b32 $0, {lo, hi}; }"
    )
    return tl.inline_asm_elementwise(text, "=r,f,f,f,f", [v], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def nearest_fp8(v, C: tl.constexpr):
    """uint8 codes of |v| <= qmax, rounded to nearest."""
    if C.CONVERTS_BY_HALF:
        codes = converted_to_fp8(v, C.FORMAT)
    elif C.FORMAT == "fp8-e4m3":
        if C.HARDWARE_FP8:
            codes = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = fp8_codes(v, 3, 121).to(tl.uint8)
    else:
        if C.HARDWARE_FP8:
            codes = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            codes = fp8_codes(v, 2, 113).to(tl.uint8)
    return codes


@triton.jit
def fixed_point(h, inverse, C: tl.constexpr):
    """int32[R, G] of an integer format: h * inverse plus 2^(BITS - 1), nothing for int8, in its lowest byte.

    The rest means nothing. Nothing can saturate: the product is from -2^(BITS - 1) to qmax, up to its
    rounding (reference.round_to_grid).
    """
    BIAS: tl.constexpr = 0 if C.BITS == 8 else 2 ** (C.BITS - 1)
    inverse = tl.broadcast_to(inverse[:, None], [C.R, C.G])
    return tl.fma(h, inverse, MAGIC + BIAS).to(tl.int32, bitcast=True)


@triton.jit
def quantize(h, inverse, C: tl.constexpr):
    """uint8 codes of h[R, G] * inverse[R] in an 8-bit format."""
    if C.FORMAT != "int8":
        codes = nearest_fp8(h * inverse[:, None], C)
    else:
        codes = fixed_point(h, inverse, C)
    return codes.to(tl.uint8)


@triton.jit
def code_values(codes, dtype: tl.constexpr, C: tl.constexpr):
    """Values of uint8 codes in dtype: fp16, which holds every format exactly, or fp32."""
    if C.FORMAT == "fp8-e4m3":
        if C.HARDWARE_FP8:
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            bits = codes.to(tl.uint16)
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # fp16, whose exponent bias is larger by 8
            values = half.to(tl.float16, bitcast=True) * 256.0
    elif C.FORMAT == "fp8-e5m2":
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        # 1024 + c in fp16 has c in its low mantissa bits
        biased = codes ^ 0x80 if C.BITS == 8 else codes
        values = (biased.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + 2.0 ** (C.BITS - 1))
    return values.to(dtype)


@triton.jit
def grid_exponent(exponent, FLOOR: tl.constexpr):
    """The exponent that decides a row's power-of-two grid, see magnitudes.py."""
    return tl.minimum(tl.maximum(exponent, FLOOR), 254)


@triton.jit
def threshold_bits(thresholds, shard):
    """magnitudes.threshold_bits of a shard's threshold."""
    return tl.maximum(tl.load(thresholds + shard).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def behind(wire, BYTES: tl.constexpr, groups, C: tl.constexpr):
    """Pointer to what lies after BYTES for each group of a chunk.

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
    """[R, G / 16, 2J]: high after low, [R, G / 16, J] each."""
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
