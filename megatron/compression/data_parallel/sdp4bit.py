"""SDP4Bit's codecs (arXiv 2410.15526) over ``taco_kernels.sdp4bit``: Triton on CUDA, torch elsewhere."""

import torch

from taco_kernels import sdp4bit
from taco_kernels.sdp4bit import GroupFormat


def describe(format: GroupFormat) -> str:
    """For names in the log."""
    return f"int{format.bits} group {format.group_size}{' Hadamard' if format.hadamard else ''}"


class GroupGradientCodec:
    """A ``GradientCodec``: group-quantised integers, rotated where the format says so.

    Sums stay in the rotated domain until the last one.
    """

    def __init__(self, format: GroupFormat) -> None:
        self.format = format
        self.name = describe(format)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """See ``GradientCodec.encode``."""
        return sdp4bit.quantize(x, self.format)

    def decode(self, wires: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """See ``GradientCodec.decode``."""
        return sdp4bit.sum_dequantize(wires[None], self.format, out, scale)

    def decode_sum(self, wires: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """See ``GradientCodec.decode_sum``."""
        return sdp4bit.sum_dequantize(wires, self.format, out, scale)

    def decode_sum_encode(self, wires: torch.Tensor, numel: int, codec: "GroupGradientCodec") -> torch.Tensor:
        """See ``GradientCodec.decode_sum_encode``."""
        return sdp4bit.sum_requantize(wires, self.format, numel, codec.format)


class DifferenceWeightCodec:
    """A ``WeightCodec``: the difference to the current weights, group-quantised.

    What is lost is still in the next difference: the masters keep every bit of it.
    """

    def __init__(self, format: GroupFormat) -> None:
        self.format = format
        self.name = f"differences {describe(format)}"

    def encode(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """See ``WeightCodec.encode``."""
        return sdp4bit.quantize_difference(new, old, self.format)[0]

    def apply(self, wires: torch.Tensor, weights: torch.Tensor) -> None:
        """See ``WeightCodec.apply``."""
        sdp4bit.add_dequantized(wires, self.format, weights)


class PlainWeightCodec:
    """A ``WeightCodec`` without difference coding: the weights themselves, group-quantised. The control."""

    def __init__(self, format: GroupFormat) -> None:
        self.format = format
        self.name = f"weights {describe(format)}"

    def encode(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """See ``WeightCodec.encode``."""
        return sdp4bit.quantize(new, self.format)[0]

    def apply(self, wires: torch.Tensor, weights: torch.Tensor) -> None:
        """See ``WeightCodec.apply``."""
        sdp4bit.sum_dequantize(wires[None], self.format, weights)


class ErrorStore:
    """How ``--dp-error-feedback int8`` keeps values: int8 in groups of 128, never rotated."""

    format = GroupFormat(8, 128)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """See ``ValueStore.encode``."""
        return sdp4bit.quantize(x, self.format)

    def decode(self, wires: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See ``ValueStore.decode``."""
        return sdp4bit.sum_dequantize(wires[None], self.format, out)
