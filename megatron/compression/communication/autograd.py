"""A function of one tensor with a backward of its own."""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

Tensors = Callable[[torch.Tensor], torch.Tensor]


class WithBackward(torch.autograd.Function):
    """``there`` in the forward, ``back`` for the gradient: most of them communicate."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, there: Tensors, back: Tensors) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        return ctx.back(grad_output), None, None
