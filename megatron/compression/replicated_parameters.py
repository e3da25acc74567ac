"""Which parameters every tensor-parallel rank holds in whole, and what is particular about some of them."""

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.utils import sharded_state_dict_default

QUERY_KEY_NORMS = ("q_layernorm", "k_layernorm")
"""In the names of parameters that are replicated, but whose gradients are of a rank's own heads;
megatron-core sums these itself."""


def cut_without_mark(module: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Parameters that are cut over tensor parallelism without Megatron's mark ``tensor_model_parallel``, such
    as attention's ``softmax_offset``, with their names; by the model's ``sharded_state_dict``, by which
    checkpoints are cut."""
    cut = {
        id(saved.data)
        for saved in sharded_state_dict_default(module).values()
        if isinstance(saved, ShardedTensor)
        and any(count > 1 for count in saved.axis_fragmentations[saved.prepend_axis_num :])
    }
    return {
        parameter: name
        for name, parameter in module.named_parameters()
        if id(parameter) in cut and not getattr(parameter, "tensor_model_parallel", False)
    }
