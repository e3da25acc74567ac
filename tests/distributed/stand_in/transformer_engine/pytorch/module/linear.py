"""A row-parallel linear layer that communicates as TE's does, by names of this module."""

import torch

from transformer_engine.pytorch.distributed import (
    allreduce,
    gather_along_first_dim,  # noqa: F401  (of column-parallel ones)
    reduce_scatter_along_first_dim,
)
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, add_weight_gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.module = module
        ctx.save_for_backward(x, weight)
        total = reduce_scatter_along_first_dim if module.sequence_parallel else allreduce
        output, _ = total(x @ weight.t(), module.tp_group)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        module = ctx.module
        grad_output = TransformerEngineBaseModule.grad_output_preprocess(module, grad_output, True)
        return grad_output @ weight, add_weight_gradient(module, x, grad_output), None


class Linear(TransformerEngineBaseModule):
    """A row-parallel linear layer."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Linear.apply(x, self.weight, self), None
