"""Which parameters every tensor-parallel rank holds in whole: its replicas, which must keep equal
bits.

Megatron marks a parameter that tensor parallelism shards by ``tensor_model_parallel``. What has no
mark counts as a replica, is summed or copied over the ranks, and so must be one.
"""

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import to_local_if_dtensor

QUERY_KEY_NORMS = ("q_layernorm", "k_layernorm")
"""In the names of parameters that are replicated, but whose gradients are of a rank's own heads;
megatron-core sums these itself."""


def sharded_without_mark(
    module: torch.nn.Module, data_shards: int = 1
) -> dict[torch.nn.Parameter, str]:
    """Find parameters that tensor parallelism shards although Megatron has not marked them.

    Attention's ``softmax_offset`` is one. Taken for replicas, the ranks' different shards would be
    made equal. The model's checkpoint tells them apart: its ``sharded_state_dict`` says which part
    of a whole tensor a rank saves.

    Args:
        module: a model chunk.
        data_shards: ranks over which torch's FSDP2 shards each parameter in its first dimension; 1
            without FSDP2. These parts are no work of tensor parallelism.

    Returns:
        The parameters, and their names in the module.
    """
    # An entry of the checkpoint holds the parameter's own tensor; under FSDP2 its local shard.
    sharded = {
        id(saved.data)
        for saved in sharded_state_dict_default(module).values()
        if isinstance(saved, ShardedTensor) and _is_sharded(saved, data_shards)
    }
    unmarked = {}
    for name, parameter in module.named_parameters():
        is_marked = getattr(parameter, "tensor_model_parallel", False)
        if id(to_local_if_dtensor(parameter)) in sharded and not is_marked:
            unmarked[parameter] = name
    return unmarked


def _is_sharded(saved: ShardedTensor, data_shards: int) -> bool:
    """Return whether a tensor is in more parts than FSDP2 alone makes of it."""
    # Leading axes stack layers or experts: whole parameters beside each other.
    parts_by_axis = saved.axis_fragmentations[saved.prepend_axis_num :]
    for axis, parts in enumerate(parts_by_axis):
        parts_of_fsdp2 = data_shards if axis == 0 else 1
        if parts > parts_of_fsdp2:
            return True
    return False
