"""An independent float64 rendering of TACO's formulas, and inputs, for the tests of the reference codec."""

import math

import torch

from taco_kernels.taco import FORMATS, CodecConfig

QMAX = {
    "fp8-e4m3": 448.0,
    "fp8-e5m2": 57344.0,
    "int8": 127.0,
    "int6": 31.0,
    "int5": 15.0,
    "int4": 7.0,
}
BITS = {"fp8-e4m3": 8, "fp8-e5m2": 8, "int8": 8, "int6": 6, "int5": 5, "int4": 4}
PLANES = {8: [8], 6: [4, 2], 5: [4, 1], 4: [4]}
"""Bits of each plane, by the bits of a code."""
INTEGERS = [f for f in FORMATS if f.startswith("int")]


def matrix(size: int) -> torch.Tensor:
    """Return the orthonormal Hadamard matrix in Sylvester order, from its recursive definition."""
    result = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(result) < size:
        result = torch.kron(step, result)
    return result / math.sqrt(size)


def expected(
    x: torch.Tensor, config: CodecConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y / s, s and alpha of groups x[n, G] in float64 by the paper's formulas."""
    x = x.double()
    qmax = QMAX[config.format]
    alpha = (qmax / torch.sqrt((x * x).mean(1) + 1e-6)).clamp(1e-3, 1e3)
    y = alpha[:, None] * x
    if config.hadamard:
        y = y @ matrix(config.group_size).T
    s = (y.abs().amax(1) / qmax).clamp(min=1e-12)
    return y / s[:, None], s, alpha


def grid(config: CodecConfig) -> torch.Tensor:
    """Return all values of a format, ascending, float64."""
    if config.format == "fp8-e4m3":
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    elif config.format == "fp8-e5m2":
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).double()
    else:
        return torch.arange(-QMAX[config.format], QMAX[config.format] + 1, dtype=torch.float64)
    return values[values.isfinite()].unique()


def nearest_two(v: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the grid points at or below and at or above v."""
    v = v.clamp(points[0], points[-1])
    above = points[torch.searchsorted(points, v).clamp(max=len(points) - 1)]
    below = points[(torch.searchsorted(points, v, right=True) - 1).clamp(min=0)]
    return below, above


def read_wire(
    wire: torch.Tensor, config: CodecConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return code values float64[n, G], s (or step) and alpha of a wire, by the layout's description alone."""
    G = config.group_size
    bits = BITS[config.format]
    scale_bytes = 8 if config.scales == "dual" else 2
    n = wire.numel() // (G * bits // 8 + scale_bytes)
    codes = torch.zeros(n * G, dtype=torch.int64)
    start = shift = 0
    for b in PLANES[bits]:
        size = n * G * b // 8
        plane = wire[start : start + size].long()
        # 16 codes fill 2b bytes, byte j holds elements j, j + 2b, ...
        element = torch.arange(n * G)
        in_sixteen = element % 16
        byte = plane[element // 16 * (2 * b) + in_sixteen % (2 * b)]
        position = b * (in_sixteen // (2 * b))
        codes |= (byte >> position & (2**b - 1)) << shift
        start += size
        shift += b
    codes = codes.view(n, G)
    if config.format.startswith("fp8"):
        dtype = torch.float8_e4m3fn if config.format == "fp8-e4m3" else torch.float8_e5m2
        values = codes.to(torch.uint8).view(dtype).double()
    elif bits == 8:
        values = codes.to(torch.uint8).view(torch.int8).double()
    else:
        values = codes.double() - 2 ** (bits - 1)
    assert (wire[start + n * scale_bytes :] == 0).all(), "padding"
    assert wire.numel() % 16 == 0
    scales = wire[start : start + n * scale_bytes].clone()
    if config.scales != "dual":
        return values, scales.view(torch.bfloat16).double(), None
    s, alpha = scales.view(torch.float32).double().view(2, n)
    return values, s, alpha


def inputs(name: str, groups: int, group_size: int) -> torch.Tensor:
    """Return fp32[groups * group_size] of a kind: gaussian, outlier, near zero, zero, huge or channel."""
    g = torch.Generator().manual_seed(len(name))
    x = torch.randn(groups * group_size, generator=g)
    if name == "outlier":
        x[torch.rand(x.shape, generator=g) < 0.01] *= 20
    elif name == "near zero":
        x *= 1e-5
    elif name == "zero":
        x.zero_()
    elif name == "huge":
        x *= 1e30  # finite, but the squares overflow fp32
    elif name == "channel":
        x.view(groups, -1)[:, 3] *= 60
    return x
