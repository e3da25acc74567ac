"""A control of TACO's paper: FP8 with one scale for a whole tensor, as a codec of your own.

    VARIANT=per-tensor DATA_PATH=... TOKENIZER_MODEL=... examples/paper/taco.sh
    torchrun ... pretrain_gpt.py ... --tp-compression examples.paper.per_tensor_fp8:PerTensorFp8

The tensor is a message: first the part of a rank's partial sum that goes to one other rank, then
the piece of the sum that a rank owns. Its scale divides by the largest magnitude in it. That costs
a pass over the tensor before the first byte can go, and one large value makes all others coarse. It
is written in plain torch, for its loss and not for its speed.

A codec takes three methods: the payload's size, ``encode`` and ``decode``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.compression import Codec

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
SCALE_BYTES = 4


@dataclass(frozen=True)
class PerTensorFp8(Codec):
    """FP8 (e4m3) with one fp32 scale in each row."""

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Return the size of an encoded row of this shape: a byte for each value, and the scale."""
        return math.prod(shape) + SCALE_BYTES

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode rows ``[rows, *shape]`` as uint8 ``[rows, values + 4]``."""
        rows = x.reshape(len(x), -1).float()
        # A row of zeros gets a tiny scale instead of a division by zero.
        scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / LARGEST
        codes = (rows / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], dim=1)

    def decode(
        self, payloads: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Decode what ``encode`` returned.

        Args:
            payloads: uint8 ``[rows, values + 4]``.
            shape: the shape of a row.
            dtype: the type of the result.

        Returns:
            Values ``[rows, *shape]`` of ``dtype``.
        """
        codes = payloads[:, :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn)
        # The scale may begin at any byte. A copy begins where an fp32 can be read.
        scale = payloads[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
        values = codes.float() * scale.view(torch.float32)
        return values.view(len(payloads), *shape).to(dtype)
