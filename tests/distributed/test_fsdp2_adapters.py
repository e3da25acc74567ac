"""FSDP2 groups of several types: LoRA adapters in fp32 beside frozen weights in bf16."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron.compression.fsdp2 import attach
from tests.distributed.spawn import spawn

WIDTH = 33
"""Odd, so that fp32 values begin in a gather's row at addresses that no fp32 tensor may have."""
RANK = 3
"""Of the adapters."""


class Adapted(nn.Module):
    """A frozen linear layer and norm in bf16, and an adapter in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.lora_a = nn.Linear(WIDTH, RANK, bias=False)
        self.norm = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
        self.lora_b = nn.Linear(RANK, WIDTH, bias=False)
        self.base.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x.to(self.base.weight.dtype)
        adapted = self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype)))
        return x + self.base(low) * self.norm + adapted


def build(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """Return two blocks under ``fully_shard``, the same weights each time."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted())
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())


def losses(model: nn.Module, steps: int = 6) -> list[float]:
    """Train the adapters and return this rank's losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    result = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)  # the same data on all ranks
        x = torch.randn(16, WIDTH, generator=generator)
        loss = (model(x).float() - torch.tanh(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def adapters_worker(rank: int, ranks: int) -> dict:
    """By whether FSDP casts: losses uncompressed, with lossless weights and with int8, and bytes."""
    mesh = init_device_mesh("cpu", (ranks,))
    results = {}
    for name, policy in (("as they are", None), ("cast to bf16", BF16)):
        by_setting = {"none": losses(build(mesh, policy))}
        for gather, reduce in (("lossless", "none"), ("lossless", "int8"), ("int8", "int8")):
            model = build(mesh, policy)
            compression = attach(model, gather, reduce, log=lambda line: None)
            by_setting[f"{gather} {reduce}"] = losses(model)
        totals = compression.run.ledger.totals()
        results[name] = by_setting, totals, compression.summary()
        compression.close()
    return results


@pytest.mark.parametrize("policy", ["as they are", "cast to bf16"])
def test_adapters_beside_frozen_weights_of_another_type(adapters: list[dict], policy: str) -> None:
    """Lossless gathers change no loss; each type is gathered by itself."""
    for rank in adapters:
        by_setting, totals, summary = rank[policy]
        exact = by_setting["none"]
        assert exact[-1] != exact[0]
        assert by_setting["lossless none"] == exact
        for setting in ("lossless int8", "int8 int8"):
            assert by_setting[setting] != exact
            torch.testing.assert_close(by_setting[setting], exact, rtol=0.02, atol=0)
        sent, uncompressed = totals["dp.weight"]["compressed"]
        assert 0 < sent < 0.7 * uncompressed
        assert "MB of buffers" in summary


@pytest.fixture(scope="module")
def adapters() -> list[dict]:
    """Results of ``adapters_worker`` by rank."""
    return spawn(adapters_worker, 2)


def copies_worker(rank: int, ranks: int) -> None:
    """Two meshes of two ranks hold the model: norms have the same bits on both, matrices are
    rounded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))["shards"]
    model = build(mesh)
    exact = [block.base.weight.full_tensor().clone() for block in model]
    norms = [block.norm.full_tensor().clone() for block in model]
    attach(model, "int8", "int8", log=lambda line: None)
    for number, block in enumerate(model):
        block.unshard()
        assert torch.equal(block.norm, norms[number])
        assert not torch.equal(block.base.weight, exact[number])
        torch.testing.assert_close(block.base.weight, exact[number], rtol=0.05, atol=0.01)
        block.reshard()
    dist.barrier()


def test_norms_that_other_ranks_hold_too_are_gathered_exactly() -> None:
    spawn(copies_worker, 4)
