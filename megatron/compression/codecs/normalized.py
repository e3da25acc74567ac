"""A message codec behind a normalisation of every channel over the message's tokens.

Early in training nearly all of what a pipeline stage sends is a mean that the tokens share; an error of a few
percent of it is larger than what tells them apart. Taking the mean off makes the error one of that part. And
the widest channel of a group sets its scale: equally wide ones all use the whole grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.compression.codecs.message import MessageCodec
from megatron.compression.codecs.taco import TacoCodec
from taco_kernels import Stream, normalized
from taco_kernels.layout import ALIGNMENT
from taco_kernels.normalized.reference import inverse


@dataclass(frozen=True)
class NormalizedMessage:
    """``inner`` applied to z = (x - mean) / rms, all over the tokens of every channel.

    The payload is that of ``inner``, then the means, bf16, and the roots of the mean squares, bf16
    (``standardize`` alone; ``center`` divides by nothing). A channel that holds a NaN, an infinity or values
    beyond 1e19 makes its part of every token NaN; where a channel's spread is below 1e-22 its mean is sent
    alone. Integers without a transform, whose groups lie inside a token, have kernels of their own
    (``taco_kernels.normalized``): one more pass over the tensor, before the encoder. For others it is
    torch's: of n bf16 values 6 n bytes read and 4 n written before the encoder (mean and variance;
    difference; quotient, in place), 2 n and 2 n behind the decoder.
    """

    inner: MessageCodec
    scale: bool = True
    """Divide by the root mean square: ``standardize``; else ``center``."""

    @property
    def name(self) -> str:
        """See ``MessageCodec.name``."""
        return f"{self.inner.name}, {'standardized' if self.scale else 'centered'} channels"

    @property
    def rounds_randomly(self) -> bool:
        """See ``MessageCodec.rounds_randomly``."""
        return self.inner.rounds_randomly

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``MessageCodec.wire_bytes``."""
        return self._start(shape) + 2 * self._statistics(shape)

    def encode(self, x: torch.Tensor, random: Stream | None = None) -> torch.Tensor:
        """See ``MessageCodec.encode``."""
        if not self._statistics(x.shape):
            return self.inner.encode(x, random)
        rows = x.reshape(-1, x.shape[-1])
        if (layout := self._layout(x.shape)) is not None:
            return normalized.encode(rows, layout, random)
        if rows.dtype == torch.float16:
            rows = rows.float()  # the wire's bf16 may lie beyond fp16's range
        variance, mean = torch.var_mean(rows, dim=0, correction=0)
        exact, mean = mean.float(), mean.bfloat16()
        variance = variance.float() + (exact - mean.float()).square()  # about the mean that is sent
        z = rows - mean.to(rows.dtype)
        statistics = [mean]
        if self.scale:
            statistics.append(variance.sqrt().bfloat16())
            z.mul_(inverse(statistics[1]).to(rows.dtype))
        wire = torch.zeros(self.wire_bytes(x.shape), dtype=torch.uint8, device=x.device)
        payload = self.inner.encode(z.view(x.shape), random)
        wire[: payload.numel()] = payload
        wire[self._start(x.shape) :] = torch.cat(statistics).view(torch.uint8)
        return wire

    def decode(
        self, wire: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, random: Stream | None = None
    ) -> torch.Tensor:
        """See ``MessageCodec.decode``."""
        if not self._statistics(shape):
            return self.inner.decode(wire, shape, dtype, random)
        if (layout := self._layout(shape)) is not None:
            return normalized.decode(wire, layout, dtype, random).view(*shape)
        start, work = self._start(shape), torch.float32 if dtype == torch.float16 else dtype
        statistics = wire[start:].clone().view(torch.bfloat16).view(-1, shape[-1]).to(work)
        z = self.inner.decode(wire[: self.inner.wire_bytes(shape)], shape, work, random)
        x = torch.addcmul(statistics[0], z, statistics[1]) if self.scale else z + statistics[0]
        return x.to(dtype)

    def _layout(self, shape: Sequence[int]) -> normalized.NormalizedLayout | None:
        """Where the kernels know both the codec and the shape (not empty)."""
        codec = getattr(self.inner, "codec", None)
        if not isinstance(codec, TacoCodec) or codec.config.hadamard or shape[-1] % codec.config.group_size:
            return None
        return normalized.NormalizedLayout(math.prod(shape[:-1]), shape[-1], codec.config, self.scale)

    def _statistics(self, shape: Sequence[int]) -> int:
        """How many there are: of every channel, unless the message is empty or has no dimension."""
        return (1 + self.scale) * shape[-1] if len(shape) and math.prod(shape) else 0

    def _start(self, shape: Sequence[int]) -> int:
        """First byte of the means."""
        inner = self.inner.wire_bytes(shape)
        return -(-inner // ALIGNMENT) * ALIGNMENT if self._statistics(shape) else inner
