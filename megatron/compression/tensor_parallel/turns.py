"""Blocks in turn: what one sends travels while another, which does not need it, computes.

A block is an attention or an MLP, with the norm before it and the residual add behind it. It communicates
twice: its output is summed, and in the backward its input's gradient is. Two *lanes* of blocks that do not
need each other's sums (two halves of a micro-batch) take turns:

    forward   block 1, block 2, norm 1', block 1', norm 2', block 2', ...    sum 1 travels behind block 2
    backward  block 2', block 1', norm 2', block 2, norm 1', block 1, ...    gradient 2' behind block 1'

All on one stream, in the host's order: with CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron demands before
Blackwell, a second stream that waits for an exchange would hold up the first one's kernels.

In the backward the autograd engine decides: of the nodes that are ready, the one that was made last is next.
Made where it is computed, norm 2' would be behind block 1' in the forward and so before it in the backward,
where it waits for gradient 2'. So a norm and the add before it are one node, an ``Entry``, which is made when
the sum has been started (before the other lane's block) and computed when it has arrived (behind that block).

Every rank runs the same order, so collectives match. A weight that both lanes use is one leaf of one graph:
its gradients are added on the stream one after the other, and DDP's hook runs once, behind both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from megatron.compression.communication import Work
from megatron.compression.communication.site import CommSite
from megatron.compression.tensor_parallel.overlap import InputGradientExchange

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Dropout with its mask drawn: the same map for values and gradients."""


@dataclass
class Block:
    """An attention or an MLP of a transformer layer, as one lane runs it."""

    module: Callable[..., tuple]
    norm: torch.nn.Module
    column: torch.nn.Module
    """Its layer that takes the input, and sums the input's gradient."""
    row: torch.nn.Module
    """Its layer that sums the output."""
    draw: Callable[[torch.Tensor], Linear | None] = lambda total: None
    """Draws the dropout of its output, of which it is given one; None: no dropout."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What ``module`` is called with beside its input."""
    again: bool = False
    """Whether the other lane runs it, too, and tells DDP of its gradients."""

    def run(self, entry: "Entry", other: "Entry") -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute, and start to sum the output.

        Args:
            other: the other lane's, which has something under way.
        Returns: The output, whose values are those of ``entry.started`` where that is set, and its bias.
        """
        entry.compute()
        entry.behind, entry.adjoint.beside = other.advance, other.adjoint
        self.column.entry = self.row.entry = entry
        try:
            return self.module(entry.y, **self.arguments)
        finally:
            self.column.entry = self.row.entry = None


class Entry:
    """A lane on its way into the next block: the residual add and the norm, made early and computed late.

    Args:
        residual: the residual stream before the lane's last block ``[s, b, h]``: the input, or that of an
            entry which is computed before this one.
        block: the one that is entered; None behind the last.
        last: the entry of the lane's last block, that block's output and its bias; None at the beginning.
    """

    def __init__(
        self,
        residual: "torch.Tensor | Entry",
        block: Block | None,
        last: "tuple[Entry, torch.Tensor, torch.Tensor | None] | None" = None,
    ) -> None:
        self.block, self.last, of = block, last, None
        if isinstance(residual, Entry):
            residual, of = residual.x, residual.adjoint
        self.residual = residual
        self.started: Work | None = None
        """The sum of the entered block's output; its row-parallel layer starts it."""
        self.gathered: tuple[Any, Work] | None = None
        """With sequence parallelism ``y``, as the column-parallel layer has begun to gather it."""
        self.behind: Callable[[], None] = lambda: None
        """Called behind the block's first product: moves on what the other lane has under way."""
        parameters = [] if block is None else list(block.norm.parameters())
        exchange = InputGradientExchange(shared=True, again=block is not None and block.again)
        entered, total, bias = last or (None, None, None)
        self.adjoint = Adjoint(parameters, exchange, of, None if entered is None else entered.adjoint)
        self.x, self.y = _EntryNode.apply(self.adjoint, residual, total, bias, *parameters)
        """The residual stream and the block's input, both ``[s, b, h]`` and empty until computed."""
        self._computed = False

    def advance(self) -> None:
        """Move on what is under way, but leave an exchange to travel behind what comes next."""
        if self._computed:
            return
        work = self.last[0].started if self.last is not None else None
        if work is not None and work.exchanges > 1:
            work.advance()
        elif self.block is not None and getattr(self.block.column, "sequence_parallel", False):
            self.compute()  # what travels next is the gather of the result

    @torch.no_grad()
    def compute(self) -> None:
        """Wait for the sum, then fill ``x`` and ``y``."""
        if self._computed:
            return
        self._computed, residual, last = True, self.residual, self.last
        del self.residual, self.last  # nothing is kept alive
        if last is not None:
            entered, total, bias = last
            total = (total if entered.started is None else entered.started.wait()).detach()
            total = total.to(residual.dtype)
            if bias is not None:
                total = total + bias
            drop = entered.block.draw(total)
            self.adjoint.drop = drop if self.x.requires_grad else None
            residual = residual + (total if drop is None else drop(total))
        self.x.data = residual.detach()
        if self.block is not None:
            leaf = residual.detach().requires_grad_(self.y.requires_grad)
            with torch.set_grad_enabled(self.y.requires_grad):
                y = self.block.norm(leaf)
            self.y.data = y.detach()
            self.adjoint.hold(leaf, y)
            if hasattr(self.block.column, "start_gather"):
                self.gathered = self.block.column.start_gather(self.y)


