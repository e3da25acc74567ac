"""The models that are trained, with fp32 weights: a GPT as Megatron's, a Qwen or a Llama.

The GPT has pre-norm, learned positions, GELU, biases and an untied output. All products that
Megatron would parallelise go through layers.py. Shapes: T = batch * sequence tokens, h channels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.compression.huggingface.models import DenseModel
from scripts.accuracy import layers
from scripts.accuracy.settings import RANKS, Setting
from taco_kernels.common import ceil_div


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; the defaults have 111 M parameters with 16384 tokens."""

    vocabulary: int = 16384
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    sequence: int = 1024
    dtype: torch.dtype = torch.bfloat16
    """Type of the activations, and of the weights in products."""
    qwen: DenseModel | None = None
    """A Qwen's or Llama's layers, whose sizes are the same numbers; its own vocabulary is not
    used."""
    ranks: int = RANKS
    """Ranks of tensor parallelism."""
    stages: int = 4
    """Pipeline stages, between which activations are sent where a setting says so."""


class Norm(nn.Module):
    """LayerNorm, or RMSNorm where an epsilon is given. It computes in fp32."""

    def __init__(self, width: int, rms_epsilon: float | None = None) -> None:
        super().__init__()
        self.epsilon = rms_epsilon
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if rms_epsilon is None else None

    def forward(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        if self.epsilon is None:
            y = F.layer_norm(x.float(), shape, self.weight, self.bias)
        else:
            y = F.rms_norm(x.float(), shape, self.weight, self.epsilon)
        return y.to(x.dtype)


class GPTBlock(nn.Module):
    """One transformer layer on [T, h], T = batch * sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h = config.hidden
        self.config = config
        self.sequence_parallel = False
        self.context_parallel = False
        self.norm1 = Norm(h)
        self.norm2 = Norm(h)
        self.qkv, self.qkv_bias = weight_and_bias(3 * h, h)
        self.projection, self.projection_bias = weight_and_bias(h, h)
        self.fc1, self.fc1_bias = weight_and_bias(4 * h, h)
        self.fc2, self.fc2_bias = weight_and_bias(h, 4 * h)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        dtype = x.dtype
        y = self.norm1(x)
        if self.sequence_parallel:
            y = layers.gather(y)
        qkv = layers.column_linear(y, self.qkv.to(dtype)) + self.qkv_bias.to(dtype)
        # Each head has its query, key and value side by side, so that a rank's slice holds whole
        # heads.
        qkv = qkv.view(-1, config.sequence, config.heads, 3, config.hidden // config.heads)
        q, k, v = qkv.unbind(3)
        y = layers.attend(q, k, v, self.context_parallel)
        x = x + (layers.row_linear(y, self.projection.to(dtype)) + self.projection_bias.to(dtype))
        y = self.norm2(x)
        if self.sequence_parallel:
            y = layers.gather(y)
        y = layers.column_linear(y, self.fc1.to(dtype)) + self.fc1_bias.to(dtype)
        # The approximation is Megatron's.
        y = F.gelu(y, approximate="tanh")
        return x + (layers.row_linear(y, self.fc2.to(dtype)) + self.fc2_bias.to(dtype))


def weight_and_bias(rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the parameters of a linear layer: the weight not initialised, the bias zero."""
    return nn.Parameter(torch.empty(rows, columns)), nn.Parameter(torch.zeros(rows))


def angles(model: DenseModel, sequence: int) -> Tensor:
    """Return the cosine and sine of each position's rotations, [2, sequence, 1, d].

    Both halves of a head's d channels have the same angles.
    """
    # Pair i of a head's channels turns by base ** (-2 i / d) for each position.
    powers = torch.arange(0, model.head_dim, 2) / model.head_dim
    angle = torch.arange(sequence)[:, None] / model.rotary_base**powers
    both = torch.cat([angle, angle], dim=-1)
    return torch.stack([both.cos(), both.sin()])[:, :, None]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate queries or keys by their positions, in fp32.

    Args:
        x: [B, S, heads, d].
        cosine: of ``angles``.
        sine: of ``angles``.
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (x.float() * cosine + rotated * sine).to(x.dtype)


class QwenBlock(nn.Module):
    """One transformer layer of a Qwen or a Llama on [T, h].

    Slices of the weights are the ranks' own, of whole query groups: qkv holds one query group after
    the other, and fc1 a gate and a value in turn. The family qwen2 has biases on q, k and v, qwen3
    has norms of q and k, llama neither.
    """

    def __init__(self, model: DenseModel, sequence: int) -> None:
        super().__init__()
        h = model.hidden
        width = model.heads * model.head_dim
        rows = width + 2 * model.groups * model.head_dim
        self.model = model
        self.sequence = sequence
        self.sequence_parallel = False
        self.context_parallel = False
        self.norm1 = Norm(h, model.norm_epsilon)
        self.norm2 = Norm(h, model.norm_epsilon)
        self.qkv = nn.Parameter(torch.empty(rows, h))
        self.qkv_bias = nn.Parameter(torch.zeros(rows)) if model.family == "qwen2" else None
        self.q_norm = None
        self.k_norm = None
        if model.family == "qwen3":
            self.q_norm = Norm(model.head_dim, model.norm_epsilon)
            self.k_norm = Norm(model.head_dim, model.norm_epsilon)
        self.projection = nn.Parameter(torch.empty(h, width))
        self.fc1 = nn.Parameter(torch.empty(2 * model.ffn, h))
        self.fc2 = nn.Parameter(torch.empty(h, model.ffn))
        self.register_buffer("angles", angles(model, sequence), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.sequence_parallel:
            y = layers.gather(y)
        attended = self._attend(y)
        x = x + layers.row_linear(attended, self.projection.to(x.dtype), self.model.groups)
        y = self.norm2(x)
        if self.sequence_parallel:
            y = layers.gather(y)
        gates_and_values = layers.column_linear(y, self.fc1.to(x.dtype)).view(len(y), -1, 2)
        gate, value = gates_and_values.unbind(-1)
        return x + layers.row_linear(F.silu(gate) * value, self.fc2.to(x.dtype))

    def _attend(self, y: Tensor) -> Tensor:
        """Map normalised [T, h] to the attention's output, [T, heads * d]."""
        model = self.model
        heads_of_group = model.heads // model.groups
        qkv = layers.column_linear(y, self.qkv.to(y.dtype), model.groups)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias.to(y.dtype)
        # A group has its queries, one key and one value.
        qkv = qkv.view(-1, self.sequence, model.groups, heads_of_group + 2, model.head_dim)
        q, k, v = (part.flatten(2, 3) for part in qkv.split([heads_of_group, 1, 1], dim=3))
        if self.q_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        cosine, sine = self.angles
        q = rotate(q, cosine, sine)
        k = rotate(k, cosine, sine)
        return layers.attend(q, k, v, self.context_parallel)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the fp32 cross entropy of each token."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


class GPT(nn.Module):
    """Maps token ids [B, S] and targets to the loss of each token.

    It communicates through the exchange that layers.attach has named.

    Args:
        config: the model's shape.
        compile_blocks: whether to compile the layers (one graph for all of them) and the loss.
    """

    def __init__(self, config: ModelConfig, compile_blocks: bool = False) -> None:
        super().__init__()
        self.config = config
        qwen = config.qwen
        self.words = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        self.positions = None
        self.blocks = nn.ModuleList()
        for _ in range(config.layers):
            self.blocks.append(QwenBlock(qwen, config.sequence) if qwen else GPTBlock(config))
        if qwen:
            self.norm = Norm(config.hidden, qwen.norm_epsilon)
        else:
            self.norm = Norm(config.hidden)
            self.positions = nn.Parameter(torch.empty(config.sequence, config.hidden))
        if qwen and qwen.tied:
            self.output = self.words
        else:
            self.output = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        self.sequence_parallel = False
        self.token_losses = token_losses
        if compile_blocks:
            # The blocks share one graph, since they differ only in their weights.
            for block in self.blocks:
                block.compile(dynamic=False)
            self.token_losses = torch.compile(token_losses, dynamic=False)

    def initialise(self, seed: int) -> None:
        """Draw the weights, on all devices the same.

        They are normal with a deviation of 0.02, at the end of a branch smaller by sqrt(2 *
        layers).
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                # Draws follow the order of the parameters.
                if "norm" in name:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                elif parameter.dim() == 1:
                    parameter.zero_()
                else:
                    deviation = 0.02
                    if name.endswith(("projection", "fc2")):
                        deviation = 0.02 / (2 * self.config.layers) ** 0.5
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)

    def use(self, setting: Setting) -> None:
        """Let the layers exchange from now on what a setting's kinds of parallelism exchange."""
        self.sequence_parallel = setting.sequence_parallel
        for block in self.blocks:
            block.sequence_parallel = setting.sequence_parallel
            block.context_parallel = setting.context_parallel

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of tokens, fp32 [B * S]."""
        config = self.config
        ids = ids.reshape(-1)
        rows = self.words[ids].to(config.dtype)
        x = layers.reduce_embedding(rows, ids, config.vocabulary)
        x = x.view(-1, config.sequence, config.hidden)
        if self.positions is not None:
            x = x + self.positions.to(config.dtype)
        x = x.view(-1, config.hidden)
        layers_of_stage = ceil_div(config.layers, config.stages)
        for layer, block in enumerate(self.blocks):
            # The first layer of each later stage gets what the stage before has sent.
            if layer and layer % layers_of_stage == 0:
                x = layers.send(x, config.sequence)
            x = block(x)
        x = self.norm(x)
        if self.sequence_parallel:
            x = layers.gather(x)
        logits = layers.column_linear(x, self.output.to(config.dtype))
        return self.token_losses(logits, targets.reshape(-1))
