"""TAH-Quant: 3 and 4 bits by entropy, outliers rotated away (arXiv 2506.01352)."""

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.compression.codecs.base import Codec, Shape, stacked
from megatron.compression.codecs.grouped import IntCodec
from megatron.compression.codecs.registry import register_codec
from taco_kernels import tah_quant
from taco_kernels.tah_quant import TahConfig, layout_of


@register_codec("tah-quant")
@dataclass(frozen=True)
class TahQuantCodec(Codec):
    """TAH-Quant (arXiv 2506.01352): tiles of activations in 3 and 4 bits by entropy; gradients in
    6."""

    tile: int = 64
    """Consecutive channels that share a scale and a zero point: 32, 64 or 128."""

    high: int = 4
    """Bits of activations of high entropy, 2 to 4."""

    low: int = 3
    """Bits of the others, 2 to high."""

    ratio: float = 0.8
    """Share of tokens (or tiles) that get the high bits, 0 to 1."""

    allocation: str = "token"
    """What the entropy gives its bits to: token = whole tokens, inside each sequence (the paper's
    first version); tile = tiles, inside each 256 consecutive ones (its second)."""

    def __post_init__(self) -> None:
        _ = self.config

    @cached_property
    def config(self) -> TahConfig:
        """The kernels' settings."""
        return TahConfig(self.tile, self.high, self.low, self.ratio, self.allocation)

    @property
    def sees_shape(self) -> bool:
        return True

    @property
    def backward(self) -> Codec:
        """See ``Codec.backward``: plain fixed point of 6 bits, tile 32, as in the paper."""
        return IntCodec(6, group=32, scales="single", hadamard=False)

    def payload_bytes(self, shape: Shape) -> int:
        return layout_of(self.config, tuple(shape)).wire_bytes

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Codec.encode``; a row is ``[tokens, ..., channels]``."""
        return stacked([tah_quant.encode(row, self.config) for row in x])

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return stacked(
            [tah_quant.decode(row, self.config, tuple(shape), dtype) for row in payloads]
        )
