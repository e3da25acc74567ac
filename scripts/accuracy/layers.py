"""The layers of the simulation as operators that torch.compile leaves alone.

As in Megatron: a row-parallel layer sums W partial products in the forward, a column-parallel one W partial
input gradients in the backward. With sequence parallelism the input of a column-parallel layer and the output
gradient of a row-parallel one are gathered. Attention may share sequences between ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, library

from scripts.accuracy.exchange import Exchange
from scripts.accuracy.settings import RANKS

_attached: list[Exchange] = []


def _operator(name: str):
    """Decorator: an operator that changes none of its arguments."""
    return library.custom_op(f"simulated_ranks::{name}", mutates_args=())


def attach(exchange: Exchange) -> None:
    """Let the layers communicate through ``exchange`` from now on (process-wide, as operators are)."""
    _attached[:] = [exchange]


def _exchange() -> Exchange:
    [exchange] = _attached
    return exchange


def _empty_like(x: Tensor, sequence: int | None = None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_operator("row_linear")
def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, n] @ weight[h, n].T, reduced over the ranks."""
    exchange = _exchange()
    parts = x.contiguous().view(x.shape[0], exchange.world_size, -1).transpose(0, 1)
    partials = torch.bmm(
        parts, weight.view(weight.shape[0], exchange.world_size, -1).permute(1, 2, 0)
    )
    return exchange.reduce(partials, "forward")


@_operator("row_linear_backward")
def row_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    if _exchange().setting.sequence_parallel:
        grad = _exchange().gather(grad.contiguous(), "backward")
    return grad @ weight, grad.t() @ x


@_operator("column_linear")
def column_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, h] @ weight[m, h].T."""
    return x @ weight.t()


@_operator("column_linear_backward")
def column_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, reduced over the ranks, and of weight."""
    exchange, grad = _exchange(), grad.contiguous()
    parts = grad.view(grad.shape[0], exchange.world_size, -1).transpose(0, 1)
    partials = torch.bmm(parts, weight.view(exchange.world_size, -1, weight.shape[1]))
    return exchange.reduce(partials, "backward"), grad.t() @ x


for _forward, _backward in (
    (row_linear, row_linear_backward),
    (column_linear, column_linear_backward),
):
    _forward.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
    _backward.register_fake(lambda grad, x, weight: (_empty_like(x), _empty_like(weight)))
    _forward.register_autograd(
        lambda ctx, grad, backward=_backward: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


@_operator("gather")
def gather(x: Tensor) -> Tensor:
    """x after the all-gather of its slices; the gradient passes (column_linear reduces it)."""
    return _exchange().gather(x.contiguous(), "forward")


@_operator("send")
def send(x: Tensor, sequence: int) -> Tensor:
    """x [T, h] as the next pipeline stage has it."""
    return _exchange().send(x.contiguous(), sequence, "stage_forward")


@_operator("send_backward")
def send_backward(grad: Tensor, sequence: int) -> Tensor:
    """Its gradient as the stage before has it."""
    return _exchange().send(grad.contiguous(), sequence, "stage_backward")


@_operator("gather_sequence")
def gather_sequence(x: Tensor) -> Tensor:
    """[RANKS, T, n]: keys and values x [T, n] as each rank has them after the all-gather."""
    return _exchange().gather(x.contiguous(), "context_forward")[None].repeat(RANKS, 1, 1)


@_operator("gather_sequence_backward")
def gather_sequence_backward(grad: Tensor) -> Tensor:
    """[T, n]: the sum of the ranks' gradients, grad [RANKS, T, n]."""
    return _exchange().reduce_scatter(grad.contiguous(), "context_backward")


for _same in gather, send, send_backward:
    _same.register_fake(_empty_like)
gather_sequence.register_fake(lambda x: x.new_empty(RANKS, *x.shape))
gather_sequence_backward.register_fake(lambda grad: grad.new_empty(grad.shape[1:]))
gather.register_autograd(lambda ctx, grad: grad)
gather_sequence.register_autograd(lambda ctx, grad: gather_sequence_backward(grad))
send.register_autograd(
    lambda ctx, grad: (send_backward(grad, ctx.sequence), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "sequence", inputs[1]),
)


class _ReduceEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, ids, vocabulary):
        exchange = _exchange()
        owner = ids // (vocabulary // exchange.world_size)
        ranks = torch.arange(exchange.world_size, device=ids.device)
        partials = rows * (owner == ranks[:, None])[..., None].to(rows.dtype)
        return exchange.reduce(partials, "forward", whole=True)

    @staticmethod
    def backward(ctx, grad):
        if _exchange().setting.sequence_parallel:
            grad = _exchange().gather(grad.contiguous(), "backward")
        return grad, None, None


def reduce_embedding(rows: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """All-reduce of the vocabulary-parallel embedding: each row comes from the rank that holds its token.

    With sequence parallelism the gradient is gathered, as for learned positions in Megatron.
    """
    return _ReduceEmbedding.apply(rows, ids, vocabulary)


def attend(q: Tensor, k: Tensor, v: Tensor, context_parallel: bool) -> Tensor:
    """[B * S, heads * d]: causal attention of q [B, S, heads, d] and k, v [B, S, groups, d].

    With context parallelism as in megatron.compression.context_parallel.gather: of 2W chunks rank r has
    chunks r and 2W - 1 - r and gathers the keys and values of all, whose gradients are reduce-scattered.
    """
    batch, sequence, heads, width = q.shape
    groups = k.shape[2]
    if context_parallel:
        assert not sequence % (2 * RANKS), "as --context-parallel-size wants it"
        copies = gather_sequence(torch.cat([k, v], dim=2).view(batch * sequence, -1))
        k, v = copies.view(-1, sequence, 2 * groups, width).split(groups, dim=2)
        q = q.repeat(RANKS, 1, 1, 1)
    each = (-1, -1, -1, heads // groups, -1)
    k, v = (part.unsqueeze(3).expand(each).flatten(2, 3) for part in (k, v))
    y = F.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True
    )
    y = y.transpose(1, 2)
    if context_parallel:  # each rank's own rows
        chunk = torch.arange(sequence, device=y.device) * 2 * RANKS // sequence
        owner = torch.minimum(chunk, 2 * RANKS - 1 - chunk)
        own = owner == torch.arange(RANKS, device=y.device)[:, None]
        y = (
            y.reshape(RANKS, batch, sequence, heads, width)
            * own[:, None, :, None, None].to(y.dtype)
        ).sum(0)
    return y.reshape(batch * sequence, heads * width)
