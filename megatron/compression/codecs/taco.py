"""TACO: groups of values rotated by a Hadamard transform, adaptively scaled, and rounded to 8 bits or fewer.

Source: TACO (arXiv 2604.24088). The arithmetic is ``taco_kernels``: Triton on CUDA tensors, plain torch
elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import taco_kernels
from taco_kernels import CodecConfig


@dataclass(frozen=True)
class TacoCodec:
    """The codec contract over ``taco_kernels``."""

    config: CodecConfig = field(default_factory=CodecConfig)

    @property
    def name(self) -> str:
        """Format, group size and scales."""
        return f"taco {self.config.format} group {self.config.group_size} {self.config.scales} scale"

    def chunk_numel(self, numel: int, chunks: int = 1) -> int:
        """See ``Codec.chunk_numel``: a multiple of the group size."""
        return self.config.chunk_numel(numel, chunks)

    def wire_bytes(self, numel: int) -> int:
        """See ``Codec.wire_bytes``: payload, then the groups' scales."""
        return self.config.wire_bytes(numel)

    def encode(self, x: torch.Tensor, chunks: int = 1) -> torch.Tensor:
        """See ``Codec.encode``."""
        return taco_kernels.encode(x, self.config, chunks)

    def decode(self, wires: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See ``Codec.decode``."""
        return taco_kernels.decode(wires, self.config, shape, dtype)

    def decode_sum(self, wires: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See ``Codec.decode_sum``; summed in the Hadamard domain, one inverse transform."""
        return taco_kernels.decode_sum(wires, self.config, shape, dtype)

    def decode_sum_encode(self, wires: torch.Tensor, numel: int) -> torch.Tensor:
        """See ``Codec.decode_sum_encode``; never leaves the Hadamard domain."""
        return taco_kernels.decode_sum_encode(wires, self.config, numel)
