"""A linear layer that communicates as TE's does, by names of this module."""

import torch

from transformer_engine.pytorch.distributed import (
    allreduce,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
)
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, add_weight_gradient, plain


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.module, group = module, module.tp_group
        ctx.save_for_backward(x, weight)
        if module.parallel_mode == "column":
            if module.sequence_parallel:
                x, _ = gather_along_first_dim(x, group, quantizer=module.quantizer)
            return plain(x) @ weight.t()
        out = x @ weight.t()
        if module.sequence_parallel:
            out, _ = reduce_scatter_along_first_dim(out, group)
        else:
            out, _ = allreduce(out, group)
        return out

    @staticmethod
    def backward(ctx, grad_output):
        (x, weight), module = ctx.saved_tensors, ctx.module
        row = module.parallel_mode == "row"
        grad_output = TransformerEngineBaseModule.grad_output_preprocess(module, grad_output, row)
        gathering = summing = None
        if not row and module.sequence_parallel:
            x, gathering = gather_along_first_dim(
                x, module.tp_group, async_op=True, quantizer=module.quantizer
            )
        grad_x = grad_output @ weight
        if not row and module.sequence_parallel:
            grad_x, summing = reduce_scatter_along_first_dim(grad_x, module.tp_group, async_op=True)
        elif not row:
            grad_x, summing = allreduce(grad_x, module.tp_group, async_op=True)
        if gathering is not None:
            gathering.wait()
        grad_weight = add_weight_gradient(module, plain(x), grad_output)
        if summing is not None:
            summing.wait()
        return grad_x, grad_weight, None


class Linear(TransformerEngineBaseModule):
    """Column- or row-parallel."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Linear.apply(x, self.weight, self), None
