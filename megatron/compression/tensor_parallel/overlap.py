"""Weight gradients that overlap with the exchange of an input gradient.

A column-parallel layer's backward sums its input gradient over the ranks, and nothing further down can start
before the sum has arrived. What can run meanwhile are weight gradients: its own, and that of the row-parallel
layer before it in the backward (fc2's with fc1's exchange, the attention projection's with qkv's), which is
deferred until then. The autograd engine does the ordering: of the nodes that are ready it runs the one
that was made last in the forward. So a column-parallel layer's forward makes, in this order,

1. the *arrival* of its input gradient (an identity whose backward waits for the exchange),
2. a node for each weight (an identity whose backward computes that weight's gradient),
3. the product itself, whose backward computes the local input gradient and starts the exchange,

and the backward runs them from 3 to 1. Gradients on the way between them are placeholders without memory of
their own. Cost in memory: the row-parallel layer's output gradient lives until its weight gradient is done.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.compression.communication import Work
from megatron.compression.communication.collectives import WithBackward
from megatron.compression.torch_native.weight_gradient import accumulate, dropped_gradient


class InputGradientExchange:
    """The exchange of one column-parallel layer's input gradient, and the weight gradients that overlap with
    it."""

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
        """The summed gradient."""
        work, self.work = self.work, None
        return work.wait()


class WeightGradient:
    """One weight's gradient, computed when the engine comes to its node.

    With ``fusion`` it is added to the weight's main_grad, where there is one.
    """

    def __init__(self, exchange: InputGradientExchange, weight: torch.Tensor, fusion: bool = False) -> None:
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


def _view(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def arrival(x: torch.Tensor, exchange: InputGradientExchange) -> torch.Tensor:
    """``x``, whose gradient is the exchange's result."""
    return WithBackward.apply(x, _view, lambda _: exchange.wait())


def defer(weight: torch.Tensor, compute: Callable[[], torch.Tensor | None]) -> torch.Tensor:
    """``weight``, whose gradient ``compute`` returns when the engine comes to its node."""
    return WithBackward.apply(weight, _view, lambda _: compute())


def placeholder(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A gradient of ``tensor``'s shape (or another) and dtype without memory, for a node that does not look
    at it."""
    return _zero(tensor.dtype, tensor.device).expand(tensor.shape if shape is None else shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Made once: each backward of each layer asks for some, and a new one is a kernel."""
    return torch.zeros((), dtype=dtype, device=device)


class DeferredWeightGradient:
    """The weight gradient of one layer that another layer's exchange overlaps with; shared by the two.

    The exchanging layer makes the node of the weight: a column-parallel layer that of the row-parallel one
    after it; in CAAT-Net, where row-parallel layers exchange, the other way.

    Args:
        layer: whose weight it is; kept in plain Python, so that neither layer is the other's submodule.
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
            self._prepared = defer(weight, gradient.compute), gradient

    def use(self) -> tuple[torch.Tensor, WeightGradient] | None:
        """The weight and what computes its gradient, once; called in the forward of the layer itself."""
        prepared, self._prepared = self._prepared, None
        return prepared
