"""Layer specs of a user's own, for ``--spec``: a linear with another forward, one that is none."""

import functools

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    reduce_from_tensor_model_parallel_region,
)


class ScaledRow(RowParallelLinear):
    """Computes something else."""

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
        """Not saved here."""
        return {}


def _spec(**linears):
    spec = get_gpt_layer_local_spec()
    for name, linear in linears.items():
        part = (
            spec.submodules.mlp if name.startswith("linear_fc") else spec.submodules.self_attention
        )
        submodules = (
            part.keywords["submodules"] if isinstance(part, functools.partial) else part.submodules
        )
        setattr(submodules, name, linear)
    return spec


scaled = _spec(linear_fc2=ScaledRow)
own = _spec(linear_fc2=OwnRow)
