"""Groups of values that share a scale, over ``taco_kernels.taco``: TACO's FP8 and integers of 4 to
8 bits.

Integers are more accurate than FP8 for the same bits once a Hadamard transform has rotated a group.
"""

import abc
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F

from megatron.compression.codecs.base import Codec, Shape, stacked
from megatron.compression.codecs.registry import register_codec
from taco_kernels import channel_norm, taco
from taco_kernels.channel_norm import ChannelNormLayout
from taco_kernels.taco import CodecConfig


class GroupedCodec(Codec):
    """The codec contract over the kernels of ``taco_kernels.taco``: Triton on CUDA, plain torch
    elsewhere.

    Sums run in the Hadamard domain, in fp32, with one inverse transform at the end; the payloads of
    two senders are transformed back one by one.
    """

    @property
    @abc.abstractmethod
    def config(self) -> CodecConfig:
        """The kernels' settings."""

    @cached_property
    def block(self) -> int:
        return self.config.group_size

    @cached_property
    def fused_config(self) -> CodecConfig | None:
        """See ``Codec.fused_config``; None where channels are normalised, which those kernels
        cannot."""
        return None if self.sees_shape else self.config

    @cached_property
    def domain(self) -> tuple[object, ...]:
        """The settings that are alike in two codecs of which one encodes the other's sums without
        leaving the Hadamard domain."""
        return self.sees_shape, self.block, self.config.hadamard, self.config.outliers

    def payload_bytes(self, shape: Shape) -> int:
        return self.config.wire_bytes(math.prod(shape))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        values = x.shape[1:].numel()
        if rows > 1 and values % self.block:
            # The kernels pad a tensor's end, not that of every row.
            x = F.pad(x.reshape(rows, values), (0, -values % self.block))
        return taco.encode(x, self.config, rows)

    def encode_into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.sees_shape:
            return super().encode_into(x, out)
        return taco.encode(x, self.config, out=out)

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        rows = len(payloads)
        values = math.prod(shape)
        # As encoded: one row is padded at its end by the kernels, several by ``encode``.
        if rows == 1 or values % self.block == 0:
            return taco.decode(payloads, self.config, (rows, *shape), dtype)
        padded = taco.decode(payloads, self.config, (rows, values + -values % self.block), dtype)
        return padded[:, :values].reshape(rows, *shape)

    def sum_into(
        self,
        payloads: torch.Tensor,
        shape: Shape,
        dtype: torch.dtype,
        scale: float,
        rows: torch.Tensor,
    ) -> None:
        """Write the scaled sum into memory: one kernel for all senders of a row.

        Args:
            payloads: uint8 ``[senders, rows, bytes]``.
            shape: one row's.
            dtype: not asked by the kernels: a payload decodes to any dtype.
            scale: multiplies the sum.
            rows: ``[rows, n]`` of any dtype, whose rows are contiguous.
        """
        is_plain_copy = len(payloads) == 1 and scale == 1.0
        # The kernel writes values without gaps; padding between rows would shift all but the
        # first.
        has_padded_rows = len(rows) > 1 and rows.shape[1] % self.block
        if self.sees_shape or (is_plain_copy and has_padded_rows):
            super().sum_into(payloads, shape, dtype, scale, rows)
            return
        if is_plain_copy:
            taco.decode(payloads[0], self.config, rows.shape, rows.dtype, out=rows)
            return
        # A launch a row. Collectives ask for one row, this rank's part of a sum.
        for index in range(len(rows)):
            row = rows[index : index + 1]
            row_payloads = payloads[:, index]
            if scale == 1.0:
                taco.decode_sum(row_payloads, self.config, row.shape, row.dtype, out=row)
            else:
                # The kernels round to the result's dtype: scale in fp32 first, so that it is
                # rounded once.
                total = taco.decode_sum(row_payloads, self.config, row.shape, torch.float32)
                row.copy_(total.mul_(scale))

    def decode_sum_encode(self, payloads: torch.Tensor, shape: Shape, into: Codec) -> torch.Tensor:
        """See ``Codec.decode_sum_encode``; two codecs of one ``domain`` do not leave it in
        between."""
        # Sums may stay transformed only where both codecs transform the same groups in the same
        # way.
        if self.sees_shape or not isinstance(into, GroupedCodec) or into.domain != self.domain:
            return super().decode_sum_encode(payloads, shape, into)
        values = math.prod(shape)
        rows = [
            taco.decode_sum_encode(row_payloads, self.config, values, into.config)
            for row_payloads in payloads.unbind(1)
        ]
        return stacked(rows)


