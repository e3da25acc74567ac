"""The codec in plain torch: the definition that every kernel is tested against.

TACO (arXiv 2604.24088) encodes a group x of G values as q = round(y / s), y = alpha * WHT(x) /
sqrt(G),
alpha = clamp(qmax / sqrt(mean(x^2) + 1e-6), 1e-3, 1e3), s = max|y| / qmax, and sends q, s and alpha. In exact
arithmetic y / s does not depend on alpha, so the arithmetic here, all of it fp32, runs on the mean

    h = WHT(x / G),   WHT in Sylvester order, stages of distance 1, 2, 4, ... G/2,

which cannot overflow for finite x (|h| <= max|x|) and whose prescale is an exact power of two:

    q     = round(h * (qmax / max|h|))          alpha = clamp(qmax / sqrt(sum(h^2) + 1e-6), 1e-3, 1e3)
    s     = alpha * max|h| * (sqrt(G) / qmax)    (sum(h^2) = mean(x^2), Parseval)
    step  = s / sqrt(G) / alpha                  decode: x = WHT(q * step) = WHT(q) * step

Single scale: the wire holds ``step = max|h| / qmax``, rounded up to bf16, and q = round(h / step). Signed
scale: ``|step| = max(far / 2^(bits - 1), near / qmax)`` of the largest |h| on either side of zero, rounded up
to bf16; it is negative where far is positive, so that far has a code of its own below -qmax, and no
code overflows (values above bf16's largest may decode to infinity). The quadratic grid has values,
a step and a rounding of its own (below). Without the Hadamard transform h = x and the factors
sqrt(G) are 1. ``step`` has a floor of about 1e-15 (the paper's 1e-12 on s); an all-zero group sends
a zero, and a group that is not finite sends NaN and so decodes to NaN. Outliers are first stored
separately, if the config says so (outliers.py).

In which order the functions of this module are called::

    encode   to_groups -> outliers.split -> hadamard -> encode_groups (scales) -> round_to_grid -> pack
    decode   unpack -> code_values -> decode_groups (steps) -> hadamard -> outliers.add
    sums     decode_groups of each sender -> sum_groups -> hadamard, or encode_groups

The quadratic grid of int4, int5 and int6 with signed scales is denser near zero, where most of a
rotated group's values lie. The codes u of ``bits`` bits stand for

    v(u) = u (|u| + 2 a + 1),   -M <= u < M,   M = 2^(bits - 1)

whose neighbours are 2 (|u| + a + 1) apart: from the middle to the ends 2.4 to 2.6 times farther. That is
companding (Bennett 1948; Panter and Dite 1951: the best density is the cube root of the values').
All v are even integers below 2^12, so fp16 holds them and sums are exact in fp32. Midway between
the values of n and n + 1 lies (n + a + 1)^2 - a (a + 1), so the code of the nearest one is

    |u| = floor(sqrt(|v| + a (a + 1))) - a

of |v| to the nearest sixteenth: a square root then need not be exact, since its argument plus 1 / 32 is far
enough from every square. ``a`` has the least squared error for Gaussian groups of 128, whose
squared error is 0.81, 0.79 and 0.79 (4, 5, 6 bits) of that of a uniform grid with a sign, 0.87,
0.86 and 0.85 in groups of 32.

The step has a sign, too: max(far / v(M), near / v(M - 1)) of the largest magnitudes on either side
of zero, to the nearest bf16, so that whichever decides it has a code's value, and a lone one comes
back. Half a bf16 is too little for any value to lie beyond the outermost codes' cells.
"""

import math

import torch

from taco_kernels.common import ALIGNMENT
from taco_kernels.common.reference import hadamard, integer_values, pack, round_to_integers, unpack
from taco_kernels.taco import outliers
from taco_kernels.taco.layout import CodecConfig, check_same_groups, check_wires

EPSILON = 1e-6
"""What TACO adds to the mean square under alpha's root."""
ALPHA_MIN = 1e-3
ALPHA_MAX = 1e3
S_MIN = 1e-12
"""Floor of s."""
UP = 0xFFFF
"""Rounding of to_bf16: up."""
NEAREST = 0x8000
"""Rounding of to_bf16: to nearest, of two the larger."""
SIXTEENTHS = 2.0**19
"""fp32 with this much added is a multiple of 1 / 16."""


