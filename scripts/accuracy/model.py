"""A GPT as Megatron's: pre-norm, learned positions, GELU, biases, untied output; or a Qwen. fp32 weights."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.compression.huggingface.models import DenseModel
from scripts.accuracy import layers
from scripts.accuracy.attention import attend
from scripts.accuracy.experts import Experts
from scripts.accuracy.qwen import QwenBlock, RMSNorm
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
    massive: float = 0.0
    """What the second layer's fc2 adds to one channel of every first token, as the massive activations of
    large models (arXiv 2402.17762): one of its neurons sees that token and no other. 0: an ordinary model."""
    experts: int = 0
    """In place of each MLP, a mixture of so many: 8 of width 1536 make 280 M parameters, 110 M
    of them active."""
    chosen: int = 2
    """Experts of a token."""
    expert_width: int = 1536
    qwen: DenseModel | None = None
    """A Qwen's layers, whose sizes are the same numbers; its own vocabulary is not used."""
    ranks: int = RANKS
    """Of tensor parallelism."""
    stages: int = 4
    """Of the pipeline, between which activations are sent where a setting says so."""


class Norm(nn.Module):
    """LayerNorm in fp32 of an activation in bf16."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias).to(x.dtype)


MASSIVE_LAYER, MASSIVE_CHANNEL = 1, 300
"""Where a model's massive activations come from, and where they stand."""


class Block(nn.Module):
    """One transformer layer on [T, h], T = batch * sequence."""

    def __init__(self, config: ModelConfig, sees_first_token: bool = False) -> None:
        super().__init__()
        h = config.hidden
        self.config = config
        self.sees_first_token = sees_first_token
        self.sequence_parallel = self.context_parallel = False
        self.norm1, self.norm2 = Norm(h), Norm(h)
        self.qkv, self.qkv_bias = weight_and_bias(3 * h, h)
        self.projection, self.projection_bias = weight_and_bias(h, h)
        if config.experts:
            self.mlp = Experts(h, config.expert_width, config.experts, config.chosen)
            return
        self.fc1, self.fc1_bias = weight_and_bias(4 * h, h)
        self.fc2, self.fc2_bias = weight_and_bias(h, 4 * h)

    def forward(self, x: Tensor) -> Tensor:
        dtype, config = x.dtype, self.config
        y = self.norm1(x)
        y = layers.gather(y) if self.sequence_parallel else y
        qkv = layers.column_linear(y, self.qkv.to(dtype)) + self.qkv_bias.to(dtype)
        qkv = qkv.view(-1, config.sequence, config.heads, 3, config.hidden // config.heads)
        y = attend(*qkv.unbind(3), self.context_parallel)
        x = x + (layers.row_linear(y, self.projection.to(dtype)) + self.projection_bias.to(dtype))
        y = self.norm2(x)
        y = layers.gather(y) if self.sequence_parallel else y
        if config.experts:
            return x + self.mlp(y)
        y = layers.column_linear(y, self.fc1.to(dtype)) + self.fc1_bias.to(dtype)
        y = F.gelu(y, approximate="tanh")
        if self.sees_first_token:
            first = torch.arange(len(y), device=y.device) % config.sequence == 0
            y = torch.cat([first[:, None].to(dtype), y[:, 1:]], dim=1)
        return x + (layers.row_linear(y, self.fc2.to(dtype)) + self.fc2_bias.to(dtype))


def weight_and_bias(rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Parameters of a linear layer, not initialised."""
    return nn.Parameter(torch.empty(rows, columns)), nn.Parameter(torch.zeros(rows))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """fp32 cross entropy of each token."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


class GPT(nn.Module):
    """Token ids [B, S] and targets to the loss of each token, through the exchange that layers.attach named.

    Args:
        config: shape.
        compile_blocks: whether to compile the layers (one graph for all) and the loss.
    """

    def __init__(self, config: ModelConfig, compile_blocks: bool = False) -> None:
        super().__init__()
        self.config = config
        qwen = config.qwen
        self.words = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        self.positions = None if qwen else nn.Parameter(torch.empty(config.sequence, config.hidden))
        self.blocks = nn.ModuleList(
            QwenBlock(qwen, config.sequence)
            if qwen
            else Block(config, bool(config.massive) and layer == MASSIVE_LAYER)
            for layer in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, qwen.norm_epsilon) if qwen else Norm(config.hidden)
        tied = qwen is not None and qwen.tied
        self.output = self.words if tied else nn.Parameter(torch.empty(config.vocabulary, config.hidden))
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
            for block in self.blocks:
                if block.sees_first_token:
                    block.fc2[MASSIVE_CHANNEL % self.config.hidden, 0] = self.config.massive

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
        x = layers.reduce_embedding(rows, ids, config.vocabulary).view(-1, config.sequence, config.hidden)
        x = x if self.positions is None else x + self.positions.to(dtype)
        x = x.view(-1, config.hidden)
        stage = -(-config.layers // config.stages)
        for layer, block in enumerate(self.blocks):
            if layer and layer % stage == 0:
                x = layers.send(x, config.sequence)
            x = block(x)
        x = self.norm(x)
        x = layers.gather(x) if self.sequence_parallel else x
        return self.token_losses(layers.column_linear(x, self.output.to(dtype)), targets.reshape(-1))
