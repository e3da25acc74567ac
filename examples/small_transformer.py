"""The model and the data of fsdp2.py and ddp.py: a transformer that predicts the next token."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A transformer layer: attention, then an MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[samples, sequence, hidden]`` to the same shape."""
        samples, sequence, hidden = x.shape
        qkv = self.qkv(self.norms[0](x)).view(samples, sequence, 3, self.heads, -1)
        # Each of the three is [samples, heads, sequence, hidden / heads].
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(samples, sequence, hidden))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Predicts the next token.

    Args:
        layers: number of blocks.
        hidden: width of the model; a head of attention has 128 of it, or a quarter.
        vocabulary: number of tokens.
        sequence: longest sequence.
    """

    def __init__(self, layers: int, hidden: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        heads = max(4, hidden // 128)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.output_layer = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens ``[samples, sequence + 1]``: each is predicted from those
        before."""
        inputs = tokens[:, :-1]
        labels = tokens[:, 1:]
        x = self.embedding(inputs) + self.position_embedding.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.output_layer(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int, samples: int, vocabulary: int, sequence: int) -> torch.Tensor:
    """Return this rank's tokens of a step, [samples, sequence + 1].

    Each token is the one before it plus 3, modulo the vocabulary. So there is something to learn.

    Args:
        step: another one has other tokens.
        samples: sequences of a rank.
        vocabulary: number of tokens.
        sequence: tokens that are predicted.
    """
    seed = step * dist.get_world_size() + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    first_tokens = torch.randint(vocabulary, (samples, 1), generator=generator)
    return (first_tokens + 3 * torch.arange(sequence + 1)) % vocabulary
