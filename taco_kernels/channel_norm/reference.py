"""Normalised channels in plain torch: the message and the definition that the kernels are tested
against.

A message is the codec's wire of one chunk, then the statistics::

    codec's wire | mean of every channel, bf16 | root mean square of every channel, bf16

The codec's wire is of

    z = (x - mean) * (1 / rms)

with the mean of every channel over the tokens, rounded to bf16, and rms, the root mean square of x
- mean, rounded to bf16; all in fp32. A channel that holds a NaN, an infinity or values beyond 1e19
has NaN statistics, which makes its part of every token NaN; where the spread is below 1e-22, rms
rounds to 0 and z is 0.

If the codec stores outliers separately (taco/reference.py), tokens that are outliers in a channel
do not count in its statistics: one would drown the channel of all others. They are those whose
distance from the mean of their TILE_TOKENS tokens is more than THRESHOLD times the mean distance.
Where the other tokens are equal, their spread is 0, or the rounding of their mean: such a channel
has the rms of all tokens.
"""

from dataclasses import dataclass

import torch

from taco_kernels.common import check_tensor
from taco_kernels.taco import reference as taco
from taco_kernels.taco.layout import CodecConfig
from taco_kernels.taco.outliers import THRESHOLD

TILE_TOKENS = 128
"""Tokens whose partial statistics are taken together."""
EQUAL = 2.0**-18
"""A spread of at most this share of the mean is fp32's rounding of a sum: all values are equal."""


@dataclass(frozen=True)
class ChannelNormLayout:
    """Sizes of a message ``[tokens, channels]``. Validated on construction (ValueError)."""

    tokens: int
    channels: int
    config: CodecConfig
    """Of the values, without the Hadamard transform: it would mix the channels again."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.channels < 1:
            raise ValueError(
                f"tokens={self.tokens} and channels={self.channels} must be at least 1"
            )
        if self.config.hadamard:
            raise ValueError(
                "config.hadamard is on; normalised channels are encoded without the transform"
            )
        if self.channels % self.config.group_size:
            raise ValueError(
                f"channels={self.channels} must be a multiple of "
                f"config.group_size={self.config.group_size}: a group lies inside a token"
            )

    @property
    def numel(self) -> int:
        """Values of the message."""
        return self.tokens * self.channels

    @property
    def statistics_at(self) -> int:
        """Byte where the statistics begin, a multiple of 16."""
        return self.config.wire_bytes(self.numel)

    @property
    def wire_bytes(self) -> int:
        """Exact bytes of the message."""
        return self.statistics_at + 4 * self.channels


def outlier_tokens(x: torch.Tensor) -> torch.Tensor:
    """bool ``[tokens, channels]``: the values that ``statistics`` leaves out of fp32 values."""
    outliers = []
    for tile in x.split(TILE_TOKENS):
        distance = (tile - tile.mean(0)).abs()
        outliers.append(distance > distance.mean(0) * THRESHOLD)
    return torch.cat(outliers)


def statistics(x: torch.Tensor, robust: bool = False) -> torch.Tensor:
    """bf16 ``[2, channels]`` of x ``[tokens, channels]``: means, and roots of the mean squares
    about them.

    The squares are about the means that are sent: where a mean is thousands of times the spread,
    what its rounding leaves is all that there is. ``robust``: without ``outlier_tokens``, unless
    the others are EQUAL.
    """
    x = x.float()
    if robust:
        left_out = outlier_tokens(x)
        count = (~left_out).sum(0)
        mean = x.masked_fill(left_out, 0.0).sum(0) / count
        variance = (x - mean).square().masked_fill(left_out, 0.0).sum(0) / count
    else:
        variance, mean = torch.var_mean(x, dim=0, correction=0)
    # E (x - s)^2 = E (x - m)^2 + (m - s)^2 for the mean m and any s: here the mean that is sent.
    sent_mean = mean.bfloat16()
    rms = (variance + (mean - sent_mean.float()).square()).sqrt().bfloat16()
    if robust:
        rms_of_all = (x - sent_mean.float()).square().mean(0).sqrt().bfloat16()
        is_equal = rms.float() <= EQUAL * sent_mean.float().abs()
        rms = torch.where(is_equal, rms_of_all, rms)
    return torch.stack([sent_mean, rms])


def inverse(rms: torch.Tensor) -> torch.Tensor:
    """1 / rms in fp32; 0 for a channel whose values are all equal."""
    return torch.where(rms == 0, 0.0, rms.float().reciprocal())


def encode(x: torch.Tensor, layout: ChannelNormLayout) -> torch.Tensor:
    """uint8 ``[wire_bytes]`` of x ``[tokens, channels]`` (bf16, fp16, fp32; any stride).

    Raises:
        ValueError: x is not of the layout's shape.
    """
    check_tensor("x", x, x.dtype, (layout.tokens, layout.channels))
    mean_and_rms = statistics(x, layout.config.outliers)
    mean, rms = mean_and_rms
    z = (x.float() - mean.float()) * inverse(rms)
    payload = taco.encode(z, layout.config)[0]
    return torch.cat([payload, mean_and_rms.view(torch.uint8).flatten()])


def decode(wire: torch.Tensor, layout: ChannelNormLayout, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of encode, rounded to ``dtype`` once.

    Args:
        wire: uint8 ``[wire_bytes]``.
        layout: of the message.
        dtype: of the result.

    Returns:
        ``[tokens, channels]``.

    Raises:
        ValueError: the wire is not of the layout.
    """
    check_tensor("wire", wire, torch.uint8, (layout.wire_bytes,))
    statistics_bytes = wire[
        layout.statistics_at :
    ].clone()  # at an address of its own, to be viewed
    mean, rms = statistics_bytes.view(torch.bfloat16).view(2, -1).float()
    shape = (layout.tokens, layout.channels)
    payload = wire[None, : layout.statistics_at]
    z = taco.decode(payload, layout.config, shape, torch.float32)
    return (z * rms + mean).to(dtype)
