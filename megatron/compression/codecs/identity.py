"""No compression: the values themselves, as bytes. The control that tests the collectives around a codec."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from taco_kernels import Stream


@dataclass(frozen=True)
class IdentityCodec:
    """Sends fp32 values: exact for bf16, fp16 and fp32 input, and sums without an intermediate rounding."""

    name: str = "identity"
    rounds_randomly: bool = False

    def chunk_numel(self, numel: int, chunks: int = 1) -> int:
        """Values in each of ``chunks`` pieces."""
        return -(-numel // chunks)

    def wire_bytes(self, numel: int) -> int:
        """Four bytes a value."""
        return 4 * numel

    def encode(self, x: torch.Tensor, chunks: int = 1, random: Stream | None = None) -> torch.Tensor:
        """See ``Codec.encode``."""
        size = self.chunk_numel(x.numel(), chunks)
        values = x.new_zeros(chunks * size, dtype=torch.float32)
        values[: x.numel()] = x.reshape(-1)
        return values.view(chunks, size).view(torch.uint8).view(chunks, 4 * size)

    def decode(
        self,
        wires: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        random: Stream | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Codec.decode``."""
        numel = torch.Size(shape).numel()
        values = wires.reshape(-1).view(torch.float32)[:numel].reshape(shape)
        return values.to(dtype) if out is None else out.copy_(values)

    def decode_sum(
        self,
        wires: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        random: Stream | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Codec.decode_sum``."""
        numel = torch.Size(shape).numel()
        total = self._sum(wires)[:numel].reshape(shape)
        return total.to(dtype) if out is None else out.copy_(total)

    def decode_sum_encode(
        self,
        wires: torch.Tensor,
        numel: int,
        random_in: Stream | None = None,
        random_out: Stream | None = None,
    ) -> torch.Tensor:
        """See ``Codec.decode_sum_encode``."""
        return self._sum(wires)[:numel].view(torch.uint8)

    @staticmethod
    def _sum(wires: torch.Tensor) -> torch.Tensor:
        values = wires.contiguous().view(torch.float32)
        total = values[0].clone()
        for row in values[1:]:
            total += row
        return total
