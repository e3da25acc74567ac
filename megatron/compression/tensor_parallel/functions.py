"""Linear layers of tensor parallelism, whose exchanges overlap with weight gradients. megatron-core
communicates inside its linear's autograd function, so these are functions of our own.

A column-parallel layer's backward sums its input gradient over the ranks, and the backward of the
layers before it waits for the sum. What can run meanwhile are weight gradients: its own, and that
of the row-parallel layer after it (fc2's with fc1's exchange, the attention projection's with
qkv's), which is deferred until then. The autograd engine orders them: of the nodes that are ready
it runs the one that was made last in the forward. So a column-parallel layer's forward makes, in
this order,

1. a node of its input (an identity whose backward waits for the exchange),
2. a node for each weight (an identity whose backward computes that weight's gradient),
3. the product itself, whose backward computes the local input gradient and starts the exchange,

and the backward runs them from 3 to 1. Gradients on the way between them are placeholders without
memory of their own. Cost in memory: the row-parallel layer's output gradient lives until its weight
gradient is done.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.function import once_differentiable

from megatron.compression.communication import Work
from megatron.compression.communication.collectives import WithBackward
from megatron.compression.communication.site import CommSite, MessagePair
from megatron.compression.tensor_parallel.weight_gradient import accumulate, dropped_gradient


class InputGradientExchange:
    """The exchange of a layer's input gradient, and how many weight gradients overlap with it."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self.waiting = 0
        """Weight gradients that are still to be computed."""

    def advance(self) -> None:
        """Finish the exchange in flight and start the next one, if there is any.

        The last one stays in flight for as long as there is a weight gradient to compute.
        """
        if self.work is not None and self.work.exchanges > min(self.waiting, 1):
            self.work.advance()

    def wait(self) -> torch.Tensor:
        """Wait for the exchange and return the summed gradient."""
        work, self.work = self.work, None
        return work.wait()


