"""Interleaved halves of a micro-batch: a sum of one half overlaps with a block of the other half.

A block is an attention or an MLP, with the norm before it and the residual add after it. It communicates
twice: its output is summed, and in the backward its input's gradient is. Block i of the halves 1 and 2:

    forward   block i of 1, block i of 2, norm of 1, block i+1 of 1, ...    sum of 1 overlaps with block of 2
    backward  block i of 2, block i of 1, norm of 2, block i-1 of 2, ...    gradient of 2 with block of 1

All on one stream, in the host's order: with CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron demands before
Blackwell, a second stream that waits for an exchange would hold up the first one's kernels.

In the backward the autograd engine runs, of the nodes that are ready, the one that was made last. Made where
it is computed, the norm of 2 would follow the next block of 1 in the forward and so precede it in the
backward, where it waits for the gradient of 2. So a norm and the add before it are one node, a
``BlockInput``, made when the sum has been started (before the other half's block) and computed when the sum
has arrived (after that block).

Layers do not know of this: while a block runs, stand-ins for the sites of its column-parallel and its
row-parallel layer start the layers' messages and keep them under way.

Every rank runs the same order, so collectives match. A weight that both halves use is one leaf of one graph:
its gradients are added on the stream one after the other, and DDP's hook runs once, after both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from megatron.compression.communication import Work
from megatron.compression.communication.site import CommSite, Message
from megatron.compression.tensor_parallel.functions import placeholder

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Dropout with its mask drawn: the same map for values and gradients."""


@dataclass
class Block:
    """An attention or an MLP of a transformer layer, as one half runs it."""

    module: Callable[..., tuple]
    norm: torch.nn.Module
    column: torch.nn.Module
    """Its layer of the input, which sums the input's gradient."""
    row: torch.nn.Module
    """Its layer that sums the output."""
    draw: Callable[[torch.Tensor], Linear | None] = lambda total: None
    """Draws the dropout of its output, of which it is given one; None: no dropout."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of ``module``, besides its input."""

    def run(self, entered: "BlockInput", other: "BlockInput") -> "BlockOutput":
        """Compute, and start to sum the output; the sum of ``other``, the other half's next input, is under
        way."""
        entered.compute()
        column, row = entered.backward.column, _RowSite(self.row.site)
        column.other = other.backward
        # After the first product the other half's sum is moved on.
        hook = self.column.register_forward_hook(lambda *_: other.advance())
        self.column.site, self.row.site = column, row
        try:
            total, bias = self.module(entered.y, **self.arguments)
        finally:
            hook.remove()
            self.column.site, self.row.site = column.site, row.site
        row.has_backward = total.requires_grad
        return BlockOutput(row, total, bias, self.draw)


class BlockOutput(NamedTuple):
    """What a half's block has computed."""

    row: "_RowSite"
    """Has the sum under way."""
    total: torch.Tensor
    """The sum's place in the graph; it has no values."""
    bias: torch.Tensor | None
    draw: Callable[[torch.Tensor], Linear | None]


class _Site:
    """Stands in for a layer's site while a block of one half runs, and in its backward."""

    def __init__(self, site: CommSite) -> None:
        self.site, self.group = site, site.group

    def compresses(self, nbytes: int, *traffic: str) -> bool:
        """True, so that the layer sends by this site, which leaves what goes uncompressed under way too."""
        return True


class _RowSite(_Site):
    """Of a row-parallel layer: its sum stays under way; its gradient's gather may be under way already."""

    total: Work | None = None
    gathered: Work | None = None
    has_backward = False

    def message(self, traffic: str, operation: str, nbytes: int) -> Any:
        """A sum, for which the layer gets a tensor without values; or the gradient's gather, which may be
        under way already."""
        if operation == "all_gather":
            gathered, self.gathered = self.gathered, None
            if gathered is not None:
                return SimpleNamespace(start=lambda _: gathered)
            return self.site.message(traffic, operation, nbytes)
        message, ranks = self.site.message(traffic, operation, nbytes), self.group.size()

        def start(tensor: torch.Tensor) -> Work:
            self.total = message.start(tensor)
            rows = tensor.shape[0] // (ranks if operation == "reduce_scatter" else 1)
            return Work.completed(_empty(tensor, tensor.dtype, (rows, *tensor.shape[1:])))

        return SimpleNamespace(start=start)


