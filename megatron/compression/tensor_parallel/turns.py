"""Blocks in turn: what one sends travels while another, which does not need it, computes.

A block is an attention or an MLP, with the norm before it and the residual add behind it. It communicates
twice: its output is summed, and in the backward its input's gradient is. Two *lanes* of blocks that do not
need each other's sums (two halves of a micro-batch, or every second block of a ladder) take turns:

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
from megatron.compression.tensor_parallel.overlap import InputGradientExchange

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Dropout with its mask drawn: the same map for values and gradients."""


@dataclass
class Block:
    """An attention or an MLP of a transformer layer, as one lane runs it."""

    module: torch.nn.Module
    norm: torch.nn.Module
    column: torch.nn.Module
    """Its layer that takes the input, and sums the input's gradient."""
    row: torch.nn.Module
    """Its layer that sums the output."""
    draw: Callable[[torch.Tensor], Linear | None] = lambda total: None
    """Draws the dropout of its output, of which it is given one; None: no dropout."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What ``module`` is called with beside its input."""

    def run(self, entry: "Entry", behind: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute, and start to sum the output.

        Args:
            behind: called behind the first product, to move on what the other lane has under way.
        Returns: The output, whose values are those of ``entry.started`` where that is set, and its bias.
        """
        entry.compute()
        entry.behind = behind
        self.column.entry = self.row.entry = entry
        try:
            return self.module(entry.y, **self.arguments)
        finally:
            self.column.entry = self.row.entry = None


class Entry:
    """A lane on its way into the next block: the residual add and the norm, made early and computed late.

    Args:
        residual: the residual stream before the lane's last block ``[s, b, h]``; another entry's ``x``, which
            is computed before this one, will do. At the beginning, the input.
        block: the one that is entered; None behind the last.
        last: the lane's last block, its output, its bias and the sum under way; None at the beginning.
    """

    def __init__(
        self,
        residual: torch.Tensor,
        block: Block | None,
        last: tuple[Block, torch.Tensor, torch.Tensor | None, Work | None] | None = None,
    ) -> None:
        self.residual, self.block, self.last = residual, block, last
        self.started: Work | None = None
        """The sum of the entered block's output; its row-parallel layer starts it."""
        self.gathered: tuple[Any, Work] | None = None
        """With sequence parallelism ``y``, as the column-parallel layer has begun to gather it."""
        self.behind: Callable[[], None] = lambda: None
        self._adjoint = _Adjoint([] if block is None else list(block.norm.parameters()))
        _, total, bias, _ = last or (None, None, None, None)
        self.x, self.y = _EntryNode.apply(self._adjoint, residual, total, bias, *self._adjoint.parameters)
        """The residual stream and the block's input, both ``[s, b, h]`` and empty until computed."""
        self._computed = False

    @property
    def exchange(self) -> InputGradientExchange:
        """Of the gradient of ``y``; the block's column-parallel layer starts it."""
        return self._adjoint.exchange

    def advance(self) -> None:
        """Move on what is under way, but leave an exchange to travel behind what comes next."""
        work = self.last[3] if self.last is not None else None
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
        if last is not None:
            block, total, bias, work = last
            total = (total if work is None else work.wait()).detach().to(residual.dtype)
            if bias is not None:
                total = total + bias
            self._adjoint.drop = block.draw(total)
            total = total if self._adjoint.drop is None else self._adjoint.drop(total)
            residual = residual + total
        self.x.data = residual.detach()
        if self.block is not None:
            leaf = residual.detach().requires_grad_(self.y.requires_grad)
            with torch.set_grad_enabled(self.y.requires_grad):
                y = self.block.norm(leaf)
            self.y.data = y.detach()
            self._adjoint.hold(leaf, y)
            if hasattr(self.block.column, "start_gather"):
                self.gathered = self.block.column.start_gather(self.y)


class _Adjoint:
    """The backward of an entry. Apart from it: ``x`` and ``y`` hold this, and must not hold themselves."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.exchange = InputGradientExchange(shared=True)
        self.drop: Linear | None = None
        self._leaf: torch.Tensor | None = None
        self._of_norm: Any = None

    def hold(self, leaf: torch.Tensor, y: torch.Tensor) -> None:
        """Keep the graph of the norm, from ``leaf`` to ``y``, and not ``y`` itself."""
        if y.requires_grad:
            self._leaf, self._of_norm = leaf, get_gradient_edge(y)

    def of_residual(self, grad_x: torch.Tensor | None, grad_y: torch.Tensor | None) -> tuple:
        """The gradient of the residual stream behind the add, and of the norm's parameters."""
        grad_parameters: list[torch.Tensor | None] = [None] * len(self.parameters)
        if self.exchange.work is not None:
            grad_y = self.exchange.take()
        if grad_y is not None:
            trained = [one for one in self.parameters if one.requires_grad]
            grad, *found = torch.autograd.grad(
                self._of_norm, [self._leaf, *trained], grad_y, allow_unused=True
            )
            left = iter(found)
            grad_parameters = [next(left) if one.requires_grad else None for one in self.parameters]
            grad_x = grad if grad_x is None else grad.add_(grad_x)
        self._leaf = self._of_norm = None
        return grad_x, grad_parameters


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
        adjoint = ctx.adjoint
        grad, grad_parameters = adjoint.of_residual(grad_x, grad_y)
        grad_total = grad_bias = None
        if ctx.total is not None and grad is not None:
            grad_total = grad if adjoint.drop is None else adjoint.drop(grad)
            if ctx.bias is not None and ctx.needs_input_grad[3]:
                shape, dtype = ctx.bias
                grad_bias = grad_total.reshape(-1, *shape).sum(dim=0).to(dtype)
            grad_total = grad_total.to(ctx.total)
        return None, grad, grad_total, grad_bias, *grad_parameters


def in_turns(
    blocks: Sequence[Block], lanes: Sequence[torch.Tensor], own_residual: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``blocks`` in their order, the first one of the first lane, the next of the other, and so on.

    Args:
        blocks: an even number.
        lanes: the two residual streams ``[s, b, h]``.
        own_residual: each lane has a residual stream of its own (halves of a batch). Else there is one, which
            a block reads before the sum of the block before it has arrived (a ladder): ``lanes`` are then
            the stream without that sum and with it.
    Returns: The lanes behind the last block; of a ladder again without the last sum and with it.
    """
    ahead = [*blocks, None, None]
    entries = [Entry(residual, block) for residual, block in zip(lanes, ahead[:2], strict=True)]
    for number, block in enumerate(blocks):
        entry, other = entries
        total, bias = block.run(entry, other.advance)
        residual = (entry if own_residual else other).x
        entries = [other, Entry(residual, ahead[number + 2], (block, total, bias, entry.started))]
    for entry in entries:
        entry.compute()
    return entries[0].x, entries[1].x


def empty(like: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A tensor without memory, of ``like``'s shape unless given: its values are not there yet, or never."""
    shape = like.shape if shape is None else shape
    return torch.empty_strided(tuple(shape), (0,) * len(shape), dtype=dtype, device=like.device)
