"""No compression: the values themselves, as bytes. The control that tests everything around a
codec."""

import math
from dataclasses import dataclass

import torch

from megatron.compression.codecs.base import Codec, Shape, contiguous_rows
from megatron.compression.codecs.registry import register_codec


@register_codec("identity")
@dataclass(frozen=True)
class IdentityCodec(Codec):
    """Sends fp32 values: exact for bf16, fp16 and fp32, and sums without an intermediate
    rounding."""

    def payload_bytes(self, shape: Shape) -> int:
        """Return four bytes a value."""
        return 4 * math.prod(shape)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return contiguous_rows(x.float()).view(torch.uint8)

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return payloads.reshape(-1).view(torch.float32).reshape(len(payloads), *shape).to(dtype)

    def encode_difference(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Return the new values: a difference of bf16 values need not be exact in fp32."""
        return self.encode(new[None])[0]

    def add_decoded(self, payloads: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Put the new values in the place of the old ones."""
        return self.decode_into(payloads, weights.shape[1:], weights.dtype, weights)
