"""torch's DDP over codecs, against DDP as it is: gradients, bytes, memories, settings, refusals."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from megatron.compression.ddp import DdpCompression, attach
from megatron.compression.errors import CompressionConfigError
from tests.distributed.launch import UNKNOWN
from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import digest, same_everywhere
from tests.distributed.transport_audit import TransportAudit, total_of

WIDTH = 64
DEVICE = "cpu"
"""Of the models; tests/gpu sets another one."""


class Block(nn.Module):
    """Its sizes do not divide by the ranks; an MLP is what tagc compresses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 401), nn.GELU(), nn.Linear(401, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Two blocks and a head; ``spare`` is used where an input's first value is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 33)

    def forward(self, x: torch.Tensor, use_spare: bool = True) -> torch.Tensor:
        dtype = self.blocks[0].norm.weight.dtype
        x = x.to(dtype)
        for block in self.blocks:
            x = block(x)
        if use_spare:
            x = x + self.spare(x)
        return self.head(x.to(self.head.weight.dtype)).float()


def build(change: Callable[[nn.Module], None] | None = None, **options) -> DistributedDataParallel:
    """Return the model under DDP. Its one bucket becomes several after the first iteration."""
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    if change is not None:
        change(model)
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.15, **options})


def inputs(step: int, rank: int | None = None) -> torch.Tensor:
    """Return a batch of this rank, ``[16, width]``."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, WIDTH, generator=generator).to(DEVICE)


def loss_of(model: nn.Module, step: int, **options) -> torch.Tensor:
    x = inputs(step)
    return (model(x, **options) - torch.tanh(x[:, :33])).square().mean()


def train(model: nn.Module, steps: int, optimizer=None, first: int = 0) -> list[float]:
    """Return this rank's losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients_of(model: nn.Module) -> torch.Tensor:
    """Return all gradients, fp32 ``[n]``; zeros where there is none."""
    parts = []
    for parameter in model.parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        parts.append(gradient.detach().float().view(-1))
    return torch.cat(parts)


def distance(gradients: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradients - exact).norm() / exact.norm())


def quiet(line: str) -> None:
    """A log that nobody reads."""


def kinds(compression: DdpCompression) -> set[str]:
    """Why bytes of gradients were sent as they were."""
    totals = compression.run.ledger.totals()["dp.gradient"]
    return {kind for kind, pair in totals.items() if any(pair)}


def halves(model: nn.Module) -> None:
    """Blocks in bf16, a head in fp32: buckets of two types."""
    model.blocks.to(torch.bfloat16)
    model.spare.to(torch.bfloat16)


CASES = {
    "int8": ("int8", {}, {}, 0.02),
    "sdp4bit": ("sdp4bit", {}, {}, 0.02),
    "lossless": ("lossless", {}, {}, 1e-6),
    "views": ("int8", {"gradient_as_bucket_view": True}, {}, 0.02),
    "static graph": ("int8", {"static_graph": True}, {}, 0.02),
    "several types": ("int8", {"change": halves}, {}, 0.02),
    "unused": ("int8", {"find_unused_parameters": True}, {"use_spare": False}, 0.02),
}
"""Codec, DDP's settings, what ranks other than the first call the model with, and the tolerance."""


def case_worker(rank: int, ranks: int, name: str) -> str:
    reduce, options, call, tolerance = CASES[name]
    exact = build(**options)
    model = build(**options)
    lines: list[str] = []
    compression = attach(model, reduce, log=lines.append)
    call = {} if rank == 0 else call
    for step in range(3):
        loss_of(exact, step, **call).backward()
        with TransportAudit() as audit:
            loss_of(model, step, **call).backward()
        # The second pass has other buckets than the first, where DDP makes them anew.
        assert distance(gradients_of(model), gradients_of(exact)) < tolerance
        exact.zero_grad()
        model.zero_grad(set_to_none=step == 1)
    assert same_everywhere(digest(gradients_of(model)))
    assert kinds(compression) == {"compressed"}
    assert len(lines) == 2, lines  # and none of the first step's audit
    counted = total_of(compression.run.ledger.rows())
    # Of three steps, and the last one's; the first has other buckets, and so other padding.
    for operation in ("all_to_all", "all_gather"):
        assert abs(counted[operation] - 3 * audit.sent[operation]) < 0.05 * counted[operation] + 1
    return compression.summary()


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_ddp(name: str) -> None:
    """One backward pass each time, in two layouts of buckets: near DDP's own gradients, the same
    bits on all three ranks."""
    summaries = spawn(case_worker, 3, name)
    assert summaries[0].startswith("sent dp.gradient ")
