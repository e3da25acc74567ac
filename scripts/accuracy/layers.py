"""The tensor-parallel layers of the simulation as operators that torch.compile leaves alone.

As in Megatron: a row-parallel layer (attention projection, fc2) sums W partial products in the forward, a
column-parallel one (qkv, fc1, output) sums W partial input gradients in the backward. With sequence
parallelism the input of a column-parallel layer and the output gradient of a row-parallel one are gathered.
The partial products are the real ones: rank w holds slice w of the weight's parallel dimension.
"""

import torch
from torch import Tensor, library

from scripts.accuracy.exchange import Exchange

_LIBRARY = "simulated_ranks"
_attached: list[Exchange] = []


def operator(name: str):
    """Decorator: an operator of this library that changes none of its arguments."""
    return library.custom_op(f"{_LIBRARY}::{name}", mutates_args=())


def attach(exchange: Exchange) -> None:
    """Let the layers communicate through ``exchange`` from now on (process-wide, as operators are)."""
    _attached[:] = [exchange]


def attached() -> Exchange:
    """What the layers communicate through."""
    [exchange] = _attached
    return exchange


def row_partials(x: Tensor, weight: Tensor, world_size: int) -> Tensor:
    """[W, T, h] whose sum is x @ weight.T, for x [T, n] and weight [h, n]."""
    x = x.view(x.shape[0], world_size, -1).transpose(0, 1)
    return torch.bmm(x, weight.view(weight.shape[0], world_size, -1).permute(1, 2, 0))


def column_partials(grad: Tensor, weight: Tensor, world_size: int) -> Tensor:
    """[W, T, h] whose sum is grad @ weight, for grad [T, m] and weight [m, h]."""
    grad = grad.view(grad.shape[0], world_size, -1).transpose(0, 1)
    return torch.bmm(grad, weight.view(world_size, -1, weight.shape[1]))


@operator("row_linear")
def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, n] @ weight[h, n].T, reduced over the ranks."""
    exchange = attached()
    return exchange.reduce(row_partials(x.contiguous(), weight, exchange.world_size), "forward")


@operator("row_linear_backward")
def row_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    exchange = attached()
    if exchange.setting.sequence_parallel:
        grad = exchange.gather(grad.contiguous(), "backward")
    return grad @ weight, grad.t() @ x


@operator("column_linear")
def column_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, h] @ weight[m, h].T."""
    return x @ weight.t()


@operator("column_linear_backward")
def column_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, reduced over the ranks, and of weight."""
    exchange = attached()
    grad = grad.contiguous()
    partials = column_partials(grad, weight, exchange.world_size)
    return exchange.reduce(partials, "backward"), grad.t() @ x


@operator("gather")
def gather(x: Tensor) -> Tensor:
    """x after the all-gather of its slices; the gradient passes (column_linear reduces it)."""
    return attached().gather(x.contiguous(), "forward")


@operator("send")
def send(x: Tensor, sequence: int) -> Tensor:
    """x [T, h] as the next pipeline stage has it."""
    [exchange] = _attached
    return exchange.send(x.contiguous(), sequence, "forward")


@operator("send_backward")
def send_backward(grad: Tensor, sequence: int) -> Tensor:
    """Its gradient as the stage before has it."""
    [exchange] = _attached
    return exchange.send(grad.contiguous(), sequence, "backward")


@row_linear.register_fake
@column_linear.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])


@row_linear_backward.register_fake
@column_linear_backward.register_fake
def _(grad, x, weight):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(
        weight, memory_format=torch.contiguous_format
    )


@gather.register_fake
@send.register_fake
@send_backward.register_fake
def _(x, sequence=None):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])


row_linear.register_autograd(
    lambda ctx, grad: row_linear_backward(grad, *ctx.saved_tensors), setup_context=_save
)
column_linear.register_autograd(
    lambda ctx, grad: column_linear_backward(grad, *ctx.saved_tensors), setup_context=_save
)
gather.register_autograd(lambda ctx, grad: grad)
send.register_autograd(
    lambda ctx, grad: (send_backward(grad, ctx.sequence), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "sequence", inputs[1]),
)


class _ReduceEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, ids, vocabulary):
        exchange = attached()
        owner = ids // (vocabulary // exchange.world_size)
        ranks = torch.arange(exchange.world_size, device=ids.device)
        partials = rows * (owner == ranks[:, None])[..., None].to(rows.dtype)
        return exchange.reduce(partials, "forward", whole=True)

    @staticmethod
    def backward(ctx, grad):
        exchange = attached()
        if exchange.setting.sequence_parallel:
            grad = exchange.gather(grad.contiguous(), "backward")
        return grad, None, None


def reduce_embedding(rows: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """All-reduce of the vocabulary-parallel embedding: each row comes from the rank that holds its token.

    With sequence parallelism the gradient is gathered, as for learned positions in Megatron.
    """
    return _ReduceEmbedding.apply(rows, ids, vocabulary)
