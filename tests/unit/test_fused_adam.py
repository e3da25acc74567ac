"""torch's Adam is fused where all its parameters are on GPUs, and nowhere else."""

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron.compression.patches.gaps import fuse, fuse_torch_adam


class OnGpu(torch.nn.Parameter):
    """A CPU parameter that says it is on a GPU."""

    is_cuda = True


class OwnAdam(torch.optim.AdamW):
    """A subclass, which may step in its own way."""


def test_only_where_every_parameter_is_on_a_gpu() -> None:
    here, there = torch.nn.Parameter(torch.ones(3)), OnGpu(torch.ones(3))
    mixed = torch.optim.AdamW([here, there])
    assert not any(map(fuse, (mixed, OwnAdam([there]), torch.optim.SGD([there]), None)))
    assert mixed.param_groups[0]["fused"] is None
    optimizer = torch.optim.AdamW([{"params": [there]}, {"params": [OnGpu(torch.ones(2))], "lr": 0.1}])
    assert fuse(optimizer) and [group["fused"] for group in optimizer.param_groups] == [True, True]
    unfused = torch.optim.AdamW([{"params": [OnGpu(torch.ones(3))]}, {"params": [OnGpu(torch.ones(2))]}])
    optimizer.load_state_dict(unfused.state_dict())  # a checkpoint of before
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


def test_the_patch_is_put_in_once() -> None:
    fuse_torch_adam()
    original = MegatronOptimizer.__init__.__wrapped__
    fuse_torch_adam()
    assert MegatronOptimizer.__init__.__wrapped__ is original