class _ColumnSite(_Site):
    """Of a column-parallel layer: its input's gather is under way already; its input gradient's sum stays."""

    gradient: Work | None = None
    other: "_InputBackward | None" = None
    """Of the other half's input, whose gradient is under way in this block's backward."""

    def start_gather(self, y: torch.Tensor) -> None:
        """Begin to gather the layer's input ``[s / W, b, h]``."""
        message = self.site.message("tp.forward", "all_gather", y.nbytes * self.group.size())
        payload = message.encode(y)
        held = [
            message.gather(payload, y.shape, y.dtype),
            payload,
        ]  # until the layer has asked for them
        self._gather: SimpleNamespace | None = SimpleNamespace(
            encode=lambda _: held.pop(),
            gather=lambda *_: held.pop(),
            again=partial(self._again, message),
        )

    def _again(self, first: Message, traffic: str, nbytes: int) -> SimpleNamespace:
        """In the backward a new gather, after which the other half's gather of its gradient begins."""
        message = first.again(traffic, nbytes)

        def gather(*what: Any) -> Work:
            work = message.gather(*what)
            if self.other is not None:
                self.other.start_gather()
            return work

        return SimpleNamespace(gather=gather)

    def message(self, traffic: str, operation: str, nbytes: int) -> Any:
        """The gather that ``start_gather`` has started; or the sum of the input gradient."""
        if operation == "all_gather":
            gather, self._gather = self._gather, None
            return gather
        message, ranks = self.site.message(traffic, operation, nbytes), self.group.size()

        def start(tensor: torch.Tensor) -> Work:
            self.gradient = message.start(tensor)
            rows = tensor.shape[0] // (ranks if operation == "reduce_scatter" else 1)
            return _KeptUnderWay(self.gradient, placeholder(tensor[:rows]))

        return SimpleNamespace(start=start)


class _KeptUnderWay(Work):
    """Another work without its last exchange: ``wait`` gives a placeholder at once."""

    def __init__(self, work: Work, result: torch.Tensor) -> None:
        super().__init__(None)
        self._work, self._placeholder = work, result

    @property
    def exchanges(self) -> int:
        return max(self._work.exchanges - 1, 0)

    def advance(self) -> None:
        self._work.advance()

    def wait(self) -> torch.Tensor:
        return self._placeholder


class BlockInput:
    """The input of a half's next block (None: after the last): the residual add and the norm, made early and
    computed late.

    Args:
        residual: the residual stream before the half's last block ``[s, b, h]``: the model's input, or the
            input of that block.
        last: the output of the half's last block; None at the beginning.
    """

    def __init__(
        self,
        residual: "torch.Tensor | BlockInput",
        block: Block | None,
        last: BlockOutput | None = None,
    ) -> None:
        self.block, self.last, before = block, last, None
        if isinstance(residual, BlockInput):
            residual, before = residual.x, residual.backward
        self.residual = residual
        parameters = [] if block is None else list(block.norm.parameters())
        column = None if block is None else _ColumnSite(block.column.site)
        self.backward = _InputBackward(
            parameters, column, before, None if last is None else last.row
        )
        total, bias = (None, None) if last is None else (last.total, last.bias)
        self.x, self.y = _BlockInputNode.apply(self.backward, residual, total, bias, *parameters)
        """The residual stream and the block's input, both ``[s, b, h]`` and empty until computed."""
        self._computed = False

    @property
    def _gathers(self) -> bool:
        return self.block is not None and getattr(self.block.column, "sequence_parallel", False)

    def advance(self) -> None:
        """Move on what is under way, but leave an exchange to overlap with what comes next."""
        if self._computed:
            return
        work = self.last.row.total if self.last is not None else None
        if work is not None and work.exchanges > 1:
            work.advance()
        elif self._gathers:
            self.compute()  # the next exchange is the gather of the result

    @torch.no_grad()
    def compute(self) -> None:
        """Wait for the sum, then fill ``x`` and ``y``."""
        if self._computed:
            return
        self._computed, residual, last = True, self.residual, self.last
        del self.residual, self.last  # nothing is kept alive
        if last is not None:
            work, last.row.total = last.row.total, None
            total = work.wait().to(residual.dtype)
            if last.bias is not None:
                total = total + last.bias
            drop = last.draw(total)
            self.backward.drop = drop if self.x.requires_grad else None
            residual = residual + (total if drop is None else drop(total))
        self.x.data = residual.detach()
        if self.block is not None:
            leaf = residual.detach().requires_grad_(self.y.requires_grad)
            with torch.set_grad_enabled(self.y.requires_grad):
                y = self.block.norm(leaf)
            self.y.data = y.detach()
            if y.requires_grad:
                self.backward.leaf, self.backward.norm = leaf, get_gradient_edge(y)
            if self._gathers:
                self.backward.column.start_gather(self.y)


