"""Weight gradients that run behind the exchange of an input gradient.

A column-parallel layer's backward sums its input gradient over the ranks, and nothing further down can start
before the sum has arrived. What can run meanwhile are weight gradients: its own, and that of the row-parallel
layer before it in the backward (fc2's behind fc1's exchange, the attention projection's behind qkv's), which
is deferred until then. The autograd engine does the ordering: of the nodes that are ready it runs the one
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
from megatron.compression.communication.autograd import WithBackward
from megatron.compression.torch_native.weight_gradient import accumulate, dropped_gradient, has_main_grad


class InputGradientExchange:
    """The exchange of one column-parallel layer's input gradient, and the weight gradients behind it.

    Args:
        shared: another block runs behind it as well (turns.py), before anybody waits for it.
        again: the weights' gradients come from another half of the micro-batch, too, which tells DDP.
    """

    def __init__(self, shared: bool = False, again: bool = False) -> None:
        self.shared, self.again = shared, again
        self.work: Work | None = None
        self.waiting = 0
        """Weight gradients that are still to run behind it."""

    def advance(self) -> None:
        """Take what has arrived and send what follows from it, if an exchange is under way.

        The last one is left in flight for as long as there is something to run behind it. A shared one moves
        on behind the last weight gradient, in the middle of what it has.
        """
        if self.work is None or (self.shared and self.waiting):
            return
        if self.work.exchanges > (1 if self.shared else min(self.waiting, 1)):
            self.work.advance()

    def take(self) -> torch.Tensor:
        """Wait for the summed gradient."""
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
        """``grad_output.T @ input``, in two halves where the exchange has two parts and nothing else runs."""
        inputs, self._inputs = self._inputs, None
        grad_output, x = inputs()
        self.exchange.waiting -= 1
        work = self.exchange.work
        alone = not (self.exchange.waiting or self.exchange.shared)
        halves = 2 if work is not None and work.exchanges > 1 and alone else 1
        fused = has_main_grad(self.weight, self.fusion)
        gradient = self.weight.main_grad if fused else torch.empty_like(self.weight)
        parts: Iterable = ((grad_output, gradient),)
        if halves > 1:
            parts = zip(grad_output.chunk(halves, dim=1), gradient.chunk(halves), strict=True)
        for part, destination in parts:
            if fused:
                accumulate(x, part, destination)
            else:
                torch.matmul(part.t(), x, out=destination)
            self.exchange.advance()
        if fused:  # autograd would add what two halves return, weight by weight, for DDP to drop it
            return None if self.exchange.again else dropped_gradient(self.weight)
        return gradient


def _view(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def arrival(x: torch.Tensor, exchange: InputGradientExchange) -> torch.Tensor:
    """``x``, whose gradient is the exchange's result."""
    return WithBackward.apply(x, _view, lambda _: exchange.take())


def defer(weight: torch.Tensor, gradient: WeightGradient) -> torch.Tensor:
    """``weight``, whose gradient is computed by ``gradient``."""
    return WithBackward.apply(weight, _view, lambda _: gradient.compute())


def placeholder(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A gradient of ``tensor``'s shape (or another) and dtype without memory, for a node that does not look
    at it."""
    return _zero(tensor.dtype, tensor.device).expand(tensor.shape if shape is None else shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Made once: each backward of each layer asks for some, and a new one is a kernel."""
    return torch.zeros((), dtype=dtype, device=device)


class Handover:
    """Lets a layer that exchanges an input gradient make the weight-gradient node of the one after it: a
    column-parallel layer that of the row-parallel one; in CAAT-Net, where those exchange, the other way.

    Shared by the two. Plain Python, so that neither layer becomes the other's submodule.
    """

    def __init__(self, row: torch.nn.Module) -> None:
        self._row = row
        self._made: tuple[torch.Tensor, WeightGradient] | None = None

    def make(self, exchange: InputGradientExchange) -> None:
        """Called in the column-parallel layer's forward."""
        weight = self._row.weight
        self._made = None
        if weight.requires_grad:
            fusion = getattr(self._row, "gradient_accumulation_fusion", False)
            gradient = WeightGradient(exchange, weight, fusion)
            self._made = defer(weight, gradient), gradient

    def take(self) -> tuple[torch.Tensor, WeightGradient] | None:
        """Called in the row-parallel layer's forward: its weight and who computes its gradient."""
        made, self._made = self._made, None
        return made
