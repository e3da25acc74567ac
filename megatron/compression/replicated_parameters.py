"""Which parameters every tensor-parallel rank holds in whole, and what is particular about some of
them."""

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import to_local_if_dtensor

QUERY_KEY_NORMS = ("q_layernorm", "k_layernorm")
"""In the names of parameters that are replicated, but whose gradients are of a rank's own heads;
megatron-core sums these itself."""


def cut_without_mark(
    module: torch.nn.Module, data_shards: int = 1
) -> dict[torch.nn.Parameter, str]:
    """Find parameters that tensor parallelism cuts without Megatron's mark
    ``tensor_model_parallel``.

    Attention's ``softmax_offset`` is one. They are told by the model's ``sharded_state_dict``, by
    which checkpoints are cut.

    Args:
        module: a model chunk.
        data_shards: ranks that torch's FSDP2 shards each parameter over, in its first dimension; 1
            without.

    Returns:
        The parameters, and their names in the module.
    """
    cut = {
        id(saved.data)
        for saved in sharded_state_dict_default(module).values()
        if isinstance(saved, ShardedTensor) and _is_cut(saved, data_shards)
    }
    return {
        parameter: name
        for name, parameter in module.named_parameters()
        # of FSDP2's parameters checkpoints hold the local shard
        if id(to_local_if_dtensor(parameter)) in cut
        and not getattr(parameter, "tensor_model_parallel", False)
    }


def _is_cut(saved: ShardedTensor, data_shards: int) -> bool:
    """Return whether more ranks than those of FSDP2 hold pieces of a tensor."""
    # Leading axes are of stacked layers or experts, which are no cut of a parameter.
    pieces = saved.axis_fragmentations[saved.prepend_axis_num :]
    return any(count > (data_shards if axis == 0 else 1) for axis, count in enumerate(pieces))
