"""FSDP2 over codecs, against FSDP2 as it is: losses, bytes, overflows, and what is refused."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from megatron.compression.errors import CompressionConfigError
from megatron.compression.fsdp2 import Fsdp2Compression, attach
from tests.distributed.spawn import spawn
from tests.distributed.transport_audit import TransportAudit

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDTH = 96


class Block(nn.Module):
    """Odd sizes: 3 ranks or 2 divide none of its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 401), nn.GELU(), nn.Linear(401, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def build(
    ranks: int, policy: MixedPrecisionPolicy = BF16, *, nested=False, mesh=None, **options
) -> nn.Module:
    """Two blocks and a head under FSDP2; ``nested``: each block's MLP is a module of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 33))
    mesh = init_device_mesh("cpu", (ranks,)) if mesh is None else mesh
    for block in model[:2]:
        if nested:
            fully_shard(block.mlp, mesh=mesh, mp_policy=policy, **options)
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    return fully_shard(model, mesh=mesh, mp_policy=policy, **options)


def train(model: nn.Module, steps: int, micro_batches: int = 1, sync: bool = True) -> list[float]:
    """Losses of this rank."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    target = torch.randn(WIDTH, 33, generator=torch.Generator().manual_seed(7)) / 10
    for step in range(steps):
        for number in range(micro_batches):
            generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
            x = torch.randn(16, WIDTH, generator=generator)
            model.set_requires_gradient_sync(sync or number == micro_batches - 1)
            loss = (model(x).float() - torch.tanh(x @ target)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def worker(rank: int, ranks: int) -> None:
    plain = train(build(ranks), 30)
    model = build(ranks)
    c = attach(model, "lossless", "none")
    same = train(model, 30)
    assert same == plain, (same, plain)
    print(c.summary(), flush=True)
    model = build(ranks)
    c = attach(model, "lossless", "int8")
    out = train(model, 30)
    print(plain[-1], out[-1], c.summary(), flush=True)
    model = build(ranks)
    c = attach(model, "none", "tagc")
    out = train(model, 30)
    print(plain[-1], out[-1], c.summary(), flush=True)


def test_x(capfd):
    spawn(worker, 2)
    with capfd.disabled():
        print(capfd.readouterr().out)