def quadratic_values(codes: torch.Tensor, bend: int) -> torch.Tensor:
    """Return v of fp32 codes u, ``bend`` being ``a`` of the grid."""
    return codes * (codes.abs() + (2 * bend + 1))


def quadratic_nearest(v: torch.Tensor, bend: int) -> torch.Tensor:
    """Return codes u, fp32, whose quadratic_values are nearest to v; infinities and NaN have none."""
    # To the nearest sixteenth, ties to even, by the rounding of a sum.
    x = (v.abs() + (SIXTEENTHS + bend * (bend + 1))) - SIXTEENTHS
    return torch.copysign(x.double().sqrt().floor().float() - bend, v)


def quadratic_ends(bits: int, bend: int) -> tuple[float, float]:
    """Return the magnitudes of the outermost quadratic_values: v(-M) and v(M - 1)."""
    half = 2 ** (bits - 1)
    below = half * (half + 2 * bend + 1)
    above = (half - 1) * (half + 2 * bend)
    return float(below), float(above)


def amax_floor(config: CodecConfig) -> float:
    """Return the smallest max|h| that is told from zero: where s meets its floor at the largest alpha."""
    return S_MIN / ALPHA_MAX * config.qmax / root(config)


def root(config: CodecConfig) -> float:
    """Return sqrt(G), or 1 without the transform: from the mean-normalised to the orthonormal
    transform."""
    return math.sqrt(config.group_size) if config.hadamard else 1.0


def round_to_grid(h: torch.Tensor, inverse: torch.Tensor, config: CodecConfig) -> torch.Tensor:
    """Return codes uint8[groups, G] of v = h * inverse, to nearest, ties to even.

    -2^(bits - 1) <= v <= qmax for integers, |v| <= qmax in fp8, up to the rounding of one product: the clamp
    is for NaN and infinity alone, which only groups with a NaN step have; their codes mean nothing.

    Args:
        h: fp32[groups, G].
        inverse: fp32[groups, 1], reciprocals of the steps.
        config: of the codec.
    """
    if config.bend:
        codes = quadratic_nearest((h * inverse).nan_to_num(nan=0.0), config.bend)
        return (codes + 2 ** (config.bits - 1)).to(torch.uint8)
    if not config.is_float:
        return round_to_integers(h, inverse, config.bits)
    v = (h * inverse).nan_to_num(nan=0.0).clamp(-config.qmax, config.qmax)
    # Of the format: mantissa bits, and fp32's biased exponent of its smallest normal number.
    if config.format == "fp8-e4m3":
        mantissa, lowest = 3, 121
    else:
        mantissa, lowest = 2, 113
    # n steps of the binade that |v| lies in. Codes are consecutive integers, so n simply adds to the binade's
    # first code, also where it carries into the next one or where the number is subnormal.
    bits = v.view(torch.int32)
    exponent = (bits >> 23 & 0xFF).clamp(min=lowest)
    ulp = ((exponent - mantissa) << 23).view(torch.float32)
    steps = torch.round(v.abs() / ulp).int()
    code = ((exponent - lowest) << mantissa) + steps
    return (code | bits >> 24 & 0x80).to(torch.uint8)


def code_values(codes: torch.Tensor, config: CodecConfig) -> torch.Tensor:
    """Return fp32 values of uint8 codes."""
    if config.format == "fp8-e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if config.format == "fp8-e5m2":
        return codes.view(torch.float8_e5m2).float()
    values = integer_values(codes, config.bits)
    if config.bend:
        values = quadratic_values(values, config.bend)
    return values


def to_bf16(x: torch.Tensor, rounding: int = UP) -> torch.Tensor:
    """Return the smallest bf16 that is not below x (UP), or the NEAREST one; x is fp32, finite and
    >= 0."""
    return ((x.view(torch.int32) + rounding) >> 16 << 16).view(torch.float32).bfloat16()


