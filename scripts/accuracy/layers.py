"""The layers of the simulation as operators that torch.compile leaves alone.

As in Megatron, a row-parallel layer sums W partial products in the forward, and a column-parallel
one W partial input gradients in the backward. With sequence parallelism the input of a
column-parallel layer and the output gradient of a row-parallel one are gathered. The partial
products are the real ones: rank w holds slice w of the weight's parallel dimension. Slices of
attention's weights may be unequal, where the query groups do not divide by the ranks. Attention may
share sequences between ranks (context parallelism).

Shapes: T tokens of all sequences, h channels, n and m the parallel dimension of a weight.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, library

from scripts.accuracy.exchange import Exchange
from scripts.accuracy.settings import RANKS
from taco_kernels.common import ceil_div

_attached: list[Exchange] = []
"""The exchange of all layers; a list, so that it can be replaced."""


def _operator(name: str) -> Callable:
    """Return a decorator that makes an operator, which changes none of its arguments."""
    return library.custom_op(f"simulated_ranks::{name}", mutates_args=())


def attach(exchange: Exchange) -> None:
    """Let the layers communicate through ``exchange`` from now on (process-wide, as operators are)."""
    _attached[:] = [exchange]


def _exchange() -> Exchange:
    """Return the attached exchange."""
    [exchange] = _attached
    return exchange


def _empty_like(x: Tensor, sequence: int | None = None) -> Tensor:
    """Return a contiguous tensor of the shape of ``x``, for torch.compile."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# Linear layers
# ------------------------------------------------------------------------------------------


def _unequal_shares(size: int, units: int, ranks: int) -> list[slice] | None:
    """Return each rank's part of a parallel dimension that units do not cut into equal parts.

    The first ranks have one unit more than the others. None: the parts are equal, which they also
    are where there are fewer units than ranks.

    Args:
        size: of the dimension.
        units: parts of the dimension that no cut may divide (query groups); 0: cut anywhere.
        ranks: among which it is cut.
    """
    if units < ranks or units % ranks == 0:
        return None
    edges = [size // units * ceil_div(rank * units, ranks) for rank in range(ranks + 1)]
    return [slice(begin, end) for begin, end in pairwise(edges)]


@_operator("row_linear")
def row_linear(x: Tensor, weight: Tensor, units: int = 0) -> Tensor:
    """Return x [T, n] @ weight[h, n].T, reduced over the ranks.

    Args:
        x: the input, [T, n].
        weight: [h, n].
        units: parts of n that belong to one rank each, such as query groups; 0: n is cut anywhere.
    """
    exchange = _exchange()
    ranks = exchange.world_size
    shares = _unequal_shares(x.shape[1], units, ranks)
    if shares is not None:
        partials = [x[:, share] @ weight[:, share].t() for share in shares]
        return exchange.reduce(torch.stack(partials), "forward")
    # Rank w has columns w of x and of the weight: [W, T, n / W] @ [W, n / W, h].
    inputs = x.contiguous().view(x.shape[0], ranks, -1).transpose(0, 1)
    weights = weight.view(weight.shape[0], ranks, -1).permute(1, 2, 0)
    return exchange.reduce(torch.bmm(inputs, weights), "forward")


@_operator("row_linear_backward")
def row_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, units: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a row-parallel layer.

    Args:
        grad: of the output, [T, h]; with sequence parallelism of the rank's slice, which is
            gathered.
        x: the input, [T, n].
        weight: [h, n].
        units: as in ``row_linear``; nothing is cut here.

    Returns:
        The gradients of x and of the weight.
    """
    if _exchange().setting.sequence_parallel:
        grad = _exchange().gather(grad.contiguous(), "backward")
    # Both are each rank's own: nothing is summed.
    return grad @ weight, grad.t() @ x


@_operator("column_linear")
def column_linear(x: Tensor, weight: Tensor, units: int = 0) -> Tensor:
    """Return x [T, h] @ weight[m, h].T; ``units`` cut m in the backward as in ``row_linear``."""
    return x @ weight.t()


@_operator("column_linear_backward")
def column_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, units: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a column-parallel layer.

    Args:
        grad: of the output, [T, m].
        x: the input, [T, h].
        weight: [m, h].
        units: parts of m that belong to one rank each, such as query groups; 0: m is cut anywhere.

    Returns:
        The gradient of x, reduced over the ranks, and that of the weight.
    """
    exchange = _exchange()
    ranks = exchange.world_size
    grad = grad.contiguous()
    shares = _unequal_shares(grad.shape[1], units, ranks)
    if shares is not None:
        partials = [grad[:, share] @ weight[share] for share in shares]
        return exchange.reduce(torch.stack(partials), "backward"), grad.t() @ x
    # Rank w has rows w of the weight: [W, T, m / W] @ [W, m / W, h].
    gradients = grad.view(grad.shape[0], ranks, -1).transpose(0, 1)
    weights = weight.view(ranks, -1, weight.shape[1])
    return exchange.reduce(torch.bmm(gradients, weights), "backward"), grad.t() @ x


def _register_linear(forward: Callable, backward: Callable) -> None:
    """Tell torch the shapes and the gradient of a linear layer."""

    def shape_of_output(x, weight, units=0):
        return x.new_empty(x.shape[0], weight.shape[0])

    def shapes_of_gradients(grad, x, weight, units):
        return _empty_like(x), _empty_like(weight)

    def save_inputs(ctx, inputs, output):
        x, weight, ctx.units = inputs
        ctx.save_for_backward(x, weight)

    def gradient(ctx, grad):
        return *backward(grad, *ctx.saved_tensors, ctx.units), None  # none of the units

    forward.register_fake(shape_of_output)
    backward.register_fake(shapes_of_gradients)
    forward.register_autograd(gradient, setup_context=save_inputs)


_register_linear(row_linear, row_linear_backward)
_register_linear(column_linear, column_linear_backward)


# Gathers and sends
# --------------------------------------------------------------------------------------


@_operator("gather")
def gather(x: Tensor) -> Tensor:
    """Return x after the all-gather of its slices. The gradient passes: column_linear reduces it."""
    return _exchange().gather(x.contiguous(), "forward")


@_operator("send")
def send(x: Tensor, sequence: int) -> Tensor:
    """Return x [T, h] as the next pipeline stage has it."""
    return _exchange().send(x.contiguous(), sequence, "stage_forward")


@_operator("send_backward")
def send_backward(grad: Tensor, sequence: int) -> Tensor:
    """Return the gradient of what was sent, as the stage before has it."""
    return _exchange().send(grad.contiguous(), sequence, "stage_backward")


@_operator("gather_sequence")
def gather_sequence(x: Tensor) -> Tensor:
    """Return keys and values x [T, n] as each rank has them after the all-gather, [RANKS, T, n]."""
    gathered = _exchange().gather(x.contiguous(), "context_forward")
    return gathered[None].repeat(RANKS, 1, 1)


@_operator("gather_sequence_backward")
def gather_sequence_backward(grad: Tensor) -> Tensor:
    """Return the sum [T, n] of the ranks' gradients [RANKS, T, n]."""
    return _exchange().reduce_scatter(grad.contiguous(), "context_backward")


def _save_sequence(ctx, inputs, output) -> None:
    ctx.sequence = inputs[1]


gather.register_fake(_empty_like)
gather.register_autograd(lambda ctx, grad: grad)
send.register_fake(_empty_like)
send_backward.register_fake(_empty_like)
send.register_autograd(
    lambda ctx, grad: (send_backward(grad, ctx.sequence), None),  # none of the length
    setup_context=_save_sequence,
)
gather_sequence.register_fake(lambda x: x.new_empty(RANKS, *x.shape))
gather_sequence_backward.register_fake(lambda grad: grad.new_empty(grad.shape[1:]))
gather_sequence.register_autograd(lambda ctx, grad: gather_sequence_backward(grad))


# The embedding and attention
# ----------------------------------------------------------------------------


class _ReduceEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, ids, vocabulary):
        exchange = _exchange()
        owners = ids // (vocabulary // exchange.world_size)
        ranks = torch.arange(exchange.world_size, device=ids.device)
        # [W, T]: a rank contributes the rows of its tokens, and zeros.
        is_owner = owners == ranks[:, None]
        partials = rows * is_owner[..., None].to(rows.dtype)
        return exchange.reduce(partials, "forward", whole=True)

    @staticmethod
    def backward(ctx, grad):
        if _exchange().setting.sequence_parallel:
            grad = _exchange().gather(grad.contiguous(), "backward")
        return grad, None, None  # tokens and vocabulary have no gradient


