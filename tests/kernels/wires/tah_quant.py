"""Comparing two wires of the same tensor, and kernels with the reference."""

from typing import NamedTuple

import torch

from taco_kernels.tah_quant import reference
from taco_kernels.tah_quant.reference import TahConfig, layout_of


class Difference(NamedTuple):
    """How far two wires differ."""

    widths: int
    """Tiles that are high in one alone."""
    pivots: int
    """Tiles that are transformed in one alone, or by another pivot."""
    scales: float
    """Largest difference of steps or zeros, in steps of the tile; infinite where one alone is finite."""
    codes: float
    """Share of codes that differ, in tiles of like widths and pivots."""
    cells: float
    """Largest difference of such codes, in cells of their tile."""
    padding: bool
    """Whether all else, the zeros between sections, is alike."""


def difference(
    a: torch.Tensor, b: torch.Tensor, config: TahConfig, shape: tuple[int, ...]
) -> Difference:
    """Compare two wires of a tensor of ``shape``; values are compared without the inverse transform."""
    layout = layout_of(config, shape)

    def high(wire: torch.Tensor) -> torch.Tensor:
        if not config.extra_bits:
            return torch.zeros(1, 1, dtype=torch.bool)
        return reference.slots_on(wire, layout) < layout.high_tiles

    (steps_a, zeros_a), (steps_b, zeros_b) = (
        reference.scales_of(a, layout),
        reference.scales_of(b, layout),
    )
    finite_a, finite_b = (steps_a + zeros_a).isfinite(), (steps_b + zeros_b).isfinite()
    both = finite_a & finite_b
    unit = steps_a.clamp(min=2.0**-24)
    scales = torch.maximum((steps_a - steps_b).abs(), (zeros_a - zeros_b).abs()) / unit
    scales = torch.where(both, scales, torch.where(finite_a == finite_b, 0.0, torch.inf))
    same = reference.section(a, "pivots", layout) == reference.section(b, "pivots", layout)
    widths = high(a) != high(b)
    (codes_a, low_a), (codes_b, low_b) = (
        reference.code_values(a, layout),
        reference.code_values(b, layout),
    )
    apart = (codes_a - codes_b).abs()[both & same & (low_a == low_b)]
    apart = (
        apart
        / torch.where(low_a, 2.0**config.extra_bits, 1.0)[both & same & (low_a == low_b), None]
    )
    return Difference(
        widths=int(widths.sum()),
        pivots=int((~same).sum()),
        scales=float(scales.max()),
        codes=float((apart > 0).float().mean()) if apart.numel() else 0.0,
        cells=float(apart.max()) if apart.numel() else 0.0,
        padding=all(torch.equal(a[start:end], b[start:end]) for start, end in _gaps(layout)),
    )


def _gaps(layout) -> list[tuple[int, int]]:
    """First and last byte of the zeros behind each section."""
    starts = [*(begin for begin, _ in layout.sections.values()), layout.wire_bytes]
    ends = [begin + size for begin, size in layout.sections.values()]
    return list(zip(ends, starts[1:], strict=True))


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
    """Equal choices; codes that differ only where sums in another order meet the middle of two."""
    exact, wire = reference.encode(x, config), kernels.encode(x.to(device), config).cpu()
    found, layout = difference(exact, wire, config, x.shape), layout_of(config, tuple(x.shape))
    choices = (
        0 if device == "cpu" else 2 + layout.units // 2000
    )  # entropies closer than fp32 tells apart
    assert found.widths <= choices * layout.tiles_per_unit, (config, x.shape, found)
    assert found.pivots == 0 and found.padding, (config, x.shape, found)
    assert found.scales <= 0.05 and found.codes <= 0.002 and found.cells <= 1, (
        config,
        x.shape,
        found,
    )
    for dtype in {torch.float32, x.dtype}:
        result = kernels.decode(exact.to(device), config, x.shape, dtype).cpu()
        # the interpreter cuts fp32 off to bf16 and fp16, where devices round
        rtol = 2**-7 if device == "cpu" and dtype != torch.float32 else 0.0
        expected = reference.decode(exact, config, x.shape, dtype)
        torch.testing.assert_close(result, expected, rtol=rtol, atol=0, equal_nan=True)
