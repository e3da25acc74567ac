"""A control of TACO's paper: FP8 with one scale for a whole tensor, as a codec of one's own.

    VARIANT=per-tensor DATA_PATH=... TOKENIZER_MODEL=... examples/paper/taco.sh
    torchrun ... pretrain_gpt.py ... --tp-compression examples.paper.per_tensor_fp8:PerTensorFp8

The tensor is a message: of a rank's partial sum what goes to one other rank, then the piece of the sum that
it owns. Its scale divides by the largest magnitude in it. That is a pass over the tensor before the first
byte can go, and one large value makes all others coarse. In plain torch, for its loss and not its speed.
"""

import math
from dataclasses import dataclass

import torch

from megatron.compression import Codec

LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class PerTensorFp8(Codec):
    """FP8 (e4m3) with one fp32 scale a row."""

    def payload_bytes(self, shape) -> int:
        """A byte a value, and the scale."""
        return math.prod(shape) + 4

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``[rows, *shape]`` to uint8 ``[rows, values + 4]``."""
        rows = x.reshape(len(x), -1).float()
        scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / LARGEST
        codes = (rows / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat([codes, scale.view(torch.uint8)], dim=1)

    def decode(self, payloads, shape, dtype) -> torch.Tensor:
        """uint8 ``[rows, values + 4]`` to ``[rows, *shape]`` of ``dtype``."""
        codes = payloads[:, :-4].contiguous().view(torch.float8_e4m3fn)
        scale = payloads[:, -4:].clone(
            memory_format=torch.contiguous_format
        )  # it may begin at any byte
        return (codes.float() * scale.view(torch.float32)).view(len(payloads), *shape).to(dtype)