def reduce_embedding(rows: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """All-reduce the vocabulary-parallel embedding: each row comes from the rank that holds its
    token.

    With sequence parallelism the gradient is gathered, as for learned positions in Megatron.

    Args:
        rows: the embeddings, [T, h].
        ids: the tokens, [T].
        vocabulary: number of tokens, of which each rank holds an equal range.
    """
    return _ReduceEmbedding.apply(rows, ids, vocabulary)


def attend(q: Tensor, k: Tensor, v: Tensor, context_parallel: bool) -> Tensor:
    """Return causal attention, [B * S, heads * d].

    With context parallelism it is that of megatron.compression.context_parallel.gather: of 2W
    chunks of a sequence rank r has chunks r and 2W - 1 - r. It gathers the keys and values of all,
    whose gradients are reduce-scattered.

    Args:
        q: [B, S, heads, d].
        k: [B, S, groups, d].
        v: [B, S, groups, d].
        context_parallel: whether ranks share the sequences.
    """
    batch, sequence, heads, width = q.shape
    groups = k.shape[2]
    if context_parallel:
        assert not sequence % (2 * RANKS), "as --context-parallel-size wants it"
        # Every rank computes the attention of all queries with its own copy of keys and values.
        copies = gather_sequence(torch.cat([k, v], dim=2).view(batch * sequence, -1))
        k, v = copies.view(-1, sequence, 2 * groups, width).split(groups, dim=2)
        q = q.repeat(RANKS, 1, 1, 1)
    k = _repeat_groups(k, heads)
    v = _repeat_groups(v, heads)
    # torch wants [batch, heads, sequence, d].
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)
    if context_parallel:
        # Of what a rank has computed, the rows of its chunks count.
        chunks = torch.arange(sequence, device=y.device) * 2 * RANKS // sequence
        owners = torch.minimum(chunks, 2 * RANKS - 1 - chunks)
        is_owner = owners == torch.arange(RANKS, device=y.device)[:, None]
        of_ranks = y.reshape(RANKS, batch, sequence, heads, width)
        y = (of_ranks * is_owner[:, None, :, None, None].to(y.dtype)).sum(0)
    return y.reshape(batch * sequence, heads * width)


def _repeat_groups(x: Tensor, heads: int) -> Tensor:
    """Return [B, S, heads, d] of keys or values [B, S, groups, d]: each for the heads of its group."""
    repeats = heads // x.shape[2]
    return x.unsqueeze(3).expand(-1, -1, -1, repeats, -1).flatten(2, 3)
