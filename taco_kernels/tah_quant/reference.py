"""TAH-Quant in plain torch: the definition that the kernels are tested against.

Source: TAH-Quant (arXiv 2506.01352). All arithmetic is fp32. A tile x of T values whose largest
magnitude, in element p, is at least twice the second has its elements i and i ^ p change places,
which makes the largest one element 0 (the paper exchanges 0 and p alone), and is multiplied by the
orthonormal Hadamard matrix (Sylvester order: row 0 is constant, so the outlier becomes an offset;
exchanging all pairs only flips the signs of what the matrix gives, those of outputs j where p & j
has odd parity). Then

    zero = fp16(min y) rounded down        step = fp16((max y - zero) / (2^h - 1)) rounded up
    q    = floor((y - zero) / step + 1/2)  y'   = zero + step * q

with h = ``high_bits``; rounding that way keeps every value inside the grid: |y - y'| <= step / 2. A low tile
drops the d = h - l last bits of its codes, y' = zero + step * ((q >> d) * 2^d + (2^d - 1) / 2):
cells of 2^d steps, decoded at their centres. That is an l-bit grid (0.87 of the squared error of
one whose end points are the minimum and the maximum, at 3 of 4 bits), and it needs no second pass
when widths are known.

Entropy of a unit: H = -sum p log2 p with p = |x| / sum|x|, from S = sum|x| and L = sum|x| log2|x| as
log2(S) - L / S. Units of larger entropy are high; of equal ones the first. A tile with a NaN, an
infinity or values whose sum passes 2^100 has the step NaN and decodes to NaN. Elsewhere a minimum
of y below -65504, the end of fp16's range, makes the zero infinite, and max y - zero above 65504
(2^h - 1) the step; such a tile decodes to values that are not finite. Large values alone do not:
the zero is at most 65504, and while the step fits, all of the above holds.

A tensor [.., samples, channels] is tokens x samples rows of ``channels`` values; a row is split
into tiles of ``tile_size`` consecutive channels, the last one zero padded. The wire, whose size
follows from the settings and the shape alone, is these sections, each padded to a multiple of 16
bytes::

    base planes | extra plane | scales | pivots uint8 | widths

Base planes hold ``low_bits`` of every code, the extra plane the other ``high_bits - low_bits`` of
those of high tiles, in the order of their slots. A plane holds ``b`` bits of every code: 16 codes
fill ``2b`` bytes, byte ``j`` of them carrying elements ``j, j + 2b, ...``, the first in the low
bits. A tile's scales are its step and its zero point, fp16. Its byte of pivots is the element that
became element 0, plus 128 if the tile was transformed. Widths are one bit a unit, set for high
ones, 32-bit words a population.

Widths are allocated to *units*, each inside a *population*: tokens inside a sample, or tiles inside
a segment of SEGMENT consecutive ones. Of every population of N, exactly floor(ratio * N) units are
high, so slots of a population start at a place that is known beforehand.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from taco_kernels.common import aligned, ceil_div, check_choice, check_tensor
from taco_kernels.common.reference import hadamard, pack, unpack

ALLOCATIONS = ("token", "tile")
"""Units of width; see TahConfig.allocation."""
SEGMENT = 256
"""Tiles among which ``allocation='tile'`` chooses."""
TILE_SIZES = (32, 64, 128)
"""Channels that can share a scale."""
LARGEST_SUM = 2.0**100
"""Tiles whose magnitudes add up to this or more count as not finite: their transform might
overflow."""
SMALLEST_SUM = 2.0**-100
"""Units whose magnitudes add up to this or less have no entropy: kernels cannot tell them from
zeros."""


@dataclass(frozen=True)
class TahConfig:
    """Everything that decides the bytes of an encoded tensor. Validated on construction
    (ValueError)."""

    tile_size: int = 64
    """Consecutive channels that share a scale and a zero point."""
    high_bits: int = 4
    """Bits of the codes of high units, 2 to 4."""
    low_bits: int = 3
    """Bits of the codes of the others, 2 to ``high_bits``."""
    high_ratio: float = 0.8
    """Share of units, those of the largest entropy, that get ``high_bits``."""
    allocation: str = "token"
    """Widths by token (the paper's first version) or by tile (its second)."""

    def __post_init__(self) -> None:
        check_choice("tile_size", self.tile_size, TILE_SIZES)
        check_choice("allocation", self.allocation, ALLOCATIONS)
        if not 2 <= self.low_bits <= self.high_bits <= 4:
            raise ValueError(
                f"low_bits={self.low_bits} and high_bits={self.high_bits} must lie between 2 and 4, "
                "the low ones not above the high ones"
            )
        if not 0 <= self.high_ratio <= 1:
            raise ValueError(f"high_ratio={self.high_ratio} must lie between 0 and 1")

    @property
    def extra_bits(self) -> int:
        """Bits that a high code has more than a low one."""
        return self.high_bits - self.low_bits

    @property
    def levels(self) -> int:
        """Largest code of a high tile."""
        return 2**self.high_bits - 1

    def high_of(self, units: int) -> int:
        """Return how many of ``units`` units are high."""
        # 0.8 * 5 in floats may be a last bit below 4.
        return math.floor(self.high_ratio * units + 1e-9)


@dataclass(frozen=True)
class TahLayout:
    """Counts and offsets for one shape, made by ``layout_of``; see the module's text."""

    config: TahConfig
    shape: tuple[int, ...]
    """Of the tensor."""
    channels: int
    """Values of a row."""
    numel: int
    """Values of the tensor."""
    rows: int
    """Tokens of all samples."""
    tiles_per_row: int
    """Tiles of a row, the last one padded."""
    tiles: int
    """Tiles of the tensor."""
    by_token: bool
    """Whether units are tokens."""
    tiles_per_unit: int
    """Tiles of a unit: those of a row, or 1."""
    units: int
    """Units of the tensor."""
    population: int
    """Units of a population: a sample's tokens, or a segment's tiles; the last segment may have
    fewer."""
    populations: int
    """Populations of the tensor: samples, or segments."""
    high_units: int
    """High units of a whole population."""
    last_high_units: int
    """High units of the last population."""
    high_tiles: int
    """High tiles of the whole tensor."""
    words: int
    """32-bit words of a population's widths."""
    base_planes: tuple[int, ...]
    """Bits of each base plane, for the low bits of the code first: 3 -> (2, 1)."""
    sections: dict[str, tuple[int, int]]
    """First byte of each section in the order of the wire, and its bytes without padding."""
    wire_bytes: int
    """Exact bytes of the wire."""


@lru_cache(maxsize=256)
def layout_of(config: TahConfig, shape: tuple[int, ...]) -> TahLayout:
    """Return the layout of a tensor of ``shape``, cached."""
    size = config.tile_size
    numel = math.prod(shape)
    channels = shape[-1] if shape else 1
    rows = 0
    if numel:
        rows = numel // channels
    per_row = ceil_div(channels, size)
    tiles = rows * per_row

    by_token = config.allocation == "token"
    population = SEGMENT
    if by_token:
        units = rows
        tiles_per_unit = per_row
        samples = shape[-2] if len(shape) >= 3 else 1
        if rows:
            population = rows // samples
    else:
        units = tiles
        tiles_per_unit = 1
    populations = ceil_div(units, population)
    full_populations = max(populations - 1, 0)
    high = config.high_of(population)
    last_high = config.high_of(units - full_populations * population)
    high_tiles = (full_populations * high + last_high) * tiles_per_unit
    words = ceil_div(population, 32)

    planes = tuple(width for width in (4, 2, 1) if config.low_bits & width)
    sizes = {f"base{i}": tiles * size * bits // 8 for i, bits in enumerate(planes)}
    sizes["extra"] = high_tiles * size * config.extra_bits // 8
    sizes["scales"] = 4 * tiles
    sizes["pivots"] = tiles
    sizes["widths"] = 0
    if config.extra_bits:
        sizes["widths"] = 4 * words * populations
    sections = {}
    end = 0
    for name, section_bytes in sizes.items():
        sections[name] = (end, section_bytes)
        end += aligned(section_bytes)
    return TahLayout(
        config=config,
        shape=tuple(shape),
        channels=channels,
        numel=numel,
        rows=rows,
        tiles_per_row=per_row,
        tiles=tiles,
        by_token=by_token,
        tiles_per_unit=tiles_per_unit,
        units=units,
        population=population,
        populations=populations,
        high_units=high,
        last_high_units=last_high,
        high_tiles=high_tiles,
        words=words,
        base_planes=planes,
        sections=sections,
        wire_bytes=end,
    )


def to_tiles(x: torch.Tensor, layout: TahLayout) -> torch.Tensor:
    """Return fp32[tiles, tile_size] of x, rows padded with zeros."""
    rows = x.reshape(layout.rows, layout.channels).float()
    missing = layout.tiles_per_row * layout.config.tile_size - layout.channels
    return torch.nn.functional.pad(rows, (0, missing)).reshape(-1, layout.config.tile_size)


def bring_forward(x: torch.Tensor, pivot: torch.Tensor) -> torch.Tensor:
    """Return each row of x [tiles, T] with element i ^ pivot as its element i.

    ``pivot`` is int64[tiles]. A second call undoes the first.
    """
    return x.gather(1, torch.arange(x.shape[1], device=x.device) ^ pivot[:, None])


def round_down_fp16(x: torch.Tensor) -> torch.Tensor:
    """Return the largest fp16 that is not above x (fp32); minus infinity below the range."""
    half = x.half()
    bits = half.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, torch.where(bits == 0, -32767, bits + 1)).to(
        torch.int16
    )
    return torch.where(half.float() > x, below, bits).view(torch.float16)


def round_up_fp16(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest fp16 that is not below x (fp32, not negative); infinity above the range."""
    half = x.half()
    rounded_down = half.float() < x
    return (half.view(torch.int16) + rounded_down.to(torch.int16)).view(torch.float16)


def transform_tiles(
    x: torch.Tensor, fits: torch.Tensor, config: TahConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, the tiles with pivot and Hadamard transform where they apply, and the bytes of
    pivots.

    y is fp32[tiles, T], the pivots uint8[tiles].

    Args:
        x: fp32[tiles, T].
        fits: bool[tiles], which tiles are finite (LARGEST_SUM).
        config: of the codec.
    """
    magnitude = x.abs()
    largest, pivot = magnitude.max(dim=1)
    second = magnitude.scatter(1, pivot[:, None], 0.0).amax(dim=1)
    # One outlier: at least twice all others. A tile of zeros has none.
    chosen = (largest >= 2 * second) & (largest > 0) & fits
    rotated = hadamard(bring_forward(x, pivot)) * (1 / math.sqrt(config.tile_size))
    y = torch.where(chosen[:, None], rotated, x)
    return y, torch.where(chosen, pivot + 128, 0).to(torch.uint8)


def entropies(total: torch.Tensor, weighted: torch.Tensor, layout: TahLayout) -> torch.Tensor:
    """Return fp32[units]: bits by which a unit's magnitudes are spread; 0 where they are zeros or
    not finite.

    Args:
        total: fp32[tiles], each tile's sum of |x|.
        weighted: fp32[tiles], each tile's sum of |x| log2|x|.
        layout: of the tensor.
    """
    total = total.view(layout.units, -1).sum(dim=1)
    weighted = weighted.view(layout.units, -1).sum(dim=1)
    meaningful = (total > SMALLEST_SUM) & (total < LARGEST_SUM)
    divisor = torch.where(meaningful, total, 1.0)
    return torch.where(meaningful, divisor.log2() - weighted / divisor, 0.0)


def choose_high(entropies: torch.Tensor, layout: TahLayout) -> torch.Tensor:
    """Return bool[populations, population]: the units of the largest entropy, of equal ones the
    first.

    ``entropies`` are fp32[units].
    """
    if layout.by_token:
        values = entropies.view(layout.population, layout.populations).t()
    else:
        missing = layout.populations * layout.population - layout.units
        values = torch.nn.functional.pad(entropies, (0, missing), value=-math.inf).view(
            -1, layout.population
        )
    # Stable, so that of equal entropies the first are high, on any device.
    order = values.sort(dim=1, descending=True, stable=True).indices
    counts = torch.full((layout.populations, 1), layout.high_units, device=values.device)
    counts[-1:] = layout.last_high_units  # a slice: assigning to one element copies from the host
    rank = torch.arange(layout.population, device=values.device)
    return torch.zeros_like(values, dtype=torch.bool).scatter(1, order, rank < counts)


def tile_slots(high: torch.Tensor, layout: TahLayout) -> torch.Tensor:
    """Return int64[tiles]: where a high tile's extra bits go, counted in tiles; ``high_tiles`` for
    the others.

    ``high`` is what ``choose_high`` gives. High units of a population take consecutive slots, in
    their order.
    """
    # Of every full population the same number is high, so its slots begin at a known one.
    first = torch.arange(layout.populations, device=high.device)[:, None] * layout.high_units
    slots = torch.where(high, first + high.cumsum(dim=1) - 1, layout.high_tiles)
    if layout.by_token:
        slots = slots.t()  # rows are tokens, and a token's samples follow each other
    slots = slots.reshape(-1)[: layout.units]
    tiles = slots[:, None] * layout.tiles_per_unit
    tiles = tiles + torch.arange(layout.tiles_per_unit, device=high.device)
    return tiles.reshape(-1).clamp(max=layout.high_tiles)


def write_high(
    wire: torch.Tensor, plane: torch.Tensor, entropies: torch.Tensor, layout: TahLayout
) -> None:
    """Choose the high units, and write their widths and extra bits.

    Args:
        wire: gets the sections ``widths`` and ``extra``.
        plane: uint8[tiles, n], the extra bits of every tile.
        entropies: fp32[units].
        layout: of the tensor.
    """
    high = choose_high(entropies, layout)
    missing = 32 * layout.words - layout.population
    bits = torch.nn.functional.pad(high, (0, missing)).view(-1, 8)
    shifts = torch.arange(8, device=high.device)
    section(wire, "widths", layout).copy_((bits.int() << shifts).sum(dim=1))
    plane = plane.view(torch.int32)
    # Low tiles all write to one more row, which is dropped.
    compact = plane.new_empty(layout.high_tiles + 1, plane.shape[1])
    compact[tile_slots(high, layout)] = plane
    section(wire, "extra", layout).copy_(compact[:-1].view(torch.uint8).flatten())


def slots_on(wire: torch.Tensor, layout: TahLayout) -> torch.Tensor:
    """Return ``tile_slots`` by the widths on the wire.

    Unit i of a population is bit i % 8 of its byte i // 8.
    """
    widths = section(wire, "widths", layout)
    bits = widths[:, None] >> torch.arange(8, device=widths.device).to(torch.uint8) & 1
    high = bits.view(layout.populations, -1)[:, : layout.population].bool()
    return tile_slots(high, layout)


def section(wire: torch.Tensor, name: str, layout: TahLayout) -> torch.Tensor:
    """Return a view of a section of the wire, uint8.

    Args:
        wire: uint8[wire_bytes].
        name: one of layout.sections.
        layout: of the tensor.
    """
    return wire.narrow(0, *layout.sections[name])


def scales_of(wire: torch.Tensor, layout: TahLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return steps and zero points, fp32[tiles] each."""
    pairs = section(wire, "scales", layout).clone().view(torch.float16).float()
    return pairs[::2], pairs[1::2]


def encode(x: torch.Tensor, config: TahConfig) -> torch.Tensor:
    """Return the wire of a tensor, uint8[layout_of(config, x.shape).wire_bytes].

    x has any shape and stride, and is bf16, fp16 or fp32.
    """
    layout = layout_of(config, tuple(x.shape))
    wire = torch.zeros(layout.wire_bytes, dtype=torch.uint8, device=x.device)
    if not layout.numel:
        return wire
    tiles = to_tiles(x, layout)
    fits = tiles.abs().sum(dim=1) < LARGEST_SUM
    y, pivots = transform_tiles(tiles, fits, config)
    section(wire, "pivots", layout).copy_(pivots)
    low, high = y.aminmax(dim=1)
    zeros = round_down_fp16(low.masked_fill(~fits, 0.0))
    # A tensor: torch divides by numbers with a reciprocal.
    levels = torch.full((), config.levels, dtype=torch.float32, device=x.device)
    steps = round_up_fp16((high.masked_fill(~fits, 0.0) - zeros.float()).clamp(min=0) / levels)
    steps = steps.masked_fill(~fits, math.nan)
    section(wire, "scales", layout).copy_(
        torch.stack((steps, zeros), dim=1).view(torch.uint8).flatten()
    )
    inverse = torch.where(steps > 0, steps.float().reciprocal(), 0.0)
    # Rounded once, to the integer: a fused multiply-add, exact in fp64.
    above_zero = y - zeros.float()[:, None]
    codes = (above_zero.double() * inverse.double()[:, None] + 0.5).floor()
    codes = codes.nan_to_num(nan=0.0).clamp(0, config.levels).to(torch.uint8)
    # All tiles' upper bits go to the base planes; the others only of high tiles, below.
    base = pack(codes >> config.extra_bits, layout.base_planes)
    for i, plane in enumerate(base):
        section(wire, f"base{i}", layout).copy_(plane.flatten())
    if config.extra_bits:
        magnitude = tiles.abs()
        logarithm = torch.where(magnitude > 0, magnitude, 1.0).log2()
        sums = magnitude.sum(dim=1), (magnitude * logarithm).sum(dim=1)
        (plane,) = pack(codes & (2**config.extra_bits - 1), (config.extra_bits,))
        write_high(wire, plane, entropies(*sums, layout), layout)
    return wire


def code_values(wire: torch.Tensor, layout: TahLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes fp32[tiles, T], those of low tiles with zeros for the dropped bits; and which
    are low, bool.

    ``wire`` is uint8[wire_bytes].
    """
    size = layout.config.tile_size
    extra_bits = layout.config.extra_bits

    def planes(names: Sequence[str], widths: Sequence[int]) -> torch.Tensor:
        """Return the codes of some sections, each a plane of so many bits."""
        parts = [section(wire, name, layout) for name in names]
        tiles = [part.view(-1, size * bits // 8) for part, bits in zip(parts, widths, strict=True)]
        return unpack(tiles, widths).float()

    codes = planes([f"base{i}" for i in range(len(layout.base_planes))], layout.base_planes)
    if not extra_bits:
        return codes, torch.zeros(layout.tiles, dtype=torch.bool, device=wire.device)
    slots = slots_on(wire, layout)
    extra = codes.new_zeros(layout.high_tiles + 1, size)
    if layout.high_tiles:
        extra[:-1] = planes(["extra"], (extra_bits,))
    return codes * 2**extra_bits + extra[slots], slots == layout.high_tiles


def decode(
    wire: torch.Tensor, config: TahConfig, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Decode what ``encode`` gave.

    Args:
        wire: uint8[wire_bytes].
        config: of the codec.
        shape: of the tensor.
        dtype: of the tensor: bf16, fp16 or fp32.

    Raises:
        ValueError: the wire is not of the size that the settings and the shape demand.
    """
    layout = layout_of(config, tuple(shape))
    check_tensor("wire", wire, torch.uint8, (layout.wire_bytes,))
    if not layout.numel:
        return torch.empty(tuple(shape), dtype=dtype, device=wire.device)
    size = config.tile_size
    codes, low = code_values(wire, layout)
    steps, zeros = scales_of(wire, layout)
    # Without its extra bits a code stands for the middle of its cell.
    zeros = torch.where(low, zeros + steps * ((2**config.extra_bits - 1) / 2), zeros)
    y = zeros[:, None] + steps[:, None] * codes
    pivots = section(wire, "pivots", layout)
    # The transform of codes is exact; that of a constant, the zero point, is all in element 0.
    rotated = hadamard(codes) * (steps * (1 / math.sqrt(size)))[:, None]
    rotated[:, 0] += zeros * math.sqrt(size)
    exchanged = bring_forward(rotated, (pivots & 127).long())
    y = torch.where((pivots >= 128)[:, None], exchanged, y)
    rows = y.view(layout.rows, -1)[:, : layout.channels]
    return rows.reshape(tuple(shape)).to(dtype)