class WeightGradient:
    """One weight's gradient, computed when the engine comes to its node.

    Args:
        exchange: overlaps with it.
        weight: ``[h_out, h_in]``.
        fusion: add the gradient to ``weight.main_grad``, where DDP has made one.
    """

    def __init__(
        self, exchange: InputGradientExchange, weight: torch.Tensor, fusion: bool = False
    ) -> None:
        self.exchange = exchange
        self.weight = weight
        self.fusion = fusion
        self._inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None

    def provide(self, inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Register where the output gradient ``[n, h_out]`` and the input ``[n, h_in]`` come
        from."""
        self._inputs = inputs
        # In each backward anew, where a graph is kept for several.
        self.exchange.waiting += 1

    def compute(self) -> torch.Tensor | None:
        """Return ``grad_output.T @ input``, or what autograd wants where it is added to
        ``main_grad``."""
        # Taken out: a closure of the tensors would keep them until the graph is freed.
        inputs, self._inputs = self._inputs, None
        grad_output, x = inputs()
        self.exchange.waiting -= 1
        fused = self.fusion and hasattr(self.weight, "main_grad")
        gradient = self.weight.main_grad if fused else torch.empty_like(self.weight)
        # In two parts where the exchange has two and no other weight gradient overlaps with the
        # second.
        work = self.exchange.work
        parts: Iterable = [(grad_output, gradient)]
        if work is not None and work.exchanges > 1 and not self.exchange.waiting:
            parts = zip(grad_output.chunk(2, dim=1), gradient.chunk(2), strict=True)
        for part, destination in parts:
            if fused:
                accumulate(x, part, destination)
            else:
                torch.matmul(part.t(), x, out=destination)
            self.exchange.advance()
        return dropped_gradient(self.weight) if fused else gradient


class _GradientFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, compute):
        ctx.compute = compute
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return ctx.compute(), None


def gradient_from(compute: Callable[[], torch.Tensor | None], x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, whose gradient ``compute`` returns when the engine comes to its node."""
    return _GradientFrom.apply(x, compute)


def placeholder(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return a gradient of ``tensor``'s dtype without memory, for a node that ignores it.

    It has ``tensor``'s shape, or ``shape`` if given.
    """
    # Strides of 0: any shape takes one value's memory.
    return _zero(tensor.dtype, tensor.device).expand(tensor.shape if shape is None else shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zero, made once: each backward of each layer asks for some, and a new one is a
    kernel."""
    return torch.zeros((), dtype=dtype, device=device)


class DeferredWeightGradient:
    """The weight gradient of one layer that another layer's exchange overlaps with; shared by the
    two. A plain object, so that neither layer is the other's submodule.

    The exchanging layer makes the node of the weight: a column-parallel layer that of the
    row-parallel one after it; in CAAT-Net, where row-parallel layers exchange, vice versa.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self._prepared: tuple[torch.Tensor, WeightGradient] | None = None

    def prepare(self, exchange: InputGradientExchange) -> None:
        """Make the node; called in the forward of the layer that exchanges."""
        weight = self._layer.weight
        # Of a forward whose layer did not run.
        self._prepared = None
        if weight.requires_grad:
            fusion = getattr(self._layer, "gradient_accumulation_fusion", False)
            gradient = WeightGradient(exchange, weight, fusion)
            self._prepared = gradient_from(gradient.compute, weight), gradient

    def use(self) -> tuple[torch.Tensor, WeightGradient] | None:
        """Return the weight and what computes its gradient, once; called in the forward of the
        layer itself."""
        prepared, self._prepared = self._prepared, None
        return prepared


class _ColumnParallelLinear(torch.autograd.Function):
    """See ``column_parallel_linear``; ``gradient`` is the weight's, or None where it needs none."""

    @staticmethod
    def forward(ctx, x, weight, bias, messages, sequence_parallel, exchange, gradient):
        ctx.messages = messages
        ctx.sequence_parallel = sequence_parallel
        ctx.exchange = exchange
        ctx.gradient = gradient
        ctx.has_bias = bias is not None
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        if sequence_parallel:
            # The payload is half of the input or less, and it is what the backward gathers again.
            ctx.input_gather = messages.encoded_gather()
            payload = ctx.input_gather.encode(x)
            ctx.save_for_backward(payload, weight)
            x = ctx.input_gather.gather(payload, x.shape, x.dtype).wait()
        else:
            ctx.save_for_backward(x, weight)
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        saved, weight = ctx.saved_tensors
        gathered = None
        if ctx.sequence_parallel and ctx.gradient is not None:
            # Started first: it is under way during the product below.
            message = ctx.input_gather.again("tp.backward")
            gathered = message.gather(saved, ctx.x_shape, ctx.x_dtype)
        grad_input = None
        if ctx.needs_input_grad[0]:
            # [s, b, h] of this rank's rows: one addend of the input gradient.
            partial_gradient = torch.matmul(grad_output, weight)
            operation = "reduce_scatter" if ctx.sequence_parallel else "all_reduce"
            ctx.exchange.work = ctx.messages.backward(operation).start(partial_gradient)
            del partial_gradient
            # The sum itself comes from the input's node, which waits for the exchange.
            grad_input = placeholder(weight, ctx.x_shape)
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        if ctx.gradient is not None:

            def inputs() -> tuple[torch.Tensor, torch.Tensor]:
                x = saved if gathered is None else gathered.wait()
                return grad_output, x.reshape(-1, x.shape[-1])

            ctx.gradient.provide(inputs)
        grad_bias = None
        if ctx.has_bias:
            grad_bias = grad_output.sum(dim=0)
        grad_weight = None
        if ctx.gradient is not None:
            grad_weight = placeholder(weight)
        # messages, sequence_parallel, exchange and gradient have no gradients.
        return grad_input, grad_weight, grad_bias, None, None, None, None


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    messages: MessagePair,
    sequence_parallel: bool,
    deferred: DeferredWeightGradient | None = None,
    fusion: bool = False,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, ``[s, b, h_out / W]``, with this rank's rows of the weight.

    The input gradient is summed over the ranks while weight gradients are computed. With sequence
    parallelism the input is gathered and the gradient scattered along the first dimension; the
    input's payload is kept for the backward instead of the input itself.

    Args:
        x: ``[s, b, h]``, or ``[s / W, b, h]`` with sequence parallelism.
        weight: ``[h_out / W, h]``.
        bias: ``[h_out / W]``, or None.
        messages: of the gathers of the input and of the sum of its gradient.
        sequence_parallel: each rank holds a part of the tokens.
        deferred: the weight gradient of the row-parallel layer that has this layer's output as its
            input.
        fusion: add the weight gradient to ``weight.main_grad``.
    """
    exchange = InputGradientExchange()
    gradient = None
    if torch.is_grad_enabled():
        # The order of these nodes is the order of the backward, see above.
        x = gradient_from(exchange.wait, x)
        if deferred is not None:
            deferred.prepare(exchange)
        if weight.requires_grad:
            gradient = WeightGradient(exchange, weight, fusion)
            weight = gradient_from(gradient.compute, weight)
    return _ColumnParallelLinear.apply(
        x, weight, bias, messages, sequence_parallel, exchange, gradient
    )


class _RowParallelLinear(torch.autograd.Function):
    """See ``row_parallel_linear``; ``gradient`` is the weight's where another layer computes it."""

    @staticmethod
    def forward(ctx, x, weight, messages, sequence_parallel, gradient, fusion):
        ctx.save_for_backward(x, weight)
        ctx.messages = messages
        ctx.sequence_parallel = sequence_parallel
        ctx.gradient = gradient
        ctx.fusion = fusion
        # [s, b, h_out] of this rank's columns: one addend of the output.
        partial_sum = torch.matmul(x, weight.t())
        operation = "reduce_scatter" if sequence_parallel else "all_reduce"
        work = messages.forward(operation).start(partial_sum)
        # The exchange holds what it needs of it.
        del partial_sum
        return work.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad_output = ctx.messages.backward("all_gather").start(grad_output).wait()
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = torch.matmul(grad_output, weight)
        if ctx.needs_input_grad[1]:
            rows = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
            if ctx.gradient is None:
                gradient = WeightGradient(InputGradientExchange(), weight, ctx.fusion)
                gradient.provide(lambda: rows)
                grad_weight = gradient.compute()
            else:
                # Computed at the weight's node, which the column-parallel layer before has made.
                ctx.gradient.provide(lambda: rows)
                grad_weight = placeholder(weight)
        # messages, sequence_parallel, gradient and fusion have no gradients.
        return grad_input, grad_weight, None, None, None, None


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    messages: MessagePair,
    sequence_parallel: bool,
    deferred: DeferredWeightGradient | None = None,
    fusion: bool = False,
) -> torch.Tensor:
    """Return ``x @ weight.T`` summed over the ranks.

    That is ``[s, b, h_out]``, or this rank's ``[s / W, b, h_out]`` with sequence parallelism.

    Args:
        x: ``[s, b, h_in / W]``.
        weight: ``[h_out, h_in / W]``, this rank's columns.
        messages: of the sum of the output and, with sequence parallelism, the gather of its
            gradient.
        sequence_parallel: each rank keeps a part of the tokens.
        deferred: this weight's gradient, if the column-parallel layer before this one has prepared
            it.
        fusion: add the weight gradient to ``weight.main_grad``.
    """
    gradient = None
    prepared = None if deferred is None else deferred.use()
    # Its node stands behind the exchange of the column-parallel layer before.
    if prepared is not None:
        weight, gradient = prepared
    return _RowParallelLinear.apply(x, weight, messages, sequence_parallel, gradient, fusion)


def gather(site: CommSite, x: torch.Tensor, traffic: str) -> torch.Tensor:
    """Gather every rank's tensor.

    Args:
        site: decides and sends.
        x: ``[n, ...]``.
        traffic: class of the message.

    Returns: ``[W * n, ...]``, the ranks' parts one after the other.
    """
    return site.message(traffic, "all_gather", x.nbytes * site.group.size()).start(x).wait()


def gather_columns(
    x: torch.Tensor, messages: MessagePair, ranks: int, first: int, count: int
) -> torch.Tensor:
    """Gather the columns of all ranks and return those of ``count`` neighbours.

    The forward is an all-gather; the gradient of the columns of all ranks is reduce-scattered.

    Args:
        x: this rank's columns ``[s, b, n]``.
        messages: of both.
        ranks: size of the group.
        first: first rank whose columns are returned.
        count: number of ranks whose columns are returned.

    Returns: ``[s, b, count * n]``.
    """

    def columns(x: torch.Tensor) -> torch.Tensor:
        gathered = messages.forward("all_gather").start(x).wait().view(ranks, *x.shape)
        return torch.cat(gathered[first : first + count].unbind(), dim=-1)

    def scatter(gradient: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(gradient.chunk(count, dim=-1))
        full = parts.new_zeros(ranks, *parts.shape[1:])
        full[first : first + count] = parts
        return messages.backward("reduce_scatter").start(full.flatten(0, 1)).wait()

    return WithBackward.apply(x, columns, scatter)


def gather_tokens(site: CommSite, x: torch.Tensor) -> torch.Tensor:
    """Return ``[W * n, ...]``: every rank's ``[n, ...]``. Each rank has a part of its gradient;
    they are summed."""

    def scatter(gradient: torch.Tensor) -> torch.Tensor:
        message = site.message("tp.backward", "reduce_scatter", gradient.nbytes)
        return message.start(gradient).wait()

    return WithBackward.apply(x, lambda x: gather(site, x, "tp.forward"), scatter)


def gather_channels(site: CommSite, x: torch.Tensor) -> torch.Tensor:
    """Return ``[s, b, W * n]``: every rank's ``[s, b, n]``.

    Its gradient is the same on all ranks.
    """
    ranks = site.group.size()
    rank = site.group.rank()
    return WithBackward.apply(
        x,
        lambda x: torch.cat(gather(site, x, "tp.forward").chunk(ranks), dim=-1),
        lambda gradient: gradient.chunk(ranks, dim=-1)[rank].contiguous(),
    )


def scatter_tokens(site: CommSite, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's ``[n, ...]`` of ``[W * n, ...]``, which all ranks have; their gradients
    are gathered."""

    def gather_gradient(gradient: torch.Tensor) -> torch.Tensor:
        return gather(site, gradient, "tp.backward")

    return local_tokens(x, site.group.size(), site.group.rank(), gather_gradient)


def local_tokens(
    x: torch.Tensor, ranks: int, rank: int, backward: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return one rank's part of tokens that all ranks have.

    Args:
        x: ``[W * n, ...]``.
        ranks: size W of the group.
        rank: the rank whose part is returned.
        backward: makes the gradient ``[W * n, ...]`` of that of the part.
    """
    # A copy: a view would keep the whole sequence's memory for as long as the slice lives.
    return WithBackward.apply(
        x,
        lambda x: x.chunk(ranks)[rank].clone(memory_format=torch.contiguous_format),
        backward,
    )
