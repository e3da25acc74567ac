"""Which parameter groups ``attach`` finds: with stand-ins for torch's FSDP2 of several versions."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from megatron.compression import CompressionConfigError
from megatron.compression.fsdp2 import parameter_group
from megatron.compression.fsdp2.parameter_group import parameter_groups


class ShardedBlock(torch.nn.Module):
    """A module as ``fully_shard`` leaves it, with a state of one version of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 4, bias=False)
        self.experts = torch.nn.Linear(4, 4, bias=False)
        self.state: object = None

    def _get_fsdp_state(self) -> object:
        return self.state


class SeveralGroups:
    """The state of a module from torch 2.13 on, whose old name raises."""

    def __init__(self, groups: list) -> None:
        self._fsdp_param_groups = groups

    @property
    def _fsdp_param_group(self):
        raise AssertionError("there are several groups")


class OneGroup:
    """The state of a module up to torch 2.12."""

    def __init__(self, group: object) -> None:
        self._fsdp_param_group = group


def group_of(module: torch.nn.Module, name: str = "weight", **changes: object) -> SimpleNamespace:
    """Return a stand-in for FSDPParamGroup that has one parameter of a module."""
    parameter = getattr(module, name)
    shard = SimpleNamespace(
        sharded_param=parameter,
        padded_sharded_param_size=parameter.shape,
        _sharded_param_data=parameter.detach().flatten(),
        _sharded_local_tensor=parameter.detach(),
        _module_info=SimpleNamespace(module=module, param_name=name),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    group = SimpleNamespace(
        fsdp_params=[shard],
        modules=(module,),
        mesh_info=None,
        post_forward_mesh_info=None,
        offload_policy=None,
        device=torch.device("cpu"),
        gradient_divide_factor=None,
        all_reduce_grads=True,
        _all_gather_comm=DefaultAllGather(),
        _reduce_scatter_comm=DefaultReduceScatter(),
        _all_reduce_hook=None,
    )
    vars(group).update(changes)
    return group


@pytest.fixture
def block(monkeypatch) -> ShardedBlock:
    monkeypatch.setattr(parameter_group, "FSDPModule", ShardedBlock)
    return ShardedBlock()


def test_several_groups_of_a_module_are_found(block: ShardedBlock) -> None:
    """torch 2.13 and newer: experts are sharded over another mesh than what is dense."""
    block.state = SeveralGroups([group_of(block.dense), group_of(block.experts)])
    groups = parameter_groups(torch.nn.Sequential(block))
    assert [group.names for group in groups] == [("0.dense.weight",), ("0.experts.weight",)]
    assert groups[0].gather_dtypes == {torch.bfloat16}
    assert groups[0].gradient_dtype == torch.bfloat16


def test_the_group_of_a_module_is_found(block: ShardedBlock) -> None:
    """Up to torch 2.12; None: the module has no parameters of its own."""
    block.state = OneGroup(group_of(block.dense))
    [group] = parameter_groups(block)
    assert group.names == ("dense.weight",)
    block.state = OneGroup(None)
    with pytest.raises(CompressionConfigError, match="call fully_shard"):
        parameter_groups(block)


@pytest.mark.parametrize("name", ["_reduce_scatter_comm", "mp_policy", "_sharded_param_data"])
def test_a_missing_name_is_refused_with_the_version(
    name: str, block: ShardedBlock, monkeypatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    group = group_of(block.dense)
    owner = group if hasattr(group, name) else group.fsdp_params[0]
    delattr(owner, name)
    block.state = SeveralGroups([group])
    with pytest.raises(CompressionConfigError, match=rf"torch 2\.99\.0 has no {name}, which"):
        parameter_groups(block)


def test_gradients_of_several_types_are_refused(block: ShardedBlock, monkeypatch) -> None:
    """torch 2.15 packs them by type, in another order than the parameters."""
    monkeypatch.setattr(parameter_group, "FSDPMeshInfo", object)
    group = group_of(block.dense)
    other = group_of(block.experts).fsdp_params[0]
    other.sharded_grad_dtype = torch.float64
    group.fsdp_params.append(other)
    block.state = SeveralGroups([group])
    [found] = parameter_groups(block)
    reason = found.refusal(lossless=False, gathers=False, memory=False)
    assert reason.startswith("has gradients of several types; give fully_shard()")
    del other.sharded_grad_dtype
    assert found.refusal(lossless=False, gathers=False, memory=False) is None


def test_gradients_are_reduced_in_the_type_that_they_are_kept_in(block: ShardedBlock) -> None:
    """From torch 2.15 on; before, in the type of the weights' computation."""
    group = group_of(block.dense)
    block.state = SeveralGroups([group])
    [found] = parameter_groups(block)
    assert found.gradient_dtype == torch.bfloat16
    group.fsdp_params[0].sharded_grad_dtype = torch.float32
    assert found.gradient_dtype == torch.float32
    group.fsdp_params[0].mp_policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    assert found.gradient_dtype == torch.float16
