"""Groups of values that share a scale, rotated by a Hadamard transform or not, over ``taco_kernels.taco``."""

import abc
import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from megatron.compression.codecs.base import Codec, Shape, stacked
from taco_kernels import taco
from taco_kernels.taco import CodecConfig


class GroupedCodec(Codec):
    """The codec contract over the kernels of ``taco_kernels.taco``: Triton on CUDA, plain torch elsewhere.

    Sums are taken in the Hadamard domain, in fp32, with one inverse transform at the end.
    """

    @property
    @abc.abstractmethod
    def config(self) -> CodecConfig:
        """What the kernels take."""

    @property
    def block(self) -> int:
        return self.config.group_size

    @property
    def fused_config(self) -> CodecConfig | None:
        return None if self.config.outliers else self.config  # those kernels have no lists

    def payload_bytes(self, shape: Shape) -> int:
        return self.config.wire_bytes(math.prod(shape))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        rows, values = x.shape[0], x.shape[1:].numel()
        if rows > 1 and values % self.block:  # the kernels pad a tensor's end, not that of every row
            x = F.pad(x.reshape(rows, values), (0, -values % self.block))
        return taco.encode(x, self.config, rows)

    def decode(
        self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, values = len(payloads), math.prod(shape)
        if rows == 1 or values % self.block == 0:
            dtype = dtype if out is None else out.dtype
            return taco.decode(payloads, self.config, (rows, *shape), dtype, out=out)
        padded = taco.decode(payloads, self.config, (rows, values + -values % self.block), dtype)
        result = padded[:, :values].reshape(rows, *shape)
        return result if out is None else out.copy_(result)

    def decode_sum(
        self,
        payloads: torch.Tensor,
        shape: Shape,
        dtype: torch.dtype,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.sees_shape:
            return super().decode_sum(payloads, shape, dtype, scale, out)
        if payloads.shape[1] > 1:
            rows = payloads.split(1, dim=1)
            total = torch.cat([self.decode_sum(row, shape, dtype, scale) for row in rows])
            return total if out is None else out.copy_(total)
        shape = (1, *shape)
        if scale == 1.0:
            dtype = dtype if out is None else out.dtype
            return taco.decode_sum(payloads[:, 0], self.config, shape, dtype, out=out)
        total = taco.decode_sum(payloads[:, 0], self.config, shape, torch.float32).mul_(scale)
        return total.to(dtype) if out is None else out.copy_(total)

    def decode_sum_encode(self, payloads: torch.Tensor, shape: Shape, into: Codec) -> torch.Tensor:
        """Does not leave the Hadamard domain where both codecs have the same."""
        if self.sees_shape or not isinstance(into, GroupedCodec) or _domain(into) != _domain(self):
            return super().decode_sum_encode(payloads, shape, into)
        values = math.prod(shape)
        rows = [
            taco.decode_sum_encode(payloads[:, row], self.config, values, config_out=into.config)
            for row in range(payloads.shape[1])
        ]
        return stacked(rows)


def _domain(codec: GroupedCodec) -> tuple[object, ...]:
    """What is alike in codecs of which one can encode the sums of the other's groups as they are."""
    config = codec.config
    return codec.sees_shape, config.group_size, config.hadamard, config.outliers


def fp8_in_software(codecs: Iterable[object]) -> str | None:
    """A line for the log where this GPU has no instructions for the fp8 of some of ``codecs``; else None."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9):
        return None
    hops = {hop for codec in codecs for hop in getattr(codec, "hops", ())}
    names = sorted(hop.name for hop in hops if isinstance(hop, GroupedCodec) and hop.config.is_float)
    if not names:
        return None
    return (
        f"{', '.join(names)}: {torch.cuda.get_device_name()} converts to fp8 in software; int8 sends as many "
        "bytes with a quarter of the error on Gaussian values, and needs none of it"
    )
