"""Checkpoints under ``--use-torch-fsdp2``: which tensors of the model are the optimizer's parameters."""

import pytest
import torch
from megatron.core.dist_checkpointing import optimizer as pairing
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron.compression.patches import gaps
from tests.unit.one_rank import DEVICE, one_rank

__all__ = ["one_rank"]


def to_local_of_torch_2_13(self: DTensor) -> torch.Tensor:
    """Return a new tensor at each call of a parameter, as torch 2.13 does without gradients."""
    local = self._local_tensor
    return local.view_as(local) if isinstance(self, torch.nn.Parameter) else local


@pytest.mark.slow
def test_parameters_are_paired_under_torch_2_13(monkeypatch) -> None:
    """Without the repair none is, and saving ends in ``KeyError: 0``. Older torches have a stand-in."""
    model = fully_shard(torch.nn.Linear(4, 6), mesh=init_device_mesh(DEVICE, (1,)))
    sharded = {}
    for name, parameter in model.named_parameters():
        parameter.is_torch_fsdp2_param = True
        sharded[name] = make_tp_sharded_tensor_for_checkpoint(parameter, name)

    def paired() -> dict:
        return pairing.get_param_id_to_sharded_param_map(sharded, model.parameters())

    original = pairing.to_local_if_dtensor
    gaps.make_torch_optimizers_resumable()
    monkeypatch.setattr(DTensor, "to_local", to_local_of_torch_2_13)
    assert [paired()[number].key for number in range(2)] == ["weight", "bias"]
    weight = torch.ones(2)
    assert pairing.to_local_if_dtensor(weight) is weight
    # ``__wrapped__``: another test of this process may have asked for the repair before.
    monkeypatch.setattr(pairing, "to_local_if_dtensor", getattr(original, "__wrapped__", original))
    assert not paired()
