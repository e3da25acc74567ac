"""TACO: groups of values rotated by a Hadamard transform, adaptively scaled, and rounded to 8 bits or fewer.

Source: TACO (arXiv 2604.24088). The arithmetic is ``taco_kernels``: Triton on CUDA tensors, plain torch
elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import taco_kernels
from taco_kernels import CodecConfig, Stream


@dataclass(frozen=True)
class TacoCodec:
    """The codec contract over ``taco_kernels``."""

    config: CodecConfig = field(default_factory=CodecConfig)
    second: CodecConfig | None = None
    """Of the second hop, where it is another one; its groups are those of ``config``."""

    @property
    def name(self) -> str:
        """Formats, group size, scales and roundings."""
        hops = self.config, self.second or self.config
        formats, roundings = (
            " then ".join(dict.fromkeys(getattr(hop, field) for hop in hops))
            for field in ("format", "rounding")
        )
        name = f"taco {formats} group {self.config.group_size} {self.config.scales} scale"
        return name if roundings == "nearest" else f"{name}, {roundings} rounding"

    @property
    def hops(self) -> "tuple[TacoCodec, TacoCodec]":
        """See ``base.hop_codecs``."""
        if self.second is None:
            return self, self
        return TacoCodec(self.config), TacoCodec(self.second)

    @property
    def rounds_randomly(self) -> bool:
        """See ``Codec.rounds_randomly``."""
        return any(hop.rounding != "nearest" for hop in (self.config, self.second or self.config))

    def chunk_numel(self, numel: int, chunks: int = 1) -> int:
        """See ``Codec.chunk_numel``: a multiple of the group size."""
        return self.config.chunk_numel(numel, chunks)

    def wire_bytes(self, numel: int) -> int:
        """See ``Codec.wire_bytes``: payload, then the groups' scales."""
        return self.config.wire_bytes(numel)

    def encode(self, x: torch.Tensor, chunks: int = 1, random: Stream | None = None) -> torch.Tensor:
        """See ``Codec.encode``."""
        return taco_kernels.encode(x, self.config, chunks, random)

    def decode(
        self,
        wires: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        random: Stream | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Codec.decode``."""
        return taco_kernels.decode(wires, self.config, shape, dtype, random, out)

    def decode_sum(
        self,
        wires: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        random: Stream | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Codec.decode_sum``; summed in the Hadamard domain, one inverse transform."""
        return taco_kernels.decode_sum(wires, self.config, shape, dtype, random, out)

    def decode_sum_encode(
        self,
        wires: torch.Tensor,
        numel: int,
        random_in: Stream | None = None,
        random_out: Stream | None = None,
    ) -> torch.Tensor:
        """See ``Codec.decode_sum_encode``; never leaves the Hadamard domain."""
        return taco_kernels.decode_sum_encode(
            wires, self.config, numel, random_in, random_out, config_out=self.second
        )
