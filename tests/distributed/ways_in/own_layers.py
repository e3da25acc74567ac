"""Layer specs of a user's own, for ``--spec``.

One has a linear layer with another forward, one has a module that only looks like a linear layer.
"""

import functools

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    reduce_from_tensor_model_parallel_region,
)


class ScaledRow(RowParallelLinear):
    """A row-parallel linear whose output is halved: not Megatron's function."""

    def forward(self, input_):
        output, bias = super().forward(input_)
        return 0.5 * output, bias


class OwnRow(torch.nn.Module):
    """A row-parallel linear that only looks like one: it sums over the ranks itself."""

    def __init__(self, input_size, output_size, *, config, init_method, **unused) -> None:
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size // ranks))
        init_method(self.weight)
        self.weight.tensor_model_parallel = True

    def forward(self, input_):
        """``[s, b, h / W] -> [s, b, h]``."""
        return reduce_from_tensor_model_parallel_region(input_ @ self.weight.t()), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return nothing: tests do not save it."""
        return {}


def _spec(linear_fc2):
    """Return Megatron's layer spec with another second linear layer in its MLP."""
    spec = get_gpt_layer_local_spec()
    mlp = spec.submodules.mlp
    if isinstance(mlp, functools.partial):
        submodules = mlp.keywords["submodules"]
    else:
        submodules = mlp.submodules
    submodules.linear_fc2 = linear_fc2
    return spec


scaled = _spec(ScaledRow)
own_row = _spec(OwnRow)
