"""A mixture of experts whose tokens travel: the four legs of expert parallelism go through the exchange.

    y = sum over the k chosen experts e of combine(p_e fc2_e(gelu(fc1_e(dispatch(x)))))

Dispatch and combine send rows (tokens) and round each of them once, forward and backward; p, from a softmax
over the chosen experts' logits, stays exact, as the router does. Dropless: rows are sorted by expert. Every
row is sent, also those whose expert would be on their own rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.accuracy import layers


@layers.operator("dispatch")
def dispatch(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Rows [k T, h] at their experts, of tokens [T, h]: row i is token ``tokens[i]``."""
    return layers.attached().gather(x.contiguous(), "dispatch")[tokens]


@layers.operator("dispatch_backward")
def dispatch_backward(grad: Tensor, places: Tensor) -> Tensor:
    """Gradient of the tokens: each one's k rows come back, and are summed."""
    rows = layers.attached().gather(grad.contiguous(), "dispatch_backward")
    return rows[places].sum(1)


@layers.operator("combine")
def combine(rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Each token's rows [k T, h] come back from their experts, summed: [T, h]; ``places`` [T, k]."""
    return layers.attached().gather(rows.contiguous(), "combine")[places].sum(1)


@layers.operator("combine_backward")
def combine_backward(grad: Tensor, tokens: Tensor) -> Tensor:
    """Gradient of the rows, sent to their experts."""
    return layers.attached().gather(grad.contiguous(), "combine_backward")[tokens]


@layers.operator("grouped_linear")
def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """rows [R, n] of experts one behind the other, ``counts`` [E] of each, times their weights [E, m, n]."""
    parts = zip(rows.split(counts.tolist()), weight, strict=True)
    return torch.cat([part @ own.t() for part, own in parts])


@layers.operator("grouped_linear_backward")
def grouped_linear_backward(grad: Tensor, rows: Tensor, weight: Tensor, counts: Tensor) -> list[Tensor]:
    """Gradients of rows and weight."""
    sizes = counts.tolist()
    grads = grad.contiguous().split(sizes)
    return [
        torch.cat([part @ own for part, own in zip(grads, weight, strict=True)]),
        torch.stack([part.t() @ own for part, own in zip(grads, rows.split(sizes), strict=True)]),
    ]


def _rows_like(x: Tensor, tokens: Tensor) -> Tensor:
    return x.new_empty(len(tokens), x.shape[1])


dispatch.register_fake(lambda x, tokens, places: _rows_like(x, tokens))
combine_backward.register_fake(_rows_like)
combine.register_fake(lambda rows, tokens, places: rows.new_empty(len(places), rows.shape[1]))
dispatch_backward.register_fake(lambda grad, places: grad.new_empty(len(places), grad.shape[1]))
grouped_linear.register_fake(lambda rows, weight, counts: rows.new_empty(len(rows), weight.shape[1]))
grouped_linear_backward.register_fake(
    lambda grad, rows, weight, counts: [one.new_empty(one.shape) for one in (rows, weight)]
)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:])


dispatch.register_autograd(
    lambda ctx, grad: (dispatch_backward(grad, ctx.saved_tensors[1]), None, None), setup_context=_save
)
combine.register_autograd(
    lambda ctx, grad: (combine_backward(grad, ctx.saved_tensors[0]), None, None), setup_context=_save
)
grouped_linear.register_autograd(
    lambda ctx, grad: (*grouped_linear_backward(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class _Balance(torch.autograd.Function):
    """x, whose backward adds ``factor`` times the auxiliary loss to the loss that is differentiated."""

    @staticmethod
    def forward(ctx, x, loss, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full((), ctx.factor, device=grad.device), None


class Experts(nn.Module):
    """E experts of a width, k for each token; no biases, fp32 weights and fp32 router.

    Args:
        balance: factor of the auxiliary loss of Switch Transformers (arXiv 2101.03961, section 2.2).
    """

    def __init__(self, hidden: int, width: int, experts: int, chosen: int, balance: float = 0.01) -> None:
        super().__init__()
        self.experts, self.chosen, self.balance = experts, chosen, balance
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.fc1 = nn.Parameter(torch.empty(experts, width, hidden))
        self.fc2 = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """[T, h] to [T, h]."""
        logits = x.float() @ self.router.t()
        ids = logits.detach().topk(self.chosen, dim=-1).indices
        # As sums over masks, not as indexing: no scattering in the backward, whose order would be chance.
        mask = ids[..., None] == torch.arange(self.experts, device=x.device)
        counts = mask.sum((0, 1))
        loss = self.experts * (counts / ids.numel() * logits.softmax(-1).mean(0)).sum()
        best = logits.masked_fill(~mask.any(1), -torch.inf).softmax(-1)
        order = ids.flatten().argsort(stable=True)
        places = order.argsort().view_as(ids)
        probabilities = (best[:, None] * mask).sum(-1).flatten()[order].to(x.dtype)
        tokens = order // self.chosen
        rows = dispatch(_Balance.apply(x, loss, self.balance), tokens, places)
        rows = F.gelu(grouped_linear(rows, self.fc1.to(x.dtype), counts), approximate="tanh")
        rows = grouped_linear(rows, self.fc2.to(x.dtype), counts) * probabilities[:, None]
        return combine(rows, tokens, places)
