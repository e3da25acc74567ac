"""TAH-Quant: tiles of activations in 3 and 4 bits by entropy, outliers rotated away.

Source: TAH-Quant (arXiv 2506.01352). The arithmetic is ``taco_kernels.tah_quant``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from taco_kernels import Stream, tah_quant
from taco_kernels.tah_quant import TahConfig, layout_of


@dataclass(frozen=True)
class TahQuantCodec:
    """``MessageCodec`` over ``taco_kernels.tah_quant``."""

    config: TahConfig = field(default_factory=TahConfig)
    rounds_randomly: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Bits, tile and what the bits are given to."""
        config = self.config
        name = f"tah-quant int{config.low_bits}/int{config.high_bits} by {config.allocation}"
        name += f", tile {config.tile_size}"
        return name if config.transform != "none" else f"{name}, no transform"

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``MessageCodec.wire_bytes``."""
        return layout_of(self.config, tuple(shape)).wire_bytes

    def encode(self, x: torch.Tensor, random: Stream | None = None) -> torch.Tensor:
        """See ``MessageCodec.encode``."""
        return tah_quant.encode(x, self.config)

    def decode(
        self, wire: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, random: Stream | None = None
    ) -> torch.Tensor:
        """See ``MessageCodec.decode``."""
        return tah_quant.decode(wire, self.config, shape, dtype)
