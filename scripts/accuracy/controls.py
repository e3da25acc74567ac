"""Plain FP8 without a transform: what other systems send, as codecs to compare ours with."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.compression.codecs import Codec
from megatron.compression.codecs.base import Shape, contiguous_rows

_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_LARGEST_EXPONENTS = {"e4m3": 8, "e5m2": 15}
"""Of a format's largest values: 448 = 1.75 * 2^8, 57344 = 1.75 * 2^15."""
_LEAST = 1e-30
"""Divides groups of zeros."""


@dataclass(frozen=True)
class PlainFp8(Codec):
    """FP8 values with scales that map the largest value of a group to the largest one of the format.

    A payload has the values, one byte each, then the scales: fp32, or with ``scale=mx`` the power
    of two of 32 values in one byte, as in the OCP's MX formats (its largest values are clipped).
    """

    format: str = "e4m3"
    """e4m3 or e5m2."""
    scale: str = "tensor"
    """What shares a scale: tensor (a row of the codec, which is a rank's message), token (its last
    dimension), mx (32 values), or a number of values."""

    def __post_init__(self) -> None:
        if self.format not in _TYPES:
            raise ValueError(f"format={self.format} must be e4m3 or e5m2")
        if self.scale not in ("tensor", "token", "mx") and not self.scale.isdigit():
            raise ValueError(f"scale={self.scale} must be tensor, token, mx or a number of values")

    @property
    def sees_shape(self) -> bool:
        return self.scale == "token"

    @property
    def _scale_bytes(self) -> int:
        return 1 if self.scale == "mx" else 4

    def _group(self, shape: Shape) -> int:
        """Return how many values of a row of ``shape`` share a scale."""
        if self.scale == "tensor":
            return math.prod(shape)
        if self.scale == "token":
            return shape[-1]
        return 32 if self.scale == "mx" else int(self.scale)

    def _groups(self, shape: Shape) -> int:
        """Return how many groups a row has; its end is padded with zeros."""
        return -(math.prod(shape) // -max(1, self._group(shape)))

    def payload_bytes(self, shape: Shape) -> int:
        return self._groups(shape) * (self._group(shape) + self._scale_bytes)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[1:]
        rows = contiguous_rows(x).float()
        padding = self._groups(shape) * self._group(shape) - rows.shape[1]
        groups = F.pad(rows, (0, padding)).view(len(x), self._groups(shape), self._group(shape))
        largest = groups.abs().amax(dim=2, keepdim=True).clamp(min=_LEAST)
        limit = torch.finfo(_TYPES[self.format]).max
        if self.scale == "mx":
            exponents = largest.log2().floor() - _LARGEST_EXPONENTS[self.format]
            exponents = exponents.clamp(-127, 127)
            scales = exponents.exp2()
            scale_bytes = (exponents + 127).to(torch.uint8).flatten(1)
        else:
            scales = largest / limit
            scale_bytes = scales.flatten(1).view(torch.uint8)
        values = (groups / scales).clamp(-limit, limit).to(_TYPES[self.format])
        return torch.cat([values.view(torch.uint8).flatten(1), scale_bytes], dim=1)

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        rows = len(payloads)
        count = self._groups(shape) * self._group(shape)
        values = payloads[:, :count].contiguous().view(_TYPES[self.format]).float()
        scale_bytes = payloads[:, count:].contiguous()
        if self.scale == "mx":
            scales = (scale_bytes.float() - 127).exp2()
        else:
            scales = scale_bytes.view(torch.float32)
        groups = values.view(rows, self._groups(shape), -1) * scales[:, :, None]
        return groups.view(rows, count)[:, : math.prod(shape)].reshape(rows, *shape).to(dtype)
