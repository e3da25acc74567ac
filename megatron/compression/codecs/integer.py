"""Integers in groups: more accurate than FP8 for the same bits once values are rotated."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from megatron.compression.codecs.base import Codec, Shape, stacked
from megatron.compression.codecs.grouped import GroupedCodec
from megatron.compression.codecs.registry import register_codec
from taco_kernels import channel_norm
from taco_kernels.channel_norm import ChannelNormLayout
from taco_kernels.taco import CodecConfig


@register_codec("int8", bits=8)
@register_codec("int6", bits=6)
@register_codec("int5", bits=5)
@register_codec("int4", bits=4)
@dataclass(frozen=True)
class IntCodec(GroupedCodec):
    """Integers of 4 to 8 bits after a Hadamard transform, with one scale a group.

    With ``normalize`` each row is a message of tokens: every channel is centred and divided by its root mean
    square over the row's tokens first, whose statistics travel along, bf16. Early in training nearly all of
    what a pipeline stage sends is a mean that the tokens share.
    """

    bits: int
    group: int = 128
    """Values that share a scale (and a transform): 32, 64, 128 or 256."""

    scales: str = "signed"
    """single = one bf16 a group; signed = the same with a sign that says at which end the group's extreme
    lies, so that all codes are used, and in 4 to 6 bits code values that lie closer near zero: a quarter to a
    third less squared error for the same bytes."""

    hadamard: bool | None = None
    """Rotate each group first, so that one outlier does not decide its grid; by default on, and off with
    normalize."""

    normalize: Literal["none", "standardize"] = "none"
    """What is done to each channel over a message's tokens before it is encoded: standardize = subtract the
    mean and divide by the root mean square. For messages between pipeline stages."""

    outliers: bool = False
    """Values of more than 8 times their group's mean magnitude are stored separately, so that they do
    not drown their neighbours: 0.125 bits a value."""

    def __post_init__(self) -> None:
        if self.scales == "dual":
            raise ValueError("scales=dual belongs to taco; give taco:format=int8, or scales=signed")
        if self.normalize not in ("none", "standardize"):
            raise ValueError(f"normalize={self.normalize} must be none or standardize")
        if self.normalize != "none" and self.hadamard:
            raise ValueError("normalize works on channels, which the transform mixes; drop hadamard=on")
        if self.hadamard == (self.normalize == "none"):
            object.__setattr__(self, "hadamard", None)  # the default: one name for one codec
        _ = self.config

    @cached_property
    def config(self) -> CodecConfig:
        rotated = self.normalize == "none" if self.hadamard is None else self.hadamard
        return CodecConfig(f"int{self.bits}", self.group, self.scales, rotated, self.outliers)

    @property
    def sees_shape(self) -> bool:
        return self.normalize != "none"

    @property
    def backward(self) -> Codec:
        """Gradients have no mean worth the statistics."""
        return replace(self, normalize="none", hadamard=False) if self.sees_shape else self

    @property
    def fused_config(self) -> CodecConfig | None:
        return None if self.sees_shape else super().fused_config

    def payload_bytes(self, shape: Shape) -> int:
        layout = self._layout(shape)
        return super().payload_bytes(shape) if layout is None else layout.wire_bytes

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        layout = self._layout(x.shape[1:])
        if layout is None:
            return super().encode(x)
        rows = x.reshape(len(x), layout.tokens, layout.channels)
        return stacked([channel_norm.encode(row, layout) for row in rows])

    def decode(
        self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        layout = self._layout(shape)
        if layout is None:
            return super().decode(payloads, shape, dtype, out)
        values = stacked([channel_norm.decode(row, layout, dtype) for row in payloads])
        values = values.view(len(payloads), *shape)
        return values if out is None else out.copy_(values)

    def _layout(self, shape: Shape) -> ChannelNormLayout | None:
        """Of a message of normalised channels; None of an empty one, and without ``normalize``."""
        if not self.sees_shape or not math.prod(shape):
            return None
        if shape[-1] % self.group:
            raise ValueError(f"{shape[-1]} channels must be a multiple of group={self.group}")
        return ChannelNormLayout(math.prod(shape[:-1]), shape[-1], self.config)
