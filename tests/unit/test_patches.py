"""Patches refuse unexpected symbols and wrap once; torch's Adam is fused where its parameters are on GPUs."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron.compression.patches.communication import _record_gradient_sync
from megatron.compression.patches.gaps import fuse, fuse_torch_adam
from megatron.compression.patches.symbols import PatchError, replace
from tests.distributed.launch import REPO


class Owner:
    """Stands for a megatron-core class."""

    def double(self, value: int) -> int:
        """What is wrapped."""
        return 2 * value


def _plus_one(original):
    return lambda self, value: original(self, value) + 1


def test_replace_wraps_once() -> None:
    """A second replacement wraps the original, not the first replacement."""
    owner = type("Copy", (Owner,), {})
    replace(owner, "double", ("self", "value"), _plus_one)
    assert owner().double(3) == 7
    replace(owner, "double", ("self", "value"), _plus_one)
    assert owner().double(3) == 7
    assert Owner().double(3) == 6


def test_replace_refuses_another_version() -> None:
    """A missing function or parameter fails loudly and changes nothing."""
    owner = type("Copy", (Owner,), {})
    with pytest.raises(PatchError, match="does not exist"):
        replace(owner, "triple", (), _plus_one)
    with pytest.raises(PatchError, match="no parameter factor"):
        replace(owner, "double", ("value", "factor"), _plus_one)
    assert owner().double(3) == 6


def test_replace_refuses_what_another_patch_has_replaced() -> None:
    """Two patches of one symbol would undo each other, whichever came first."""
    owner = type("Copy", (Owner,), {})
    replace(owner, "double", ("value",), _plus_one)
    with pytest.raises(PatchError, match=r"is replaced by .*_plus_one already"):
        replace(owner, "double", ("value",), lambda original: original)
    assert owner().double(3) == 7


def test_patches_load_nothing_heavy() -> None:
    imports = "import sys; from megatron.compression.patches import communication, gaps, loop"
    code = f"{imports}; print({{'torch', 'megatron.core'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("distributed_optimizer", "instances", "expected"),
    [
        (False, 1, [("dp.gradient", "all_reduce", 4000, 4)]),
        (True, 1, [("dp.gradient", "reduce_scatter", 4000, 4)]),
        (
            True,
            2,
            [("dp.gradient", "reduce_scatter", 4000, 2), ("dp.outer", "all_reduce", 2000, 2)],
        ),
    ],
)
def test_gradient_bytes(distributed_optimizer, instances, expected) -> None:
    """One bucket of 4000 bytes over 4 data-parallel ranks."""
    group = SimpleNamespace(
        ddp_config=SimpleNamespace(
            use_distributed_optimizer=distributed_optimizer,
            num_distributed_optimizer_instances=instances,
        ),
        buckets=[SimpleNamespace(grad_data=SimpleNamespace(nbytes=4000))],
        data_parallel_group=SimpleNamespace(size=lambda: 4),
        intra_distributed_optimizer_instance_size=4 // instances,
    )
    calls = []
    _record_gradient_sync(group, False, lambda traffic, _, *call: calls.append((traffic, *call)))
    assert calls == expected


class OnGpu(torch.nn.Parameter):
    """A CPU parameter that says it is on a GPU."""

    is_cuda = True


class OwnAdam(torch.optim.AdamW):
    """A subclass, which may step in its own way."""


def test_adam_is_fused_only_where_every_parameter_is_on_a_gpu() -> None:
    here, there = torch.nn.Parameter(torch.ones(3)), OnGpu(torch.ones(3))
    mixed = torch.optim.AdamW([here, there])
    assert not any(map(fuse, (mixed, OwnAdam([there]), torch.optim.SGD([there]), None)))
    assert mixed.param_groups[0]["fused"] is None
    optimizer = torch.optim.AdamW(
        [{"params": [there]}, {"params": [OnGpu(torch.ones(2))], "lr": 0.1}]
    )
    assert fuse(optimizer) and [group["fused"] for group in optimizer.param_groups] == [True, True]
    unfused = torch.optim.AdamW(
        [{"params": [OnGpu(torch.ones(3))]}, {"params": [OnGpu(torch.ones(2))]}]
    )
    optimizer.load_state_dict(unfused.state_dict())  # a checkpoint of before
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


def test_fusing_adam_is_put_in_once() -> None:
    fuse_torch_adam()
    original = MegatronOptimizer.__init__.__wrapped__
    fuse_torch_adam()
    assert MegatronOptimizer.__init__.__wrapped__ is original
