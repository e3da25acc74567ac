"""SDP4Bit: group-quantised integers with an fp32 step (arXiv 2410.15526)."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from megatron.compression.codecs.base import Codec, Shape
from megatron.compression.codecs.registry import register_codec
from taco_kernels import sdp4bit
from taco_kernels.sdp4bit import GroupFormat


@register_codec("sdp4bit")
@dataclass(frozen=True)
class Sdp4bitCodec(Codec):
    """SDP4Bit (arXiv 2410.15526): integers after a 32-point Hadamard transform, 8 bits inside a
    node and 4 between nodes. Sums stay in the transform's domain until the last one.
    """

    intra: int = 8
    """Bits inside a node (on one node: of all exchanges), and of the first exchange of two: 4 or
    8."""

    inter: int = 4
    """Bits between nodes, and of a collective's second exchange: 4 or 8."""

    group: int = 128
    """Values that share one fp32 step: a power of two from 64 to 4096."""

    hadamard: bool = True
    """Rotate every 32 values first, so that one outlier does not decide its group's grid."""

    def __post_init__(self) -> None:
        # Made once now, since a format checks its values.
        for hop in self.hops:
            _ = hop.format

    @cached_property
    def format(self) -> GroupFormat:
        """The kernels' settings of the first exchange."""
        return GroupFormat(self.intra, self.group, self.hadamard)

    @property
    def block(self) -> int:
        return self.group

    @property
    def hops(self) -> tuple["Sdp4bitCodec", "Sdp4bitCodec"]:
        if self.intra == self.inter:
            return self, self
        # Each hop is a codec of one width, which has a name and a payload of its own.
        return replace(self, inter=self.intra), replace(self, intra=self.inter)

    def payload_bytes(self, shape: Shape) -> int:
        return self.format.wire_bytes(math.prod(shape))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        # The kernels take rows at any distance, whose values follow each other in memory.
        if x.dim() > 2 or (x.shape[-1] > 1 and x.stride(-1) != 1):
            x = x.reshape(len(x), -1).contiguous()
        return sdp4bit.quantize(x, self.format)

    def encode_grid(self, x: torch.Tensor) -> torch.Tensor:
        return sdp4bit.quantize(x, self.format).view(*x.shape[:2], -1)

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        # The kernel decodes and adds in one pass; a single payload is a sum of one.
        return self.decode_sum(payloads[None], shape, dtype)

    def sum_into(
        self,
        payloads: torch.Tensor,
        shape: Shape,
        dtype: torch.dtype,
        scale: float,
        rows: torch.Tensor,
    ) -> None:
        """Write the scaled sum into memory, in one kernel.

        Args:
            payloads: uint8 ``[senders, rows, bytes]``.
            shape: one row's; ``rows`` has as many values.
            dtype: not asked: a payload decodes to any dtype.
            scale: multiplies the sum.
            rows: ``[rows, n]`` of any dtype, whose rows are contiguous.
        """
        sdp4bit.sum_dequantize(payloads, self.format, rows, scale)

    def decode_sum_encode(self, payloads: torch.Tensor, shape: Shape, into: Codec) -> torch.Tensor:
        # Sums stay in the transform's domain where both formats are in it, or neither is.
        if not isinstance(into, Sdp4bitCodec) or into.hadamard != self.hadamard:
            return super().decode_sum_encode(payloads, shape, into)
        return sdp4bit.sum_requantize(payloads, self.format, math.prod(shape), into.format)

    def encode_difference(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return sdp4bit.quantize_difference(new, old, self.format)[0]

    def add_decoded(self, payloads: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return sdp4bit.add_dequantized(payloads, self.format, weights)
