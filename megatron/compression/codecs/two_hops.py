"""Two codecs, one for each exchange of a collective: ``int5/int6``."""

from dataclasses import dataclass

import torch

from megatron.compression.codecs.base import Codec, Shape
from megatron.compression.errors import CompressionConfigError


@dataclass(frozen=True)
class TwoHops(Codec):
    """``first`` for partial sums and single messages, ``second`` for what is sent of the sum."""

    first: Codec
    second: Codec

    def __post_init__(self) -> None:
        if self.first.lossless or self.second.lossless:
            raise CompressionConfigError(
                f"{self.name}: together with another codec, lossless keeps bits of a lossy sum; give it alone"
            )
        if self.first.sees_shape != self.second.sees_shape or self.first.block != self.second.block:
            raise CompressionConfigError(
                f"{self.name}: the two codecs cut a tensor differently; give them the same group size"
            )

    @property
    def name(self) -> str:
        return f"{self.first.name}/{self.second.name}"

    @property
    def sees_shape(self) -> bool:
        return self.first.sees_shape

    @property
    def block(self) -> int:
        return self.first.block

    @property
    def hops(self) -> tuple[Codec, Codec]:
        return self.first, self.second

    def payload_bytes(self, shape: Shape) -> int:
        return self.first.payload_bytes(shape)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first.encode(x)

    def decode(
        self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.first.decode(payloads, shape, dtype, out)
