"""Comparing two wires of the same tensor, and kernels with the reference."""

from typing import NamedTuple

import torch

from taco_kernels.tah_quant import reference
from taco_kernels.tah_quant.reference import TahConfig, layout_of
from tests.kernels.wires.taco import largest


class Difference(NamedTuple):
    """How far two wires differ."""

    widths: int
    """Tiles that are high in only one of the two."""
    pivots: int
    """Tiles that are transformed in only one of the two, or by another pivot."""
    scales: float
    """Return the largest difference of steps or zeros, in steps of the tile.

    It is infinite where only one of the two is finite.
    """
    codes: float
    """Share of codes that differ, in tiles of equal widths and pivots."""
    cells: float
    """Largest difference of such codes, in cells of their tile."""
    padding: bool
    """Whether the zeros between sections are equal."""


def high_tiles(wire: torch.Tensor, layout) -> torch.Tensor:
    """bool: tiles whose codes are of the larger width."""
    if not layout.config.extra_bits:
        return torch.zeros(1, 1, dtype=torch.bool)
    return reference.slots_on(wire, layout) < layout.high_tiles


def difference(
    a: torch.Tensor, b: torch.Tensor, config: TahConfig, shape: tuple[int, ...]
) -> Difference:
    """Compare two wires; values are compared without the inverse transform.

    Args:
        a: wire.
        b: wire.
        config: of both.
        shape: of the tensor.
    """
    layout = layout_of(config, shape)
    steps_a, zeros_a = reference.scales_of(a, layout)
    steps_b, zeros_b = reference.scales_of(b, layout)
    finite_a = (steps_a + zeros_a).isfinite()
    finite_b = (steps_b + zeros_b).isfinite()
    unit = steps_a.clamp(min=2.0**-24)
    scales = torch.maximum((steps_a - steps_b).abs(), (zeros_a - zeros_b).abs()) / unit
    only_one_finite = torch.where(finite_a == finite_b, 0.0, torch.inf)
    scales = torch.where(finite_a & finite_b, scales, only_one_finite)

    same_pivots = reference.section(a, "pivots", layout) == reference.section(b, "pivots", layout)
    codes_a, low_a = reference.code_values(a, layout)
    codes_b, low_b = reference.code_values(b, layout)
    comparable = finite_a & finite_b & same_pivots & (low_a == low_b)
    # A code of a low tile is a cell as wide as 2^extra_bits of a high one.
    cell = torch.where(low_a, 2.0**config.extra_bits, 1.0)
    cells = (codes_a - codes_b).abs()[comparable] / cell[comparable, None]
    return Difference(
        widths=int((high_tiles(a, layout) != high_tiles(b, layout)).sum()),
        pivots=int((~same_pivots).sum()),
        scales=float(scales.max()),
        codes=int((cells > 0).sum()) / max(cells.numel(), 1),
        cells=largest(cells),
        padding=all(torch.equal(a[start:end], b[start:end]) for start, end in _gaps(layout)),
    )


def _gaps(layout) -> list[tuple[int, int]]:
    """First and last byte of the zeros behind each section."""
    starts = [begin for begin, _ in layout.sections.values()]
    ends = [begin + size for begin, size in layout.sections.values()]
    return list(zip(ends, [*starts[1:], layout.wire_bytes], strict=True))


def tokens(
    shape: tuple[int, ...], dtype: torch.dtype, special: float | None = torch.nan, seed: int = 1
) -> torch.Tensor:
    """Tokens of different scales with outliers and, unless it is None, one value ``special``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.randn(shape[:-1], generator=generator)[..., None].exp()
    x.view(-1)[5::192] *= 40
    if special is not None:
        x.view(-1)[3:4] = special
    return x.to(dtype)


def check_kernels(kernels, x: torch.Tensor, config: TahConfig, device: str = "cpu") -> None:
    """Compare encode and decode with the reference.

    Choices of widths and pivots are equal; codes differ only where sums in another order meet the
    middle of two.

    Args:
        kernels: module with both functions.
        x: the tensor, on the host.
        config: of the codec.
        device: that the kernels run on.
    """
    layout = layout_of(config, tuple(x.shape))
    exact = reference.encode(x, config)
    wire = kernels.encode(x.to(device), config).cpu()
    apart = difference(exact, wire, config, x.shape)
    case = (config, x.shape, apart)
    swaps = 0
    if device != "cpu":  # entropies closer than fp32 tells apart
        swaps = 2 + layout.units // 2000
    assert apart.widths <= swaps * layout.tiles_per_unit, case
    assert apart.pivots == 0 and apart.padding, case
    assert apart.scales <= 0.05 and apart.codes <= 0.002 and apart.cells <= 1, case
    for dtype in {torch.float32, x.dtype}:
        result = kernels.decode(exact.to(device), config, x.shape, dtype).cpu()
        expected = reference.decode(exact, config, x.shape, dtype)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
