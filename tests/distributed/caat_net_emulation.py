"""A CAAT-Net's function in one process, to compare ranks with.

Every rank's residual stream lies in one tensor; autograd alone computes the gradients.
"""

import math
import zlib

import torch
import torch.nn.functional as F


class EmulatedCaatNet:
    """A GPT of W residual streams, from the parameters that W tensor-parallel ranks hold.

    Args:
        shards: each rank's parameters by name.
        replicated: names of parameters that all ranks hold in whole: one leaf here; every other
            parameter is a leaf a rank.
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
        self.world_size = len(shards)
        self.heads = heads // self.world_size
        self.groups = groups // self.world_size
        self.shared = shared
        self.norm = norm
        self.gated = gated
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
        """Return a rank's parameter; None where the model lacks it."""
        return self.leaves[rank].get(name, self.common.get(name))

    def logits(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Map token ids ``[b, s]`` to each rank's logits ``[b, s, v / W]``."""
        table = torch.cat([self.parameter(r, _WORDS) for r in range(self.world_size)])
        embedded = F.embedding(tokens, table) + self.common[_POSITIONS][: tokens.shape[1]]
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
        outputs = _WORDS if tied else _OUTPUTS
        return [x @ self.parameter(rank, outputs).t() for rank, x in enumerate(normed)]

    def _block(self, streams: torch.Tensor, norm: str, branch, prefix: str) -> torch.Tensor:
        """Return a branch's outputs ``[W, b, s, h]``.

        Shared channels are summed over the ranks. Private ones are scaled by sqrt(W), which gives
        them the variance of a sum of W terms.

        Args:
            streams: each rank's residual stream, ``[W, b, s, h]``.
            norm: name of the norm before the branch.
            branch: ``_attention`` or ``_mlp``.
            prefix: of the layer's parameters.
        """
        sums = []
        biases = []
        for rank, stream in enumerate(streams):
            output, bias = branch(rank, self._normalise(rank, stream, norm), prefix)
            sums.append(output)
            biases.append(bias)
        partial_sums = torch.stack(sums)
        bias = biases[0]
        if bias is None:
            bias = torch.zeros_like(partial_sums[0, 0, 0])
        shared = partial_sums[..., : self.shared].sum(0).expand(self.world_size, -1, -1, -1)
        private = partial_sums[..., self.shared :] + bias[self.shared :]
        scaled = math.sqrt(self.world_size) * private
        return torch.cat([shared + bias[: self.shared], scaled], dim=-1)

    def _normalise(self, rank: int, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.parameter(rank, name + ".weight")
        if self.norm == "RMSNorm":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
        return F.layer_norm(x, x.shape[-1:], weight, self.parameter(rank, name + ".bias"), 1e-5)

    def _linear(self, rank: int, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.parameter(rank, name + ".weight")
        return F.linear(x, weight, self.parameter(rank, name + ".bias"))

    def _attention(self, rank: int, x: torch.Tensor, prefix: str):
        prefix += "self_attention."
        batch, length, _ = x.shape
        per_group = self.heads // self.groups
        mixed = self._linear(rank, x, prefix + "linear_qkv")
        mixed = mixed.view(batch, length, self.groups, per_group + 2, -1)
        # Each query group: its queries, then one key and one value.
        query = mixed[..., :per_group, :].reshape(batch, length, self.heads, -1)
        key = mixed[..., per_group, :]
        value = mixed[..., per_group + 1, :]
        if self.parameter(rank, prefix + "q_layernorm.weight") is not None:
            query = self._normalise(rank, query, prefix + "q_layernorm")
            key = self._normalise(rank, key, prefix + "k_layernorm")
        key = key.repeat_interleave(per_group, dim=2).transpose(1, 2)
        value = value.repeat_interleave(per_group, dim=2).transpose(1, 2)
        query = query.transpose(1, 2)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        context = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        context = context.transpose(1, 2).reshape(batch, length, -1)
        return self._row_parallel(rank, context, prefix + "linear_proj")

    def _mlp(self, rank: int, x: torch.Tensor, prefix: str):
        hidden = self._linear(rank, x, prefix + "mlp.linear_fc1")
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden)
        return self._row_parallel(rank, hidden, prefix + "mlp.linear_fc2")

    def _row_parallel(self, rank: int, x: torch.Tensor, name: str):
        """Return a rank's partial sum and the bias, which is added after the sum over ranks."""
        weight = self.parameter(rank, name + ".weight")
        bias = self.parameter(rank, name + ".bias")
        return x @ weight.t(), bias


_WORDS = "embedding.word_embeddings.weight"
_OUTPUTS = "output_layer.weight"
_POSITIONS = "embedding.position_embeddings.weight"


def fill_parameters(model, rank: int) -> None:
    """Add noise to every parameter: biases of zero and norms of one would hide faults."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = zlib.crc32(name.encode())
            if getattr(parameter, "tensor_model_parallel", False):
                seed += rank  # replicated parameters stay equal on all ranks
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter))