class _InputBackward:
    """The backward of a block input, an object of its own: ``x`` and ``y`` hold it, not each other.
    ``column`` has the sum of the gradient of ``y`` under way; ``before`` is of the input whose ``x`` is the
    residual stream before."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        column: _ColumnSite | None,
        before: "_InputBackward | None",
        last: _RowSite | None,
    ) -> None:
        self.parameters, self.column, self.before, self.last = parameters, column, before, last
        self.drop: Linear | None = None
        self.leaf: torch.Tensor | None = None
        self.norm: Any = None
        """The graph of the norm from ``leaf`` to ``y``, without ``y`` itself."""
        self._grad_x: torch.Tensor | None = None
        self._found: tuple | None = None

    def start_gather(self) -> None:
        """With sequence parallelism: wait for the input's gradient and begin to gather the sum's, before the
        last product of the other half's backward. The gradient of ``x`` is known then."""
        if self.last is None or not self.last.has_backward or self._grad_x is None:
            return
        if self.column is not None and self.column.gradient is not None:
            self._found = self.gradients(self._grad_x, None)
            gradient, row = self._found[1], self.last
            message = row.site.message(
                "tp.backward", "all_gather", gradient.nbytes * row.group.size()
            )
            row.gathered = message.start(gradient)

    def gradients(self, grad_x: torch.Tensor | None, grad_y: torch.Tensor | None) -> tuple:
        """Of the residual stream before, of dropout's input, and of the norm's parameters."""
        if self._found is not None:
            found, self._found = self._found, None
            return found
        grad, self._grad_x = grad_x, None
        grad_parameters: list[torch.Tensor | None] = [None] * len(self.parameters)
        if self.column is not None and self.column.gradient is not None:
            grad_y, self.column.gradient = self.column.gradient.wait(), None
        if grad_y is not None:
            if self.norm is None:
                raise RuntimeError(
                    "interleaved halves have one backward a forward; drop retain_graph=True"
                )
            trained = [one for one in self.parameters if one.requires_grad]
            grad, *found = torch.autograd.grad(
                self.norm, [self.leaf, *trained], grad_y, allow_unused=True
            )
            left = iter(found)
            grad_parameters = [next(left) if one.requires_grad else None for one in self.parameters]
            grad = grad if grad_x is None else grad.add_(grad_x)
        self.leaf = self.norm = None
        if self.before is not None:
            self.before._grad_x = grad
        # These hold each other in cycles: what is large is freed now, not by the garbage collector.
        drop, self.drop, self.before = self.drop, None, None
        if self.column is not None:
            self.column.other = None
        return grad, grad if grad is None or drop is None else drop(grad), grad_parameters


class _BlockInputNode(torch.autograd.Function):
    """``x = residual + dropout(total + bias)`` and ``y = norm(x)``, whose values ``BlockInput`` fills in."""

    @staticmethod
    def forward(ctx, backward, residual, total, bias, *parameters):
        ctx.set_materialize_grads(False)
        ctx.backward_of, ctx.bias = backward, None if bias is None else (bias.shape, bias.dtype)
        ctx.total = None if total is None else total.dtype
        dtype = parameters[0].dtype if parameters else residual.dtype
        return _empty(residual, residual.dtype), _empty(residual, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_x, grad_y):
        grad, grad_total, grad_parameters = ctx.backward_of.gradients(grad_x, grad_y)
        grad_bias = None
        if ctx.total is None or grad is None:
            return None, grad, None, None, *grad_parameters
        if ctx.bias is not None and ctx.needs_input_grad[3]:
            shape, dtype = ctx.bias
            grad_bias = grad_total.reshape(-1, *shape).sum(dim=0).to(dtype)
        return None, grad, grad_total.to(ctx.total), grad_bias, *grad_parameters


def interleave(
    blocks: Sequence[Block], halves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``blocks`` in their order, the first one of the first half, the next of the other, and so on; the
    two residual streams ``[s, b, h]`` after the last."""
    following = [*blocks, None, None]
    one, other = (
        BlockInput(half, block) for half, block in zip(halves, following[:2], strict=True)
    )
    for block, after_next in zip(blocks, following[2:], strict=True):
        one, other = other, BlockInput(one, after_next, block.run(one, other))
    one.compute()
    other.compute()
    return one.x, other.x


def _empty(
    like: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor of one value's memory, of ``like``'s shape unless given, whose values come later or never."""
    shape = like.shape if shape is None else shape
    return torch.empty_strided(tuple(shape), (0,) * len(shape), dtype=dtype, device=like.device)
