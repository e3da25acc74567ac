"""Codecs for one message from one rank to one other: nothing is summed on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.compression.codecs.base import Codec
from taco_kernels import Stream


class MessageCodec(Protocol):
    """Turns a tensor into one contiguous uint8 payload and back.

    As pure as ``Codec``: no communication, no state, no host synchronisation, any size and stride, and what
    is not finite never becomes finite. The payload's size follows from the tensor's shape and the settings,
    so a receiver that knows the shape knows the size. ``random`` is the address of a randomly rounding
    codec's numbers, the same for both ends; others ignore it.
    """

    name: str
    """Short name for logs, with the settings that matter."""

    rounds_randomly: bool
    """Whether ``encode`` needs random numbers."""

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """Exact payload bytes of a tensor of ``shape``."""
        ...

    def encode(self, x: torch.Tensor, random: Stream | None = None) -> torch.Tensor:
        """uint8 ``[wire_bytes(x.shape)]`` of ``x`` (any shape and stride; bf16, fp16, fp32)."""
        ...

    def decode(
        self, wire: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, random: Stream | None = None
    ) -> torch.Tensor:
        """Invert ``encode``."""
        ...


@dataclass(frozen=True)
class WholeMessage:
    """A ``Codec`` applied to a message in one piece."""

    codec: Codec
    label: str | None = None
    """What logs call it; by default the codec's own name."""

    @property
    def name(self) -> str:
        """See ``MessageCodec.name``."""
        return self.label or self.codec.name

    @property
    def rounds_randomly(self) -> bool:
        """See ``MessageCodec.rounds_randomly``."""
        return self.codec.rounds_randomly

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``MessageCodec.wire_bytes``."""
        return self.codec.wire_bytes(self.codec.chunk_numel(torch.Size(shape).numel()))

    def encode(self, x: torch.Tensor, random: Stream | None = None) -> torch.Tensor:
        """See ``MessageCodec.encode``."""
        return self.codec.encode(x, 1, random)[0]

    def decode(
        self, wire: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, random: Stream | None = None
    ) -> torch.Tensor:
        """See ``MessageCodec.decode``."""
        return self.codec.decode(wire[None], shape, dtype, random)
