"""Normalised channels in plain torch: the definition that the kernels are tested against.

    z = (x - mean) * (1 / rms)

mean of every channel over the tokens, rounded to bf16, and rms, the root mean square of x - mean, rounded to
bf16; all in fp32.

z goes through the codec. A channel that holds a NaN, an infinity or values beyond 1e19 has NaN statistics,
which makes its part of every token NaN; where the spread is below 1e-22, rms rounds to 0 and z is 0.

If the codec takes massive values apart (taco/outliers.py), tokens that are massive in a channel do not count
in its statistics: one would drown the channel of all others. They are those whose distance from the mean of
their TILE_TOKENS tokens is more than THRESHOLD times the mean distance.
"""

import torch

from taco_kernels.channel_norm.layout import TILE_TOKENS, ChannelNormLayout
from taco_kernels.taco import reference
from taco_kernels.taco.outliers import THRESHOLD


def massive_tokens(x: torch.Tensor) -> torch.Tensor:
    """bool ``[tokens, channels]``: what ``statistics`` leaves out of fp32 values."""
    found = []
    for tile in x.split(TILE_TOKENS):
        distance = (tile - tile.mean(0)).abs()
        found.append(distance > distance.mean(0) * THRESHOLD)
    return torch.cat(found)


def statistics(x: torch.Tensor, robust: bool = False) -> torch.Tensor:
    """bf16 ``[2, channels]`` of x ``[tokens, channels]``: means, and roots of the mean squares.

    About the means that are sent: where a mean is thousands of times the spread, what its rounding leaves is
    all that there is. ``robust``: without ``massive_tokens``.
    """
    x = x.float()
    if robust:
        left_out = massive_tokens(x)
        count = (~left_out).sum(0)
        mean = x.masked_fill(left_out, 0.0).sum(0) / count
        variance = (x - mean).square().masked_fill(left_out, 0.0).sum(0) / count
    else:
        variance, mean = torch.var_mean(x, dim=0, correction=0)
    sent = mean.bfloat16()
    return torch.stack([sent, (variance + (mean - sent.float()).square()).sqrt().bfloat16()])


def inverse(rms: torch.Tensor) -> torch.Tensor:
    """1 / rms in fp32; 0 for a channel whose values are all alike."""
    return torch.where(rms == 0, 0.0, rms.float().reciprocal())


def encode(x: torch.Tensor, layout: ChannelNormLayout) -> torch.Tensor:
    """uint8 ``[wire_bytes]`` of x ``[tokens, channels]`` (bf16, fp16, fp32; any stride).

    Raises:
        ValueError: x is not of the layout's shape.
    """
    layout.check_values(x)
    found = statistics(x, layout.config.outliers)
    z = (x.float() - found[0].float()) * inverse(found[1])
    payload = reference.encode(z, layout.config)[0]
    return torch.cat([payload, found.view(torch.uint8).flatten()])


def decode(wire: torch.Tensor, layout: ChannelNormLayout, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of encode: ``[tokens, channels]`` in ``dtype``, rounded to it once.

    Raises:
        ValueError: wire is not uint8 ``[wire_bytes]``.
    """
    layout.check_wire(wire)
    found = wire[layout.statistics_at :].clone().view(torch.bfloat16).view(2, -1).float()
    shape = (layout.tokens, layout.channels)
    payload = wire[None, : layout.statistics_at]
    z = reference.decode(payload, layout.config, shape, torch.float32)
    return (z * found[1] + found[0]).to(dtype)
