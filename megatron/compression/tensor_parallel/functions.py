"""Linear layers of tensor parallelism, whose exchanges overlap with weight gradients. megatron-core
communicates inside its linear's autograd function, so these are functions of our own.

A column-parallel layer's backward sums its input gradient over the ranks, and the backward of the layers
before it waits for the sum. What can run meanwhile are weight gradients: its own, and that of the
row-parallel layer after it (fc2's with fc1's exchange, the attention projection's with qkv's), which is
deferred until then. The autograd engine orders them: of the nodes that are ready it runs the one that was
made last in the forward. So a column-parallel layer's forward makes, in this order,

1. a node of its input (an identity whose backward waits for the exchange),
2. a node for each weight (an identity whose backward computes that weight's gradient),
3. the product itself, whose backward computes the local input gradient and starts the exchange,

and the backward runs them from 3 to 1. Gradients on the way between them are placeholders without memory of
their own. Cost in memory: the row-parallel layer's output gradient lives until its weight gradient is done.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.function import once_differentiable

from megatron.compression.communication import Work
from megatron.compression.communication.collectives import WithBackward
from megatron.compression.communication.site import CommSite
from megatron.compression.torch_native.weight_gradient import accumulate, dropped_gradient


class InputGradientExchange:
    """The exchange of a layer's input gradient, and how many weight gradients overlap with it."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self.waiting = 0
        """Weight gradients that are still to be computed."""

    def advance(self) -> None:
        """Finish the exchange in flight and start the next one, if there is any; the last one stays in flight
        for as long as there is a weight gradient to compute."""
        if self.work is not None and self.work.exchanges > min(self.waiting, 1):
            self.work.advance()

    def wait(self) -> torch.Tensor:
        """The summed gradient."""
        work, self.work = self.work, None
        return work.wait()


