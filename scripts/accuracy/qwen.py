"""Qwen's transformer layer (RMSNorm, rotary positions, query groups, SwiGLU) under simulated tensor
parallelism."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.compression.huggingface.models import DenseModel
from scripts.accuracy import layers
from scripts.accuracy.attention import attend


class RMSNorm(nn.Module):
    """In fp32 of an activation in bf16."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


def angles(model: DenseModel, sequence: int) -> Tensor:
    """[2, sequence, 1, head]: cosine and sine of each position's rotations, halves of a head alike."""
    powers = torch.arange(0, model.head_dim, 2) / model.head_dim
    turns = torch.arange(sequence)[:, None] / model.rotary_base**powers
    both = torch.cat([turns, turns], dim=-1)
    return torch.stack([both.cos(), both.sin()])[:, :, None]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [B, S, heads, d] at its positions; in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)


class QwenBlock(nn.Module):
    """One layer on [T, h], T = batch * sequence; fp32 weights. qkv holds one query group behind the other,
    fc1 gates and values in turn, so that equal slices of them are the ranks' own.

    Args:
        model: its numbers; family qwen2 has biases on q, k and v, qwen3 norms of q and k.
        sequence: tokens of one.
    """

    sees_first_token = False
    """As a block of model.py may."""

    def __init__(self, model: DenseModel, sequence: int) -> None:
        super().__init__()
        h, width = model.hidden, model.heads * model.head_dim
        self.model, self.sequence = model, sequence
        self.sequence_parallel = self.context_parallel = False
        self.norm1, self.norm2 = RMSNorm(h, model.norm_epsilon), RMSNorm(h, model.norm_epsilon)
        rows = width + 2 * model.groups * model.head_dim
        self.qkv = nn.Parameter(torch.empty(rows, h))
        self.qkv_bias = nn.Parameter(torch.zeros(rows)) if model.family == "qwen2" else None
        self.q_norm = self.k_norm = None
        if model.family == "qwen3":
            self.q_norm, self.k_norm = (RMSNorm(model.head_dim, model.norm_epsilon) for _ in "qk")
        self.projection = nn.Parameter(torch.empty(h, width))
        self.fc1 = nn.Parameter(torch.empty(2 * model.ffn, h))
        self.fc2 = nn.Parameter(torch.empty(h, model.ffn))
        self.register_buffer("angles", angles(model, sequence), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        y = layers.gather(y) if self.sequence_parallel else y
        x = x + layers.row_linear(self._attend(y), self.projection.to(x.dtype))
        y = self.norm2(x)
        y = layers.gather(y) if self.sequence_parallel else y
        gate, up = layers.column_linear(y, self.fc1.to(x.dtype)).view(len(y), -1, 2).unbind(-1)
        return x + layers.row_linear(F.silu(gate) * up, self.fc2.to(x.dtype))

    def _attend(self, y: Tensor) -> Tensor:
        """[T, h] normalised to [T, heads * head]."""
        model, dtype = self.model, y.dtype
        each = model.heads // model.groups
        qkv = layers.column_linear(y, self.qkv.to(dtype))
        qkv = qkv if self.qkv_bias is None else qkv + self.qkv_bias.to(dtype)
        qkv = qkv.view(-1, self.sequence, model.groups, each + 2, model.head_dim)
        q, k, v = (part.flatten(2, 3) for part in qkv.split([each, 1, 1], dim=3))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(part, *self.angles) for part in (q, k))
        return attend(q, k, v, self.context_parallel)
