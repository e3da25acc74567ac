"""What a message of normalised channels travels as: a codec's wire of one chunk, then the statistics.

::

    codec's wire | mean of every channel, bf16 | root mean square of every channel, bf16
"""

from dataclasses import dataclass

import torch

from taco_kernels.taco.layout import CodecConfig

TILE_TOKENS = 128
"""Tokens whose partial statistics are found together."""


@dataclass(frozen=True)
class ChannelNormLayout:
    """Sizes of a message ``[tokens, channels]``. Validated on construction (ValueError)."""

    tokens: int
    channels: int
    config: CodecConfig
    """Of the values, without the Hadamard transform: it would mix the channels again."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.channels < 1:
            raise ValueError(f"tokens={self.tokens} and channels={self.channels} must be at least 1")
        if self.config.hadamard:
            raise ValueError("config.hadamard is on; normalised channels are encoded without the transform")
        if self.channels % self.config.group_size:
            raise ValueError(
                f"channels={self.channels} must be a multiple of config.group_size={self.config.group_size}: "
                "a group lies inside a token"
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

    def check_values(self, x: torch.Tensor) -> None:
        """Raise ValueError unless ``x`` is [tokens, channels]."""
        if tuple(x.shape) != (self.tokens, self.channels):
            raise ValueError(f"x is {list(x.shape)}; this layout needs [{self.tokens}, {self.channels}]")

    def check_wire(self, wire: torch.Tensor) -> None:
        """Raise ValueError unless ``wire`` is uint8 [wire_bytes]."""
        if tuple(wire.shape) != (self.wire_bytes,) or wire.dtype != torch.uint8:
            raise ValueError(
                f"wire is {wire.dtype}{list(wire.shape)}; this layout needs uint8[{self.wire_bytes}]"
            )
