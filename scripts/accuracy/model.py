"""A GPT as Megatron's: pre-norm, learned positions, GELU, biases, untied output; or a Qwen. fp32 weights."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.compression.huggingface.models import DenseModel
from scripts.accuracy import layers
from scripts.accuracy.settings import RANKS, Setting


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; the defaults have 111 M parameters with 16384 tokens."""

    vocabulary: int = 16384
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    sequence: int = 1024
    dtype: torch.dtype = torch.bfloat16
    """Of the activations and of the weights in products."""
    qwen: DenseModel | None = None
    """A Qwen's layers, whose sizes are the same numbers; its own vocabulary is not used."""
    ranks: int = RANKS
    """Of tensor parallelism."""
    stages: int = 4
    """Of the pipeline, between which activations are sent where a setting says so."""


class Norm(nn.Module):
    """In fp32 of an activation in bf16: LayerNorm, or RMSNorm with its epsilon."""

    def __init__(self, width: int, rms_epsilon: float | None = None) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), rms_epsilon
        self.bias = nn.Parameter(torch.zeros(width)) if rms_epsilon is None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.epsilon is None:
            return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias).to(x.dtype)
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


class GPTBlock(nn.Module):
    """One transformer layer on [T, h], T = batch * sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h = config.hidden
        self.config = config
        self.sequence_parallel = self.context_parallel = False
        self.norm1, self.norm2 = Norm(h), Norm(h)
        self.qkv, self.qkv_bias = weight_and_bias(3 * h, h)
        self.projection, self.projection_bias = weight_and_bias(h, h)
        self.fc1, self.fc1_bias = weight_and_bias(4 * h, h)
        self.fc2, self.fc2_bias = weight_and_bias(h, 4 * h)

    def forward(self, x: Tensor) -> Tensor:
        dtype, config = x.dtype, self.config
        y = self.norm1(x)
        y = layers.gather(y) if self.sequence_parallel else y
        qkv = layers.column_linear(y, self.qkv.to(dtype)) + self.qkv_bias.to(dtype)
        qkv = qkv.view(-1, config.sequence, config.heads, 3, config.hidden // config.heads)
        y = layers.attend(*qkv.unbind(3), self.context_parallel)
        x = x + (layers.row_linear(y, self.projection.to(dtype)) + self.projection_bias.to(dtype))
        y = self.norm2(x)
        y = layers.gather(y) if self.sequence_parallel else y
        y = layers.column_linear(y, self.fc1.to(dtype)) + self.fc1_bias.to(dtype)
        y = F.gelu(y, approximate="tanh")
        return x + (layers.row_linear(y, self.fc2.to(dtype)) + self.fc2_bias.to(dtype))


def weight_and_bias(rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Parameters of a linear layer, not initialised."""
    return nn.Parameter(torch.empty(rows, columns)), nn.Parameter(torch.zeros(rows))


def angles(model: DenseModel, sequence: int) -> Tensor:
    """[2, sequence, 1, head]: cosine and sine of each position's rotations, halves of a head alike."""
    powers = torch.arange(0, model.head_dim, 2) / model.head_dim
    angle = torch.arange(sequence)[:, None] / model.rotary_base**powers
    both = torch.cat([angle, angle], dim=-1)
    return torch.stack([both.cos(), both.sin()])[:, :, None]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [B, S, heads, d] at its positions; in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)


class QwenBlock(nn.Module):
    """One layer on [T, h], T = batch * sequence; fp32 weights. qkv holds one query group after the other, fc1
    gates and values alternating, so that equal slices of them are the ranks' own. Family qwen2 has biases on
    q, k and v, qwen3 norms of q and k."""

    def __init__(self, model: DenseModel, sequence: int) -> None:
        super().__init__()
        h, width = model.hidden, model.heads * model.head_dim
        self.model, self.sequence = model, sequence
        self.sequence_parallel = self.context_parallel = False
        self.norm1, self.norm2 = Norm(h, model.norm_epsilon), Norm(h, model.norm_epsilon)
        rows = width + 2 * model.groups * model.head_dim
        self.qkv = nn.Parameter(torch.empty(rows, h))
        self.qkv_bias = nn.Parameter(torch.zeros(rows)) if model.family == "qwen2" else None
        self.q_norm = self.k_norm = None
        if model.family == "qwen3":
            self.q_norm, self.k_norm = (Norm(model.head_dim, model.norm_epsilon) for _ in "qk")
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
        return layers.attend(q, k, v, self.context_parallel)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """fp32 cross entropy of each token."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


class GPT(nn.Module):
    """Token ids [B, S] and targets to the loss of each token, through the exchange that layers.attach
    named."""

    def __init__(self, config: ModelConfig, compile_blocks: bool = False) -> None:
        super().__init__()
        self.config = config
        qwen = config.qwen
        self.words = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        self.positions = None if qwen else nn.Parameter(torch.empty(config.sequence, config.hidden))
        self.blocks = nn.ModuleList(
            QwenBlock(qwen, config.sequence) if qwen else GPTBlock(config)
            for _ in range(config.layers)
        )
        self.norm = Norm(config.hidden, qwen.norm_epsilon) if qwen else Norm(config.hidden)
        tied = qwen is not None and qwen.tied
        self.output = (
            self.words if tied else nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        )
        self.sequence_parallel = False
        self.token_losses = token_losses
        if compile_blocks:
            for block in self.blocks:
                block.compile(dynamic=False)
            self.token_losses = torch.compile(token_losses, dynamic=False)

    def initialise(self, seed: int) -> None:
        """Normal(0, 0.02), smaller by sqrt(2 * layers) at the end of a branch; on all devices the same."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                elif parameter.dim() == 1:
                    parameter.zero_()
                else:
                    last = name.endswith(("projection", "fc2"))
                    std = 0.02 / (2 * self.config.layers) ** 0.5 if last else 0.02
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def use(self, setting: Setting) -> None:
        """Exchange what a setting's kinds of parallelism do from now on."""
        self.sequence_parallel = setting.sequence_parallel
        for block in self.blocks:
            block.sequence_parallel = setting.sequence_parallel
            block.context_parallel = setting.context_parallel

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """fp32 [B * S] losses."""
        dtype, config = self.config.dtype, self.config
        ids = ids.reshape(-1)
        rows = self.words[ids].to(dtype)
        x = layers.reduce_embedding(rows, ids, config.vocabulary).view(
            -1, config.sequence, config.hidden
        )
        x = x if self.positions is None else x + self.positions.to(dtype)
        x = x.view(-1, config.hidden)
        stage = -(-config.layers // config.stages)
        for layer, block in enumerate(self.blocks):
            if layer and layer % stage == 0:
                x = layers.send(x, config.sequence)
            x = block(x)
        x = self.norm(x)
        x = layers.gather(x) if self.sequence_parallel else x
        return self.token_losses(
            layers.column_linear(x, self.output.to(dtype)), targets.reshape(-1)
        )
