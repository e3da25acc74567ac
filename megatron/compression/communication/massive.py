"""Massive activations in measures of error: a few values that hide what becomes of all others.

One of 1000 times its neighbours: a group that has lost the other 127 has a relative error of 0.9 %.
"""

import torch
import torch.nn.functional as F

from taco_kernels.taco.outliers import massive

GROUP = 128
SAMPLE_VALUES = 2**18
"""At most twice so many values decide a median."""


def ordinary(groups: torch.Tensor) -> torch.Tensor:
    """bool ``[..., G]``: which of fp32 or fp64 values are not massive in their group.

    All of a group whose other values are zeros: nothing is hidden there.
    """
    found = massive(groups)
    alone = (groups.masked_fill(found, 0.0) == 0).all(-1, keepdim=True)
    return ~found | alone


def squares(exact: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """fp64 ``[2, 2]``: squared error and squared signal, of all values and of the ordinary ones.

    Args:
        exact, difference: ``[n, G]``, groups in rows.
    """
    both = torch.stack([difference, exact]).square()
    return torch.stack([both, both.where(ordinary(exact), 0.0)]).sum((2, 3), dtype=torch.float64)


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """``[n, GROUP]``, zeros behind the last value."""
    flat = x.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def peak(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude over the median magnitude; infinite where more than half of the values are zeros."""
    flat = x.reshape(-1).abs()
    step = (flat.numel() // SAMPLE_VALUES) | 1  # odd: reaches every column of a row of 2^n values
    return flat.amax() / flat[::step].median()