class Adjoint:
    """The backward of an entry. Apart from it: ``x`` and ``y`` hold this, and must not hold themselves.

    Args:
        parameters: of the norm.
        exchange: of the gradient of ``y``; the block's column-parallel layer starts it.
        of: that of the entry whose ``x`` is the residual stream before.
        last: that of the lane's last block's entry.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        exchange: InputGradientExchange,
        of: "Adjoint | None",
        last: "Adjoint | None",
    ) -> None:
        self.parameters, self.exchange, self.of, self.last = parameters, exchange, of, last
        self.drop: Linear | None = None
        self.site: CommSite | None = None
        """Gathers the gradient of the block's sum, where its row-parallel layer is going to need that."""
        self.gathered: Work | None = None
        """That gather, begun before the block's backward."""
        self.beside: Adjoint | None = None
        """Of the other lane's entry whose exchange is under way in this block's backward."""
        self._leaf: torch.Tensor | None = None
        self._of_norm: Any = None
        self._grad_x: torch.Tensor | None = None
        self._found: tuple | None = None

    def hold(self, leaf: torch.Tensor, y: torch.Tensor) -> None:
        """Keep the graph of the norm, from ``leaf`` to ``y``, and not ``y`` itself."""
        if y.requires_grad:
            self._leaf, self._of_norm = leaf, get_gradient_edge(y)

    def ahead(self) -> None:
        """With sequence parallelism: take the input's gradient and begin to gather the sum's.

        Called in the other lane's backward before its last product, behind which the gather then travels. The
        gradient of ``x`` is known: one entry takes ``x`` as its residual, and its backward has been.
        """
        gathers = self.last is not None and self.last.site is not None
        if gathers and self.exchange.work is not None and self._grad_x is not None:
            self._found = self.gradients(self._grad_x, None)
            grad_total = self._found[1]
            self.last.gathered = self.last.site.all_gather(grad_total, "tp.backward")

    def gradients(self, grad_x: torch.Tensor | None, grad_y: torch.Tensor | None) -> tuple:
        """Of the residual stream before, of dropout's input, and of the norm's parameters."""
        if self._found is not None:
            found, self._found = self._found, None
            return found
        grad, self._grad_x = grad_x, None
        grad_parameters: list[torch.Tensor | None] = [None] * len(self.parameters)
        if self.exchange.work is not None:
            grad_y = self.exchange.take()
        if grad_y is not None:
            if self._of_norm is None:
                raise RuntimeError("blocks in turn have one backward a forward; drop retain_graph=True")
            trained = [one for one in self.parameters if one.requires_grad]
            grad, *found = torch.autograd.grad(
                self._of_norm, [self._leaf, *trained], grad_y, allow_unused=True
            )
            left = iter(found)
            grad_parameters = [next(left) if one.requires_grad else None for one in self.parameters]
            grad = grad if grad_x is None else grad.add_(grad_x)
        self._leaf = self._of_norm = None
        if self.of is not None:
            self.of._grad_x = grad
        # Adjoints hold each other in rings: what is large goes now, not when Python looks for such.
        drop, self.drop, self.of, self.beside = self.drop, None, None, None
        return grad, grad if grad is None or drop is None else drop(grad), grad_parameters


class _EntryNode(torch.autograd.Function):
    """``x = residual + dropout(total + bias)`` and ``y = norm(x)``, whose values the entry fills in."""

    @staticmethod
    def forward(ctx, adjoint, residual, total, bias, *parameters):
        ctx.set_materialize_grads(False)
        ctx.adjoint, ctx.bias = adjoint, None if bias is None else (bias.shape, bias.dtype)
        ctx.total = None if total is None else total.dtype
        dtype = parameters[0].dtype if parameters else residual.dtype
        return empty(residual, residual.dtype), empty(residual, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_x, grad_y):
        grad, grad_total, grad_parameters = ctx.adjoint.gradients(grad_x, grad_y)
        grad_bias = None
        if ctx.total is None or grad is None:
            return None, grad, None, None, *grad_parameters
        if ctx.bias is not None and ctx.needs_input_grad[3]:
            shape, dtype = ctx.bias
            grad_bias = grad_total.reshape(-1, *shape).sum(dim=0).to(dtype)
        return None, grad, grad_total.to(ctx.total), grad_bias, *grad_parameters


def in_turns(blocks: Sequence[Block], lanes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``blocks`` in their order, the first one of the first half, the next of the other, and so on.

    Args:
        blocks: an even number.
        lanes: the residual streams of the two halves ``[s, b, h]``.
    Returns: The streams behind the last block.
    """
    ahead = [*blocks, None, None]
    entries = [Entry(residual, block) for residual, block in zip(lanes, ahead[:2], strict=True)]
    for number, block in enumerate(blocks):
        entry, other = entries
        total, bias = block.run(entry, other)
        entries = [other, Entry(entry, ahead[number + 2], (entry, total, bias))]
    for entry in entries:
        entry.compute()
    return entries[0].x, entries[1].x


def empty(like: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A tensor without memory, of ``like``'s shape unless given: its values are not there yet, or never."""
    shape = like.shape if shape is None else shape
    return torch.empty_strided(tuple(shape), (0,) * len(shape), dtype=dtype, device=like.device)