@register_codec("taco")
@dataclass(frozen=True)
class TacoCodec(GroupedCodec):
    """TACO (arXiv 2604.24088): FP8 after an adaptive-scale Hadamard transform, with dual scales.

    taco_kernels/taco/reference.py has the method's formulas.
    """

    format: str = "fp8-e4m3"
    """Number format on the wire: fp8-e4m3 (the paper's), fp8-e5m2, int8, int6, int5 or int4."""

    group: int = 128
    """Values that share one transform and one pair of scales: 32, 64, 128 or 256."""

    scales: str = "dual"
    """Scales sent with each group: dual = two fp32 (the paper's), single = one bf16."""

    hadamard: bool = True
    """off leaves the transform out: plain group scaling, a control."""

    outliers: bool = True
    """Values of more than 8 times their group's mean magnitude are stored separately, so that they
    do not drown their neighbours: 0.125 bits a value. Not in the paper, whose codec is ``off``."""

    def __post_init__(self) -> None:
        if self.scales == "signed":
            raise ValueError("scales=signed belongs to the int codecs; give int6, or scales=single")
        # Made once now, since it checks the values.
        _ = self.config

    @cached_property
    def config(self) -> CodecConfig:
        return CodecConfig(self.format, self.group, self.scales, self.hadamard, self.outliers)


@register_codec("int8", bits=8)
@register_codec("int6", bits=6)
@register_codec("int5", bits=5)
@register_codec("int4", bits=4)
@dataclass(frozen=True)
class IntCodec(GroupedCodec):
    """Integers of 4 to 8 bits after a Hadamard transform, with one scale a group.

    With ``normalize`` each row is a message of tokens: every channel is centred and divided by its
    root mean square over the row's tokens first; these statistics are sent too, in bf16. Early in
    training nearly all of what a pipeline stage sends is a mean that the tokens share.
    """

    bits: int
    group: int = 128
    """Values that share a scale (and a transform): 32, 64, 128 or 256."""

    scales: str = "signed"
    """single = one bf16 a group; signed = the same with a sign that says at which end the group's
    extreme lies, so that all codes are used, and in 4 to 6 bits code values that lie closer near
    zero: a quarter to a third less squared error for the same bytes."""

    hadamard: bool | None = None
    """Rotate each group first, so that one outlier does not decide its grid; by default on, and off
    with normalize."""

    normalize: Literal["none", "standardize"] = "none"
    """What is done to each channel over a message's tokens before it is encoded: standardize =
    subtract the mean and divide by the root mean square. For messages between pipeline stages."""

    outliers: bool = False
    """Values of more than 8 times their group's mean magnitude are stored separately, so that they
    do not drown their neighbours: 0.125 bits a value."""

    def __post_init__(self) -> None:
        if self.scales == "dual":
            raise ValueError("scales=dual belongs to taco; give taco:format=int8, or scales=signed")
        if self.normalize not in ("none", "standardize"):
            raise ValueError(f"normalize={self.normalize} must be none or standardize")
        if self.normalize != "none" and self.hadamard:
            raise ValueError(
                "normalize works on channels, which the transform mixes; drop hadamard=on"
            )
        if self.hadamard == (self.normalize == "none"):
            object.__setattr__(self, "hadamard", None)  # the default: one name for one codec
        _ = self.config

    @cached_property
    def config(self) -> CodecConfig:
        rotated = self.normalize == "none" if self.hadamard is None else self.hadamard
        return CodecConfig(f"int{self.bits}", self.group, self.scales, rotated, self.outliers)

    @cached_property
    def sees_shape(self) -> bool:
        return self.normalize != "none"

    @property
    def backward(self) -> Codec:
        """See ``Codec.backward``; gradients have no mean worth the statistics of channels."""
        if not self.sees_shape:
            return self
        # With normalize there is no transform, so the codec of the gradients has none either.
        return replace(self, normalize="none", hadamard=False)

    def payload_bytes(self, shape: Shape) -> int:
        layout = self._layout(shape) if self.sees_shape else None
        return super().payload_bytes(shape) if layout is None else layout.wire_bytes

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        layout = self._layout(x.shape[1:]) if self.sees_shape else None
        if layout is None:
            return super().encode(x)
        rows = x.reshape(len(x), layout.tokens, layout.channels)
        return stacked([channel_norm.encode(row, layout) for row in rows])

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        layout = self._layout(shape) if self.sees_shape else None
        if layout is None:
            return super().decode(payloads, shape, dtype)
        values = stacked([channel_norm.decode(row, layout, dtype) for row in payloads])
        return values.view(len(payloads), *shape)

    def _layout(self, shape: Shape) -> ChannelNormLayout | None:
        """Return the layout of a message of normalised channels; None: it is empty."""
        if not math.prod(shape):
            return None
        # A group of values lies inside one token, since each channel has statistics of its own.
        if shape[-1] % self.group:
            raise ValueError(f"{shape[-1]} channels must be a multiple of group={self.group}")
        return ChannelNormLayout(math.prod(shape[:-1]), shape[-1], self.config)


def fp8_in_software(codecs: Iterable[object]) -> str | None:
    """Return a line for the log where this GPU has no instructions for the fp8 of some codecs, or
    None."""
    # Compute capability 8.9 (Ada) is the first with instructions that convert fp8.
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9):
        return None
    hops = {hop for codec in codecs for hop in getattr(codec, "hops", ())}
    names = sorted(
        hop.name for hop in hops if isinstance(hop, GroupedCodec) and hop.config.is_float
    )
    if not names:
        return None
    return (
        f"{', '.join(names)}: {torch.cuda.get_device_name()} converts to fp8 in software; int8 "
        "sends as many bytes with a quarter of the error on Gaussian values, and needs none of it"
    )
