"""A norm and a column-parallel linear layer in one autograd function, with names of its own."""

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.distributed import (
    allreduce,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
)
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    add_weight_gradient,
    plain,
)


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.module = module
        normed = F.rms_norm(x, x.shape[-1:], eps=1e-5)
        ctx.save_for_backward(x, weight)
        if module.sequence_parallel:
            normed, _ = gather_along_first_dim(normed, module.tp_group, quantizer=module.quantizer)
        return plain(normed) @ weight.t()

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        module = ctx.module
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            normed = F.rms_norm(x, x.shape[-1:], eps=1e-5)
        total = normed.detach()
        gathering = None
        if module.sequence_parallel:
            total, gathering = gather_along_first_dim(
                total, module.tp_group, async_op=True, quantizer=module.quantizer
            )
        grad = grad_output @ weight
        if module.sequence_parallel:
            grad, summing = reduce_scatter_along_first_dim(grad, module.tp_group, async_op=True)
        else:
            grad, summing = allreduce(grad, module.tp_group, async_op=True)
        if gathering is not None:
            gathering.wait()
        grad_weight = add_weight_gradient(module, plain(total), grad_output)
        summing.wait()
        (grad_input,) = torch.autograd.grad(normed, x, grad)
        return grad_input, grad_weight, None


class LayerNormLinear(TransformerEngineBaseModule):
    """Column-parallel, behind a norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LayerNormLinear.apply(x, self.weight, self)
