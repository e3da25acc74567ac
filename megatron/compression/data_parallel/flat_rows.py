"""Codecs that see a message's shape, on gradients and weights, which have none."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.compression.codecs import Codec
from megatron.compression.codecs.base import Shape

CHANNELS = 1024
"""Neighbours in a bucket that such a codec is told are the channels of one token."""


@dataclass(frozen=True)
class FlatRows(Codec):
    """``codec`` over rows of any length, as tokens of 1024 channels, zero padded."""

    codec: Codec

    @property
    def name(self) -> str:
        """The codec's."""
        return self.codec.name

    @property
    def hops(self) -> tuple[Codec, Codec]:
        first, second = self.codec.hops
        return FlatRows(first), FlatRows(second)

    def payload_bytes(self, shape: Shape) -> int:
        return self.codec.payload_bytes(self._tokens(shape))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(len(x), -1)
        flat = F.pad(flat, (0, -flat.shape[1] % CHANNELS))
        return self.codec.encode(flat.view(len(x), -1, CHANNELS))

    def decode(
        self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens = self.codec.decode(payloads, self._tokens(shape), dtype)
        values = tokens.reshape(len(payloads), -1)[:, : math.prod(shape)].reshape(-1, *shape)
        return values if out is None else out.copy_(values)

    @staticmethod
    def _tokens(shape: Shape) -> tuple[int, int]:
        return -(-math.prod(shape) // CHANNELS), CHANNELS


def flat_rows(codec: Codec) -> Codec:
    """The codec itself, or a ``FlatRows`` of one that sees shapes."""
    return FlatRows(codec) if codec.sees_shape else codec
