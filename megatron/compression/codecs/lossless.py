"""Lossless: exponents in fewer bits, every bit comes back.

Whether values fit depends on them, and payloads have a size that is agreed beforehand: that which
trained tensors need, with some room. A payload whose values did not fit overflows: its flag says so
and it decodes to zeros. communication/overflow.py has what is sent then.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron.compression.codecs.base import Codec, Shape
from megatron.compression.codecs.registry import register_codec
from taco_kernels import lossless
from taco_kernels.lossless import LosslessLayout


@register_codec("lossless")
@dataclass(frozen=True)
class LosslessCodec(Codec):
    """Every bit of bf16 and fp32 comes back: exponents in 3 bits, 11.4 bits a value of bf16, 27.4
    of fp32."""

    escapes: float = 0.07
    """Share of values, in (0, 1], that there is room for outside the window of seven exponents
    (half a byte each). Messages that have more overflow."""

    def __post_init__(self) -> None:
        # It refuses impossible shares of escapes.
        _ = self._layout((1,), torch.bfloat16)

    lossless: ClassVar[bool] = True

    @property
    def block(self) -> int:
        return lossless.BLOCK

    def payload_bytes(self, shape: Shape) -> int:
        """Return the bytes of a row of bf16; ``message_bytes`` has other dtypes."""
        return self.message_bytes(shape, torch.bfloat16)

    def message_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return self._layout(shape, dtype).payload_bytes

    def overflow_flag(self, payloads: torch.Tensor) -> torch.Tensor:
        # The kernel notes an overflow of any row of a call in the first payload.
        return payloads.view(-1)[lossless.FLAG_AT]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return lossless.encode(x.reshape(len(x), -1), self._layout(x.shape[1:], x.dtype))

    def encode_grid(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Codec.encode_grid``; one call, so that there is one overflow flag."""
        return self.encode(x.flatten(0, 1)).view(*x.shape[:2], -1)

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return lossless.decode(payloads, self._layout(shape, dtype)).view(len(payloads), *shape)

    def sum_into(
        self,
        payloads: torch.Tensor,
        shape: Shape,
        dtype: torch.dtype,
        scale: float,
        rows: torch.Tensor,
    ) -> None:
        """Write the scaled sum into memory.

        Args:
            payloads: uint8 ``[senders, rows, bytes]``.
            shape: one row's.
            dtype: the dtype that was encoded, which decides the payload's layout.
            scale: multiplies the sum.
            rows: ``[rows, n]`` of any dtype, whose rows are contiguous.
        """
        layout = self._layout(shape, dtype)
        if len(payloads) == 1 and scale == 1.0 and rows.dtype == dtype:
            lossless.decode(payloads[0], layout, rows)  # a sum may change the payload of a NaN
        else:
            lossless.decode_sum(payloads, layout, rows.dtype, scale, rows)

    def encode_difference(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Return the new values themselves, encoded: a difference would not give every bit back."""
        return self.encode(new[None])[0]

    def add_decoded(self, payloads: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Put the new values in the place of the old ones."""
        return self.decode_into(payloads, weights.shape[1:], weights.dtype, weights)

    def _layout(self, shape: Shape, dtype: torch.dtype) -> LosslessLayout:
        return lossless.layout_of(math.prod(shape), dtype, self.escapes)
