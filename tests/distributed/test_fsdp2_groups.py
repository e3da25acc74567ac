"""Several parameter groups in one module of FSDP2, each over a mesh of its own: torch 2.13 and newer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from megatron.compression.fsdp2 import attach
from tests.distributed.spawn import spawn

pytestmark = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"),
    reason="one group a module in this torch; scripts/test_versions.sh 2.13.0 3.7.1 runs it",
)
WIDTH = 64


class MixtureBlock(nn.Module):
    """A dense layer, sharded over all ranks, and experts that each rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(torch.relu(self.dense(x)))


def build(ranks: int) -> nn.Module:
    """Two blocks of two groups each."""
    everyone = init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("copies", "alone"))["alone"]
    over_all = _fsdp_common.FSDPMeshInfo(mesh=everyone, shard_mesh_dim=0)
    over_one = _fsdp_common.FSDPMeshInfo(mesh=alone, shard_mesh_dim=0)
    torch.manual_seed(0)
    model = nn.Sequential(MixtureBlock(), MixtureBlock())
    for block in model:
        experts = set(block.experts.parameters())

        def placement(parameter: nn.Parameter, experts=experts):
            mesh = over_one if parameter in experts else over_all
            return _fsdp_common.ShardPlacementResult(placement=Shard(0), mesh_info=mesh)

        fully_shard(block, mesh=everyone, shard_placement_fn=placement)
    return fully_shard(model, mesh=everyone)


def losses(model: nn.Module, steps: int) -> list[float]:
    """Train and return this rank's losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    result = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)  # the same data on all ranks
        x = torch.randn(16, WIDTH, generator=generator)
        loss = (model(x) - torch.tanh(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


def groups_worker(rank: int, ranks: int) -> None:
    exact = losses(build(ranks), 6)
    model = build(ranks)
    compression = attach(model, gather="lossless", reduce="none", log=lambda line: None)
    assert len(compression.groups) == 4
    assert losses(model, 6) == exact
    model = build(ranks)
    compression = attach(model, gather="lossless", reduce="int8", log=lambda line: None)
    compressed = losses(model, 6)
    assert compressed != exact
    torch.testing.assert_close(compressed, exact, rtol=0.02, atol=0)
    totals = compression.run.ledger.totals()
    for traffic in ("dp.weight", "dp.gradient"):
        sent, uncompressed = totals[traffic]["compressed"]
        assert 0 < sent < uncompressed
    dist.barrier()


def test_each_group_is_compressed_over_its_own_mesh() -> None:
    spawn(groups_worker, 2)
