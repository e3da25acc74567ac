"""A CAAT-Net's function in one process: every rank's stream in one tensor, gradients by autograd alone."""

import math
import zlib

import torch
import torch.nn.functional as F


class EmulatedCaatNet:
    """A GPT of W residual streams, from the parameters that W tensor-parallel ranks hold.

    Args:
        shards: each rank's parameters by name. What all hold in whole is one leaf here, the rest one a rank.
        replicated: names of the former.
        heads: attention heads of all ranks together.
        groups: query groups of all ranks together.
        shared: synchronised channels.
        norm: LayerNorm or RMSNorm.
        gated: SwiGLU in place of GELU.
    """

    def __init__(
        self,
        shards: list[dict],
        replicated: set[str],
        heads: int,
        groups: int,
        shared: int,
        norm: str,
        gated: bool = False,
    ) -> None:
        self.world_size, self.shared, self.norm, self.gated = len(shards), shared, norm, gated
        self.heads, self.groups = heads // self.world_size, groups // self.world_size
        self.leaves = [
            {
                name: value.clone().requires_grad_()
                for name, value in shard.items()
                if name not in replicated
            }
            for shard in shards
        ]
        self.common = {name: shards[0][name].clone().requires_grad_() for name in replicated}

    def parameter(self, rank: int, name: str) -> torch.Tensor | None:
        """A rank's parameter; None where the model has no such one."""
        return self.leaves[rank].get(name, self.common.get(name))

    def logits(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Token ids ``[b, s]`` to each rank's ``[b, s, v / W]``."""
        words = torch.cat([self.parameter(r, _WORDS) for r in range(self.world_size)])
        embedded = F.embedding(tokens, words) + self.common[_POSITIONS][: tokens.shape[1]]
        streams = torch.stack([embedded] * self.world_size)
        layer = 0
        while f"decoder.layers.{layer}.mlp.linear_fc2.weight" in self.leaves[0]:
            prefix = f"decoder.layers.{layer}."
            streams = streams + self._block(
                streams, prefix + "input_layernorm", self._attention, prefix
            )
            streams = streams + self._block(
                streams, prefix + "pre_mlp_layernorm", self._mlp, prefix
            )
            layer += 1
        normed = [self._normalise(r, s, "decoder.final_layernorm") for r, s in enumerate(streams)]
        tied = self.parameter(0, _OUTPUTS) is None
        return [
            x @ self.parameter(r, _WORDS if tied else _OUTPUTS).t() for r, x in enumerate(normed)
        ]

    def _block(self, streams: torch.Tensor, norm: str, branch, prefix: str) -> torch.Tensor:
        """A branch's outputs ``[W, b, s, h]``: shared channels summed over ranks, private ones scaled."""
        sums, biases = zip(
            *(branch(r, self._normalise(r, s, norm), prefix) for r, s in enumerate(streams)),
            strict=True,
        )
        partial_sums = torch.stack(sums)
        bias = biases[0] if biases[0] is not None else torch.zeros_like(partial_sums[0, 0, 0])
        shared = partial_sums[..., : self.shared].sum(0).expand(self.world_size, -1, -1, -1)
        private = partial_sums[..., self.shared :] + bias[self.shared :]
        return torch.cat(
            [shared + bias[: self.shared], math.sqrt(self.world_size) * private], dim=-1
        )

    def _normalise(self, rank: int, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.parameter(rank, name + ".weight")
        if self.norm == "RMSNorm":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
        return F.layer_norm(x, x.shape[-1:], weight, self.parameter(rank, name + ".bias"), 1e-5)

    def _linear(self, rank: int, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(
            x, self.parameter(rank, name + ".weight"), self.parameter(rank, name + ".bias")
        )

    def _attention(self, rank: int, x: torch.Tensor, prefix: str):
        prefix += "self_attention."
        batch, length, _ = x.shape
        per_group = self.heads // self.groups
        mixed = self._linear(rank, x, prefix + "linear_qkv")
        mixed = mixed.view(batch, length, self.groups, per_group + 2, -1)
        query, key, value = (
            mixed[..., :per_group, :],
            mixed[..., per_group, :],
            mixed[..., per_group + 1, :],
        )
        query = query.reshape(batch, length, self.heads, -1)
        if self.parameter(rank, prefix + "q_layernorm.weight") is not None:
            query = self._normalise(rank, query, prefix + "q_layernorm")
            key = self._normalise(rank, key, prefix + "k_layernorm")
        key, value = (
            part.repeat_interleave(per_group, dim=2).transpose(1, 2) for part in (key, value)
        )
        query = query.transpose(1, 2)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        context = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        context = context.transpose(1, 2).reshape(batch, length, -1)
        name = prefix + "linear_proj"
        return context @ self.parameter(rank, name + ".weight").t(), self.parameter(
            rank, name + ".bias"
        )

    def _mlp(self, rank: int, x: torch.Tensor, prefix: str):
        hidden = self._linear(rank, x, prefix + "mlp.linear_fc1")
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden)
        name = prefix + "mlp.linear_fc2"
        return hidden @ self.parameter(rank, name + ".weight").t(), self.parameter(
            rank, name + ".bias"
        )


_WORDS = "embedding.word_embeddings.weight"
_OUTPUTS = "output_layer.weight"
_POSITIONS = "embedding.position_embeddings.weight"


def fill_parameters(model, rank: int) -> None:
    """Values without symmetry for every parameter: biases begin at zero and norms at one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            place = rank if getattr(parameter, "tensor_model_parallel", False) else 0
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + place)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter))
