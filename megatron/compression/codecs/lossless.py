"""Lossless: exponents in fewer bits, every bit comes back.

Which payload fits depends on the values, and sizes are agreed beforehand. So a payload has the size that
trained tensors need, with room to spare, and where the values of one message do not fit, a flag in its header
says so, its payload holds the first bytes of the tensor itself, and the others are sent behind it: together
the tensor and 16 to 31 bytes. All receivers of one exchange see the flags of all its senders, so they agree
without asking whether a second exchange follows. What it costs is that the host reads the flags when an
exchange has arrived and before it queues what follows: the device waits for a launch. Sizes that are
exchanged first would cost the same wait before every message, and a small collective. In a training step,
which can be taken again, nobody looks: what is cut decodes to zeros, and the flags are read behind the step
(repetition.py).
"""

import math
from dataclasses import dataclass

import torch

from megatron.compression.codecs.base import Codec, Shape
from megatron.compression.codecs.registry import register_codec
from taco_kernels import lossless
from taco_kernels.lossless import LosslessLayout


@register_codec("lossless")
@dataclass(frozen=True)
class LosslessCodec(Codec):
    """Every bit of bf16 and fp32 comes back: exponents in 3 bits, 11.4 bits a value of bf16, 27.4 of fp32."""

    escapes: float = 0.07
    """Share of values, in (0, 1], that there is room for outside the window of seven exponents (half a byte
    each). Messages that have more travel as they are."""

    def __post_init__(self) -> None:
        _ = self._layout((1,), torch.bfloat16)

    @property
    def lossless(self) -> bool:
        return True

    @property
    def block(self) -> int:
        return lossless.BLOCK

    def payload_bytes(self, shape: Shape) -> int:
        """Of bf16; ``message_bytes`` of another dtype."""
        return self.message_bytes(shape, torch.bfloat16)

    def message_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """See ``Codec.message_bytes``. Raises ValueError: neither bf16 nor fp32."""
        return self._layout(shape, dtype).head_bytes

    def rest_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return self._layout(shape, dtype).rest_bytes

    def cut_flags(self, payloads: torch.Tensor) -> torch.Tensor:
        return payloads[..., lossless.FLAG_AT]

    def rest(self, x: torch.Tensor) -> torch.Tensor:
        return lossless.rest(x.reshape(len(x), -1), self._layout(x.shape[1:], x.dtype))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return lossless.encode(x.reshape(len(x), -1), self._layout(x.shape[1:], x.dtype))

    def encode_grid(self, x: torch.Tensor) -> torch.Tensor:
        """As rows of one exchange, whose flags agree."""
        return self.encode(x.flatten(0, 1)).view(*x.shape[:2], -1)

    def decode(
        self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``Codec.decode``; ``dtype`` is the one that was encoded."""
        layout = self._layout(shape, dtype)
        if out is None:
            return lossless.decode(payloads, layout).view(len(payloads), *shape)
        rows = _rows_of(out)
        if rows is None:
            return out.copy_(lossless.decode(payloads, layout).view(out.shape))
        lossless.decode(payloads, layout, rows)
        return out

    def decode_sum(
        self,
        payloads: torch.Tensor,
        shape: Shape,
        dtype: torch.dtype,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Codec.decode_sum``; ``dtype`` is the one that was encoded, ``out``'s may be another."""
        layout = self._layout(shape, dtype)
        if len(payloads) == 1 and scale == 1.0 and (out is None or out.dtype == dtype):
            return self.decode(payloads[0], shape, dtype, out)  # a sum may change the payload of a NaN
        if out is None:
            return lossless.decode_sum(payloads, layout, dtype, scale).view(payloads.shape[1], *shape)
        rows = _rows_of(out)
        if rows is None:
            return out.copy_(lossless.decode_sum(payloads, layout, out.dtype, scale).view(out.shape))
        lossless.decode_sum(payloads, layout, out.dtype, scale, rows)
        return out

    def encode_difference(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """The new values themselves."""
        return self.encode(new[None])[0]

    def add_decoded(self, payloads: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The new values in place of the old ones."""
        return self.decode(payloads, weights.shape[1:], weights.dtype, weights)

    def _layout(self, shape: Shape, dtype: torch.dtype) -> LosslessLayout:
        return lossless.layout_of(math.prod(shape), dtype, self.escapes)


def _rows_of(out: torch.Tensor) -> torch.Tensor | None:
    """``out`` as ``[rows, n]`` if that is a view with contiguous rows."""
    if out.dim() == 2 and out.stride(1) == 1:
        return out
    return out.view(len(out), -1) if out.is_contiguous() else None