def signed_step(
    h: torch.Tensor, amax: torch.Tensor, bad: torch.Tensor, config: CodecConfig
) -> torch.Tensor:
    """Return the bf16[groups] step of signed scales, negative where the far extreme is positive.

    Args:
        h: fp32[groups, G].
        amax: fp32[groups], their largest magnitudes, with a floor.
        bad: bool[groups], which groups are not finite.
        config: of the codec.
    """
    high = h.amax(dim=1)
    low = (-h).amax(dim=1)
    near = torch.minimum(high, low).masked_fill(bad, 0.0)
    if config.bend:
        far_end, near_end = quadratic_ends(config.bits, config.bend)
        step = to_bf16(torch.maximum(amax * (1 / far_end), near * (1 / near_end)), NEAREST)
    else:
        qmax = amax.new_tensor(config.qmax)
        step = to_bf16(torch.maximum(amax * 2.0 ** (1 - config.bits), near / qmax))
    return torch.where(high > low, -step, step)


def dual_scales(
    h: torch.Tensor, amax: torch.Tensor, bad: torch.Tensor, config: CodecConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s and alpha of TACO (arXiv 2604.24088), fp32[groups] each.

    Args:
        h: fp32[groups, G].
        amax: fp32[groups], their largest magnitudes, with a floor.
        bad: bool[groups], which groups are not finite.
        config: of the codec.
    """
    if config.hadamard:
        mean_square = (h * h).sum(dim=1)  # of x: Parseval
    else:
        mean_square = (h * h).mean(dim=1)
    mean_square = mean_square.masked_fill(bad, 0.0)
    qmax = amax.new_tensor(config.qmax)
    alpha = (qmax / torch.sqrt(mean_square + EPSILON)).clamp(ALPHA_MIN, ALPHA_MAX)
    s = (alpha * amax * (root(config) / config.qmax)).clamp(min=S_MIN)
    return s, alpha


def encode_groups(h: torch.Tensor, config: CodecConfig, chunks: int = 1) -> torch.Tensor:
    """Return the wires of equal chunks, without lists of outliers: uint8[chunks, bytes].

    Args:
        h: fp32[chunks * groups, G], in the Hadamard domain.
        config: of the codec.
        chunks: how many there are.
    """
    amax = h.abs().amax(dim=1)
    zero = amax == 0
    bad = ~torch.isfinite(h).all(dim=1)
    amax = amax.masked_fill(bad, 0.0).clamp(min=amax_floor(config))
    # A tensor: torch divides by and into numbers with a reciprocal.
    qmax = amax.new_tensor(config.qmax)
    if config.scales == "signed":
        step = signed_step(h, amax, bad, config)
        inverse = step.float().reciprocal()
        scales = [step]
    elif config.scales == "single":
        step = to_bf16(amax / qmax)
        inverse = step.float().reciprocal()
        scales = [step]
    else:
        inverse = qmax / amax
        scales = list(dual_scales(h, amax, bad, config))
    scales[0] = scales[0].masked_fill(zero, 0.0).masked_fill(bad, math.nan)
    codes = round_to_grid(h, inverse.masked_fill(bad, 0.0)[:, None], config)
    # The order of the wire: planes of codes, then s (or the step), then alpha.
    sections = [*pack(codes, config.planes), *scales]
    parts = [section.reshape(chunks, -1).view(torch.uint8) for section in sections]
    wires = torch.cat(parts, dim=1)
    return torch.nn.functional.pad(wires, (0, -wires.shape[1] % ALIGNMENT))


def decode_groups(
    wires: torch.Tensor, groups: int, config: CodecConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return code values fp32[chunks * groups, G] and steps fp32[chunks * groups, 1].

    A group's values are its code values times its step, before the transform is undone. With scales
    "dual" the step is made of two numbers that are sent, s and alpha; otherwise it is sent itself.

    Args:
        wires: uint8[chunks, bytes].
        groups: of each chunk.
        config: of the codec.
    """
    plane_bytes = [groups * config.group_size * bits // 8 for bits in config.planes]
    if config.scales == "dual":
        dtype = torch.float32
        scale_bytes = [4 * groups, 4 * groups]
    else:
        dtype = torch.bfloat16
        scale_bytes = [2 * groups]
    # Behind the groups' bytes there may be lists of outliers, and padding.
    used = wires[:, : groups * config.bytes_per_group()]
    sections = used.split(plane_bytes + scale_bytes, dim=1)
    rows = len(wires) * groups
    planes = [section.reshape(rows, -1) for section in sections[: len(plane_bytes)]]
    q = code_values(unpack(planes, config.planes), config)
    # Contiguous and cloned: a slice may be misaligned.
    scales = [
        section.clone(memory_format=torch.contiguous_format).view(dtype).view(-1)
        for section in sections[len(plane_bytes) :]
    ]
    if config.scales == "dual":
        s, alpha = scales
        step = s * (1.0 / root(config)) / alpha
    else:
        step = scales[0].float()
    return q, step[:, None]


def to_groups(x: torch.Tensor, config: CodecConfig, chunks: int) -> torch.Tensor:
    """Return fp32[chunks, groups, G] of x.

    Args:
        x: of any shape and stride, in row-major order; zeros fill the last groups.
        config: of the codec.
        chunks: equal pieces of x.
    """
    chunk = config.chunk_numel(x.numel(), chunks)
    flat = torch.zeros(chunks * chunk, dtype=torch.float32, device=x.device)
    flat[: x.numel()] = x.reshape(-1)
    return flat.view(chunks, chunk // config.group_size, config.group_size)


def lists_of(wire: torch.Tensor, groups: int, config: CodecConfig) -> torch.Tensor:
    """Return the lists of outliers of one chunk's wire, int32[blocks, outliers.SLOTS].

    Args:
        wire: uint8[bytes].
        groups: of the chunk.
        config: of the codec, with outliers.
    """
    lists = wire[config.lists_at(groups * config.group_size) :]
    return lists.clone().view(torch.int32).view(-1, outliers.SLOTS)


def encode(
    x: torch.Tensor, config: CodecConfig, chunks: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Encode a tensor as equal pieces of its row-major order, zero padded at the end.

    Args:
        x: of any shape and stride, bf16, fp16 or fp32.
        config: of the codec.
        chunks: pieces, each a row of the result.
        out: contiguous memory for the result; None: a new tensor.

    Returns:
        uint8[chunks, wire_bytes(C)], C = config.chunk_numel(x.numel(), chunks).
    """
    groups = to_groups(x, config, chunks)
    if not x.numel():
        return torch.empty(chunks, 0, dtype=torch.uint8, device=x.device)
    lists = []
    if config.outliers:
        for c in range(chunks):  # blocks of lists begin anew with each chunk
            words, groups[c] = outliers.split(groups[c])
            lists.append(words.view(torch.uint8).view(-1))
    h = groups.flatten(0, 1)
    if config.hadamard:
        h = hadamard(h / config.group_size)  # of the mean
    wires = encode_groups(h, config, chunks)
    if lists:
        wires = torch.cat([wires, torch.stack(lists)], dim=1)
    return wires if out is None else out.copy_(wires)


def values_of(wires: torch.Tensor, groups: int, config: CodecConfig) -> torch.Tensor:
    """Return fp32[chunks, groups, G]: values of chunks, without what lists of outliers add.

    Args:
        wires: uint8[chunks, bytes].
        groups: of each chunk.
        config: of the codec.
    """
    q, step = decode_groups(wires, groups, config)
    if config.hadamard:
        q = hadamard(q)
    return (q * step).view(len(wires), groups, -1)


def _returned(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return the result, in ``out`` if that was passed."""
    if out is None:
        return result
    return out.copy_(result)


def decode(
    wires: torch.Tensor,
    config: CodecConfig,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode what ``encode`` gave with chunks = wires.shape[0].

    Args:
        wires: uint8[chunks, wire_bytes].
        config: of the codec.
        shape: of the tensor.
        dtype: of the tensor: bf16, fp16 or fp32.
        out: gets the result, if passed; of ``shape``.

    Raises:
        ValueError: the wires are not those of a tensor of this shape.
    """
    # Without a row there are no values; the check needs some number of chunks.
    numel = math.prod(shape)
    chunk = config.chunk_numel(numel, max(wires.shape[0], 1))
    check_wires(wires.shape, wires.dtype, config, chunk)
    chunks = len(wires)
    groups = chunk // config.group_size
    flat = torch.empty(0, dtype=torch.float32, device=wires.device)
    if chunks * chunk:
        values = values_of(wires, groups, config)
        if config.outliers:
            with_lists = [
                outliers.add(row, lists_of(wire, groups, config))
                for row, wire in zip(values, wires, strict=True)
            ]
            values = torch.stack(with_lists)
        flat = values.reshape(-1)
    return _returned(flat[:numel].view(shape).to(dtype), out)


def sum_groups(wires: torch.Tensor, numel: int, config: CodecConfig) -> torch.Tensor:
    """Return the sum over w of q_w * step_w in order 0..W-1: fp32[groups, G] in the Hadamard
    domain.

    Each step is a fused multiply-add: one rounding to fp32. float64 stands in for it here (the
    product of two fp32 numbers is exact in it); twice rounded is once rounded but in about one case
    of 2^29.

    Args:
        wires: uint8[W, bytes], a row a sender.
        numel: values of each.
        config: of the codec.
    """
    groups = config.chunk_numel(numel) // config.group_size
    total = 0.0
    for wire in wires:
        q, step = decode_groups(wire[None], groups, config)
        total = (q.double() * step.double() + total).float()
    return total


def decode_sum(
    wires: torch.Tensor,
    config: CodecConfig,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the same chunk of W senders, in fp32 and in their order; one inverse WHT at the end.

    Of two senders each is transformed by itself: codes are exact in the transform, sums are not.

    Args:
        wires: uint8[W, wire_bytes(numel)], a row a sender.
        config: of the codec.
        shape: of the chunk, numel values.
        dtype: of the sum: bf16, fp16 or fp32.
        out: gets the result, if passed; of ``shape``.

    Raises:
        ValueError: the wires are not those of a chunk of this shape.
    """
    numel = math.prod(shape)
    check_wires(wires.shape, wires.dtype, config, config.chunk_numel(numel))
    if numel == 0:
        return _returned(torch.empty(shape, dtype=dtype, device=wires.device), out)
    if len(wires) == 2:
        first, second = values_of(wires, config.chunk_numel(numel) // config.group_size, config)
        total = first + second
    else:
        total = sum_groups(wires, numel, config)
        if config.hadamard:
            total = hadamard(total)
    if config.outliers:
        for wire in wires:
            total = outliers.add(total, lists_of(wire, len(total), config))
    return _returned(total.reshape(-1)[:numel].view(shape).to(dtype), out)


def decode_sum_encode(
    wires: torch.Tensor, config: CodecConfig, numel: int, config_out: CodecConfig | None = None
) -> torch.Tensor:
    """Encode the sum of W senders without leaving the Hadamard domain: the middle of a two-shot
    all-reduce.

    It is encode(decode_sum(wires)) but for the rounding of the two transforms that it leaves out.

    Args:
        wires: uint8[W, wire_bytes(numel)], a row a sender.
        config: of the senders' wires.
        numel: values of each.
        config_out: of the sum's wire, if that is not ``config``; the groups must be the same.

    Returns:
        uint8[wire_bytes(numel)] of ``config_out``.

    Raises:
        ValueError: the wires do not fit, or the configs' groups differ.
    """
    config_out = config_out or config
    check_same_groups(config, config_out)
    check_wires(wires.shape, wires.dtype, config, config.chunk_numel(numel))
    if not numel:
        return torch.empty(0, dtype=torch.uint8, device=wires.device)
    total = sum_groups(wires, numel, config)
    if not config.outliers:
        return encode_groups(total, config_out)[0]
    lists = [lists_of(wire, len(total), config) for wire in wires]
    words, total = outliers.sum_lists(lists, total, config.hadamard)
    wire = encode_groups(total, config_out)[0]
    return torch.cat([wire, words.view(torch.uint8).view(-1)])