class WeightGradient:
    """One weight's gradient, computed when the engine comes to its node; with ``fusion`` added to
    main_grad."""

    def __init__(
        self, exchange: InputGradientExchange, weight: torch.Tensor, fusion: bool = False
    ) -> None:
        self.exchange, self.weight, self.fusion = exchange, weight, fusion
        self._inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None

    def provide(self, inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Say where the output gradient ``[n, h_out]`` and the input ``[n, h_in]`` come from."""
        self._inputs = inputs
        self.exchange.waiting += 1  # in each backward anew, where a graph is kept for several

    def compute(self) -> torch.Tensor | None:
        """``grad_output.T @ input``, in two parts where the exchange has two and nothing else overlaps."""
        inputs, self._inputs = self._inputs, None
        grad_output, x = inputs()
        self.exchange.waiting -= 1
        work = self.exchange.work
        in_parts = work is not None and work.exchanges > 1 and not self.exchange.waiting
        fused = self.fusion and hasattr(self.weight, "main_grad")  # DDP's
        gradient = self.weight.main_grad if fused else torch.empty_like(self.weight)
        parts: Iterable = ((grad_output, gradient),)
        if in_parts:
            parts = zip(grad_output.chunk(2, dim=1), gradient.chunk(2), strict=True)
        for part, destination in parts:
            if fused:
                accumulate(x, part, destination)
            else:
                torch.matmul(part.t(), x, out=destination)
            self.exchange.advance()
        return dropped_gradient(self.weight) if fused else gradient


def gradient_from(compute: Callable[[], torch.Tensor | None], x: torch.Tensor) -> torch.Tensor:
    """``x``, whose gradient ``compute`` returns when the engine comes to its node."""
    return WithBackward.apply(x, lambda x: x.view_as(x), lambda _: compute())


def placeholder(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A gradient of ``tensor``'s shape (or another) and dtype without memory, for a node that ignores it."""
    return _zero(tensor.dtype, tensor.device).expand(tensor.shape if shape is None else shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Made once: each backward of each layer asks for some, and a new one is a kernel."""
    return torch.zeros((), dtype=dtype, device=device)


class DeferredWeightGradient:
    """The weight gradient of one layer that another layer's exchange overlaps with; shared by the two. A
    plain object, so that neither layer is the other's submodule.

    The exchanging layer makes the node of the weight: a column-parallel layer that of the row-parallel one
    after it; in CAAT-Net, where row-parallel layers exchange, vice versa.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self._prepared: tuple[torch.Tensor, WeightGradient] | None = None

    def prepare(self, exchange: InputGradientExchange) -> None:
        """Make the node; called in the forward of the layer that exchanges."""
        weight = self._layer.weight
        self._prepared = None
        if weight.requires_grad:
            fusion = getattr(self._layer, "gradient_accumulation_fusion", False)
            gradient = WeightGradient(exchange, weight, fusion)
            self._prepared = gradient_from(gradient.compute, weight), gradient

    def use(self) -> tuple[torch.Tensor, WeightGradient] | None:
        """The weight and what computes its gradient, once; called in the forward of the layer itself."""
        prepared, self._prepared = self._prepared, None
        return prepared


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, site, sequence_parallel, exchange, gradient):
        ctx.site, ctx.sequence_parallel, ctx.has_bias = site, sequence_parallel, bias is not None
        ctx.exchange, ctx.gradient, ctx.x_shape, ctx.dtype = exchange, gradient, x.shape, x.dtype
        if sequence_parallel:
            # The payload is half of the input or less, and it is what the backward gathers again.
            ctx.message = site.message("tp.forward", "all_gather", x.nbytes * site.group.size())
            payload = ctx.message.encode(x)
            ctx.save_for_backward(payload, weight)
            x = ctx.message.gather(payload, x.shape, x.dtype).wait()
        else:
            ctx.save_for_backward(x, weight)
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        saved, weight = ctx.saved_tensors
        site, gathered = ctx.site, None
        if ctx.sequence_parallel and ctx.gradient is not None:
            nbytes = ctx.x_shape.numel() * ctx.dtype.itemsize * site.group.size()
            gathered = ctx.message.again("tp.backward", nbytes).gather(
                saved, ctx.x_shape, ctx.dtype
            )
        placeholder_of_sum = None
        if ctx.needs_input_grad[0]:
            own = torch.matmul(grad_output, weight)
            operation = "reduce_scatter" if ctx.sequence_parallel else "all_reduce"
            ctx.exchange.work = site.message("tp.backward", operation, own.nbytes).start(own)
            del own
            placeholder_of_sum = placeholder(weight, ctx.x_shape)
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        if ctx.gradient is not None:

            def inputs() -> tuple[torch.Tensor, torch.Tensor]:
                x = saved if gathered is None else gathered.wait()
                return grad_output, x.reshape(-1, x.shape[-1])

            ctx.gradient.provide(inputs)
        grad_bias = grad_output.sum(dim=0) if ctx.has_bias else None
        grad_weight = None if ctx.gradient is None else placeholder(weight)
        return placeholder_of_sum, grad_weight, grad_bias, *(None,) * 4


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: CommSite,
    sequence_parallel: bool,
    deferred: DeferredWeightGradient | None = None,
    fusion: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias``, ``[s, b, h_out / W]``, with this rank's rows of the weight.

    The input gradient is summed over the ranks while weight gradients are computed. With sequence parallelism
    the input is gathered and the gradient scattered along the first dimension; the input's payload is kept
    for the backward instead of the input itself.

    Args:
        x: ``[s, b, h]``, or ``[s / W, b, h]`` with sequence parallelism.
        weight, bias: ``[h_out / W, h]`` and ``[h_out / W]``.
        deferred: the weight gradient of the row-parallel layer that has this layer's output as its input.
        fusion: add the weight gradient to ``weight.main_grad``.
    """
    exchange, gradient = InputGradientExchange(), None
    if torch.is_grad_enabled():
        x = gradient_from(exchange.wait, x)
        if deferred is not None:
            deferred.prepare(exchange)
        if weight.requires_grad:
            gradient = WeightGradient(exchange, weight, fusion)
            weight = gradient_from(gradient.compute, weight)
    return _ColumnParallelLinear.apply(x, weight, bias, site, sequence_parallel, exchange, gradient)


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, site, sequence_parallel, gradient, fusion):
        ctx.save_for_backward(x, weight)
        ctx.site, ctx.sequence_parallel, ctx.gradient, ctx.fusion = (
            site,
            sequence_parallel,
            gradient,
            fusion,
        )
        partial_sum = torch.matmul(x, weight.t())
        operation = "reduce_scatter" if sequence_parallel else "all_reduce"
        work = site.message("tp.forward", operation, partial_sum.nbytes).start(partial_sum)
        del partial_sum
        return work.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad_output = gather(ctx.site, grad_output, "tp.backward")
        grad_input = torch.matmul(grad_output, weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
            gradient = ctx.gradient or WeightGradient(InputGradientExchange(), weight, ctx.fusion)
            gradient.provide(lambda: rows)
            grad_weight = gradient.compute() if ctx.gradient is None else placeholder(weight)
        return grad_input, grad_weight, *(None,) * 4


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    site: CommSite,
    sequence_parallel: bool,
    deferred: DeferredWeightGradient | None = None,
    fusion: bool = False,
) -> torch.Tensor:
    """``x [s, b, h_in / W] @ weight.T`` summed over the ranks: ``[s, b, h_out]``, or ``[s / W, b, h_out]``
    with sequence parallelism.

    Args:
        deferred: this weight's gradient, if the column-parallel layer before this one has prepared it.
        fusion: add the weight gradient to ``weight.main_grad``.
    """
    gradient = None
    if deferred is not None and (prepared := deferred.use()) is not None:
        weight, gradient = prepared
    return _RowParallelLinear.apply(x, weight, site, sequence_parallel, gradient, fusion)


def gather(site: CommSite, x: torch.Tensor, traffic: str) -> torch.Tensor:
    """``[W * n, ...]`` of every rank's ``[n, ...]``."""
    return site.message(traffic, "all_gather", x.nbytes * site.group.size()).start(x).wait()


def gather_columns(x: torch.Tensor, site: CommSite, first: int, count: int) -> torch.Tensor:
    """``[s, b, count * n]``: the ``[s, b, n]`` of ranks ``first`` to ``first + count``, of all that are
    gathered; the gradient of all is reduce-scattered."""
    ranks = site.group.size()

    def columns(x: torch.Tensor) -> torch.Tensor:
        gathered = gather(site, x, "tp.forward").view(ranks, *x.shape)
        return torch.cat(gathered[first : first + count].unbind(), dim=-1)

    def scatter(grad: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(grad.chunk(count, dim=-1))
        full = parts.new_zeros(ranks, *parts.shape[1:])
        full[first : first + count] = parts
        return (
            site.message("tp.backward", "reduce_scatter", full.nbytes)
            .start(full.flatten(0, 1))
            .wait()
        )

    return WithBackward.apply(x, columns, scatter)


def gather_tokens(site: CommSite, x: torch.Tensor) -> torch.Tensor:
    """``[W * n, ...]`` of every rank's ``[n, ...]``, whose gradients, a part on each rank, are summed."""

    def scatter(grad: torch.Tensor) -> torch.Tensor:
        return site.message("tp.backward", "reduce_scatter", grad.nbytes).start(grad).wait()

    return WithBackward.apply(x, lambda x: gather(site, x, "tp.forward"), scatter)


def gather_channels(site: CommSite, x: torch.Tensor) -> torch.Tensor:
    """``[s, b, W * n]`` of every rank's ``[s, b, n]``, whose gradient is the same on all ranks."""
    ranks, rank = site.group.size(), site.group.rank()
    return WithBackward.apply(
        x,
        lambda x: torch.cat(gather(site, x, "tp.forward").chunk(ranks), dim=-1),
        lambda grad: grad.chunk(ranks, dim=-1)[rank].contiguous(),
    )


def scatter_tokens(site: CommSite, x: torch.Tensor) -> torch.Tensor:
    """This rank's ``[n, ...]`` of ``[W * n, ...]``, which all ranks have; their gradients are gathered."""
    ranks, rank = site.group.size(), site.group.rank()
    return WithBackward.apply(
        x,
        # A copy: a view would keep the whole sequence's memory for as long as the slice lives.
        lambda x: x.chunk(ranks)[rank].clone(memory_format=torch.contiguous_format),
        lambda grad: gather(site, grad, "tp.backward"),
    )
