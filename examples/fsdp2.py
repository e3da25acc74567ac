"""Training of a small transformer under PyTorch's FSDP2, with compressed weights and gradients.

torchrun --nproc-per-node 2 examples/fsdp2.py --gather lossless --reduce int8 --steps 20

Two lines are ours: ``attach`` after ``fully_shard``, and ``summary``. Without a GPU the ranks are processes.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.compression.errors import one_line_errors
from megatron.compression.fsdp2 import attach

SIZES = {"--layers": 2, "--hidden": 128, "--vocabulary": 256, "--sequence": 64, "--samples": 4}


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[samples, sequence, hidden]`` to the same."""
        q, k, v = (
            self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(
        self, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.norm, self.output_layer = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, vocabulary, bias=False),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of tokens ``[samples, sequence + 1]``."""
        x = self.embedding(tokens[:, :-1]) + self.position_embedding.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(
            self.output_layer(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def main() -> None:
    """Train, and print each step's loss and time, and what has been sent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gather", default="lossless", help="codec of the weights; none: uncompressed"
    )
    parser.add_argument(
        "--reduce", default="int8", help="of the gradients, or tagc; none: uncompressed"
    )
    for name, size in {**SIZES, "--seed": 1, "--steps": 20}.items():
        parser.add_argument(name, type=int, default=size)
    parser.add_argument(
        "--checkpoint", type=Path, help="folder to resume from, if it has one, and save to"
    )
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    torch.manual_seed(options.seed)
    heads = max(4, options.hidden // 128)
    model = Transformer(
        options.layers, options.hidden, heads, options.vocabulary, options.sequence
    ).to(kind)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    compression = attach(model, options.gather, options.reduce)
    optimizer, done = (
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        torch.zeros((), dtype=torch.int64),
    )

    def state() -> dict:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "done": done, "compression": compression}

    if options.checkpoint is not None and (options.checkpoint / ".metadata").exists():
        saved = state()
        dcp.load(saved, checkpoint_id=options.checkpoint)
        parts = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
        set_state_dict(model, optimizer, **parts)
        compression.iteration = int(done)
    for step in range(int(done), int(done) + options.steps):
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        first = torch.randint(options.vocabulary, (options.samples, 1), generator=generator)
        tokens = (
            first + 3 * torch.arange(options.sequence + 1)
        ) % options.vocabulary  # each by the last
        loss = model(tokens.to(kind))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ms = f"{loss.item():.4f}, {1e3 * (time.perf_counter() - start):.0f} ms"
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {ms}; {compression.summary()}", flush=True)
        done += 1
    if options.checkpoint is not None:
        dcp.save(state(), checkpoint_id=options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_line_errors():
        main()
