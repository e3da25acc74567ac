"""A grid of integers' codes that is denser near zero, where most of a rotated group's values lie.

The codes u of ``bits`` bits stand for

    v(u) = u (|u| + 2 a + 1),   -M <= u < M,   M = 2^(bits - 1)

whose neighbours are 2 (|u| + a + 1) apart: from the middle to the ends 2.4 to 2.6 times farther. That is
companding (Bennett 1948; Panter and Dite 1951: the best density is the cube root of the values'). All v are
even integers below 2^12, so fp16 holds them and sums are exact in fp32. Midway between the values of n and
n + 1 lies (n + a + 1)^2 - a (a + 1), so the code of the nearest one is

    |u| = floor(sqrt(|v| + a (a + 1))) - a

of |v| to the nearest sixteenth: a square root then need not be exact, since its argument plus 1 / 32 is far
enough from every square. ``a`` has the least squared error for Gaussian groups of 128, whose squared error is
0.81, 0.79 and 0.79 (4, 5, 6 bits) of that of a uniform grid with a sign (layout.py), 0.87, 0.86 and 0.85 in
groups of 32.

The step has a sign, too: max(far / v(M), near / v(M - 1)) of the largest magnitudes on either side of zero,
to the nearest bf16, so that whichever decides it has a code's value, and a lone one comes back. Half a bf16
is too little for any value to lie beyond the outermost codes' cells.
"""

import torch

BEND = {"int4": 4, "int5": 9, "int6": 18}
"""``a`` by format."""
SIXTEENTHS = 2.0**19
"""fp32 with this much added is a multiple of 1 / 16."""


def values(codes: torch.Tensor, bend: int) -> torch.Tensor:
    """v of fp32 codes u."""
    return codes * (codes.abs() + (2 * bend + 1))


def nearest(v: torch.Tensor, bend: int) -> torch.Tensor:
    """Codes u, fp32, of fp32 values; infinities and NaN have none."""
    x = (v.abs() + (SIXTEENTHS + bend * (bend + 1))) - SIXTEENTHS
    return torch.copysign(x.double().sqrt().floor().float() - bend, v)


def ends(bits: int, bend: int) -> tuple[float, float]:
    """Magnitudes of the outermost values: below zero, and above."""
    half = 2 ** (bits - 1)
    return float(half * (half + 2 * bend + 1)), float((half - 1) * (half + 2 * bend))
