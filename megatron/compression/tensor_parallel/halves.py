"""Interleaved halves of a micro-batch: a sum of one half overlaps with a block of the other half.

A block is an attention or an MLP, with the norm before it and the residual add after it. It
communicates twice: its output is summed over the tensor-parallel ranks, and in the backward its
input's gradient is.

The forward of two blocks, A and M, in the host's order. A1 is block A of half 1; in(M1) is the
``BlockInput`` between A1 and M1, which adds the sum of A1 to the residual stream and computes the
norm of M1.

    host                                                   link
    in(A1), in(A2): nodes made
    in(A1) computed, A1 runs, its sum started              sum of A1, first exchange
    in(M1): node made
    in(A2) computed, A2 runs as far as its first product   |
      sum of A1 advanced                                   sum of A1, second exchange
      A2 runs to its end, its sum started                  sum of A2, first exchange
    in(M2): node made
    in(M1) computed: waits for the sum of A1               |
      M1 runs as far as its first product                  |
      sum of A2 advanced                                   sum of A2, second exchange
      ...

The backward is ordered by the autograd engine: of the nodes that are ready it runs the one that was
made last. The nodes were made in the order

    in(A1)  in(A2)  [A1]  in(M1)  [A2]  in(M2)  [M1]  end(1)  [M2]  end(2)

so that the engine runs end(2), [M2], end(1), [M1], in(M2), [A2], in(M1), [A1], in(A2), in(A1).
Between [M2], which starts the sum of its input gradient, and in(M2), which waits for it, lies all
of [M1]:

    backward   [M2]    end(1) [M1]    in(M2) [A2]    in(M1) [A1]    in(A2)    in(A1)
    link          gradient of M2   gradient of M1   gradient of A2   gradient of A1

That is why the residual add and the norm are one node, made early and computed late. Made where it
is computed, in(M2) would come after [M1] in the forward. In the backward it would then precede
[M1], and wait for the gradient of M2 with nothing to overlap it.

Invariants:

- Everything runs on one stream, in the host's order. With CUDA_DEVICE_MAX_CONNECTIONS=1, which
  Megatron demands before Blackwell, a second stream that waits for an exchange would hold up the
  first one's kernels.
- Every rank runs the same order, so collectives match.
- A weight that both halves use is one leaf of one graph: its gradients are added on the stream one
  after the other, and DDP's hook runs once, after both.
- Layers do not know of this: they send by stand-ins for their sites (halves_messages.py).
- Recomputation leaves the graph, and so the order, as it is (halves_recompute.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.compression.tensor_parallel.halves_messages import (
    AgainStandIn,
    ColumnStandIn,
    RowStandIn,
    empty,
)
from megatron.compression.tensor_parallel.halves_recompute import Recomputation, outside_hooks
from taco_kernels import residual_norm

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Dropout with its mask drawn: the same map for values and gradients."""


@dataclass
class Block:
    """An attention or an MLP of a transformer layer, as one half runs it."""

    module: torch.nn.Module
    """Maps the block's input to its output and the output's bias."""
    norm: torch.nn.Module
    """Computes the block's input from the residual stream."""
    column: torch.nn.Module
    """Its layer of the input, which sums the input's gradient."""
    row: torch.nn.Module
    """Its layer that sums the output, the last thing that ``module`` calls."""
    draw: Callable[[torch.Tensor], Linear] | None = None
    """Draws the dropout of its output, given the output; None: no dropout."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``module``."""
    recomputes_norm: bool = False
    """Whether its backward computes its input again, instead of keeping it."""
    recomputes_module: bool = False
    """Whether its backward computes again what is between its two layers."""

    def run(self, entered: "BlockInput", other_half: "BlockInput") -> "BlockOutput":
        """Compute, and start to sum the output.

        Args:
            entered: the block's input, which is computed now if it has not been.
            other_half: the other half's next input, whose sum is under way.
        """
        entered.compute()
        column = entered.backward.column
        # The column's stand-in belongs to the input, which may have begun its gather.
        row = RowStandIn(self.row.site)
        column.after_gather = other_half.backward.start_gather
        advance = other_half.advance
        saving: AbstractContextManager = nullcontext()
        recomputation = None
        if self.recomputes_norm or self.recomputes_module:
            recomputation = self._recomputation(entered)
        if recomputation is not None:
            # Within it nodes save what the backward does not compute again. The other half's norm,
            # which ``advance`` may compute in the middle of this block, saves as usual.
            saving = recomputation.hooks()
            advance = partial(outside_hooks, other_half.advance)
        # After the first product the other half's sum is moved on.
        after_first_product = self.column.register_forward_hook(lambda *_: advance())
        self.column.site = column
        self.row.site = row
        try:
            with saving:
                total, bias = self.module(entered.y, **self.arguments)
        finally:
            after_first_product.remove()
            self.column.site = column.site
            self.row.site = row.site
        if recomputation is not None:
            recomputation.ran()
        # Frozen layers and evaluation have no gradient to gather.
        row.has_backward = total.requires_grad
        return BlockOutput(row, total, bias, self.draw)

    def _recomputation(self, entered: "BlockInput") -> Recomputation | None:
        """Return what the backward of a run computes again, or None where it keeps everything."""
        if not torch.is_grad_enabled() or not entered.y.requires_grad:
            return None
        x = entered.x.detach() if self.recomputes_norm else None
        run_again = self._run_again if self.recomputes_module else None
        parameters = list(self.module.parameters())
        return Recomputation(entered.y, x, self.norm, parameters, run_again)

    def _run_again(self, y: torch.Tensor, save: Callable[[torch.Tensor], None]) -> None:
        """Run the module as far as its second layer, in the backward.

        Args:
            y: the block's input ``[s, b, h]``.
            save: is given the second layer's input, which that layer saves.
        """

        def take(x: torch.Tensor) -> tuple[torch.Tensor, None]:
            if x.requires_grad or self.row.weight.requires_grad:
                save(x)
            return x, None

        column = self.column
        site = column.site
        deferred = column.deferred
        column.site = AgainStandIn(site)
        # The weight gradients are those of the first run.
        column.deferred = None
        # Neither the second layer's product nor the sum is needed: its input is all that it saves.
        # Set on the module itself, where Python looks before the class.
        self.row.forward = take
        try:
            self.module(y, **self.arguments)
        finally:
            del self.row.forward
            column.site = site
            column.deferred = deferred


class BlockOutput(NamedTuple):
    """What a half's block has computed."""

    row: RowStandIn
    """Has the sum under way."""
    total: torch.Tensor
    """The sum's node in the graph; it has no values."""
    bias: torch.Tensor | None
    """Added to the sum."""
    draw: Callable[[torch.Tensor], Linear] | None
    """See ``Block.draw``."""


class BlockInput:
    """The input of a half's next block: the residual add and the norm, made early and computed
    late.

        x = residual + dropout(sum + bias)        the residual stream
        y = norm(x)                               the block's input

    Args:
        residual: the residual stream before the half's previous block ``[s, b, h]``: the model's
            input, or the input of that block.
        block: the next block; None after the last one, where ``x`` is the result and there is no
            ``y``.
        output: what the half's previous block has computed; None at the beginning.
    """

    def __init__(
        self,
        residual: "torch.Tensor | BlockInput",
        block: Block | None,
        output: BlockOutput | None = None,
    ) -> None:
        previous = None
        if isinstance(residual, BlockInput):
            previous = residual.backward
            residual = residual.x
        self.block = block
        self.output = output
        self.residual = residual
        # The norm's parameters are inputs of the node, since it computes their gradients.
        parameters: list[torch.nn.Parameter] = []
        column = row = total = bias = None
        if block is not None:
            parameters = list(block.norm.parameters())
            column = ColumnStandIn(block.column.site)
        if output is not None:
            row = output.row
            total = output.total
            bias = output.bias
        self.backward = BlockInputBackward(parameters, column, previous, row)
        self.x, self.y = _BlockInputNode.apply(self.backward, residual, total, bias, *parameters)
        """The residual stream and the block's input, both ``[s, b, h]`` and without values until
        computed."""
        self._computed = False
        self._gathers = block is not None and getattr(block.column, "sequence_parallel", False)
        """Whether the block begins with a gather of its input, as with sequence parallelism."""
        self._adds_in_one_pass = block is not None and _adds_in_one_pass(block)
        """Whether one kernel may add to the residual stream and compute the norm."""

    def advance(self) -> None:
        """Move on what is under way, but leave an exchange to overlap with what comes next."""
        if self._computed:
            return
        work = None
        if self.output is not None:
            work = self.output.row.total
        if work is not None and work.exchanges > 1:
            # The first exchange has ended behind the other half's work; the second one begins.
            work.advance()
        elif self._gathers:
            # What has to be waited for is the last exchange or nothing. The block's own gather of
            # the result comes next, and begins here to overlap with the other half.
            self.compute()

    @torch.no_grad()
    def compute(self) -> None:
        """Wait for the sum, then give ``x`` and ``y`` their values; only the first call does."""
        if self._computed:
            return
        self._computed = True
        residual = self.residual
        output = self.output
        del self.residual, self.output  # nothing is kept alive
        total = bias = drop = None
        # One kernel behind a lossy sum alone. Uncompressed runs, and lossless ones, which have the
        # same bits, keep those of torch's own norm. An uncompressed run gained nothing by the
        # kernel where it was measured (docs/results/graphs.md).
        one_pass = False
        if output is not None:
            # Taken out, so that the sum is freed when it has been added.
            work, output.row.total = output.row.total, None
            total = work.wait().to(residual.dtype)
            bias = output.bias
            if output.draw is not None:
                drop = output.draw(total)
            one_pass = self._adds_in_one_pass and output.row.is_lossy and drop is None
        if one_pass:
            self._add_and_norm(residual, total, bias)
        else:
            self._add_then_norm(residual, total, bias, drop)
        if self._gathers:
            self.backward.column.start_gather(self.y)

    def _add_and_norm(
        self, residual: torch.Tensor, total: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Give ``x`` and ``y`` their values in one pass over memory.

        Args:
            residual: the residual stream ``[s, b, h]``.
            total: the sum that is added to it.
            bias: ``[h]``, added too; None: there is none.
        """
        norm = self.block.norm
        beta = getattr(norm, "bias", None)
        normed = residual_norm.forward(
            residual, total, bias, norm.weight, beta, norm.eps, norm.zero_centered_gamma
        )
        self.x.data = normed.x
        self.y.data = normed.y
        if self.y.requires_grad:
            # Without y, which belongs to the block.
            self.backward.normed = normed._replace(y=None)
            self.backward.norm_module = norm

    def _add_then_norm(
        self,
        residual: torch.Tensor,
        total: torch.Tensor | None,
        bias: torch.Tensor | None,
        drop: Linear | None,
    ) -> None:
        """Give ``x`` and ``y`` their values step by step.

        Args:
            residual: the residual stream ``[s, b, h]``.
            total: the sum that is added to it, of its type; None: there is no block before.
            bias: of the sum, or None.
            drop: dropout of both, or None.
        """
        stream = residual
        if total is not None:
            if bias is not None:
                total = total + bias
            if drop is not None:
                total = drop(total)
                if self.x.requires_grad:
                    # Its mask is needed in the backward, where there is one.
                    self.backward.drop = drop
            stream = residual + total
        # By ``data``: x and y are outputs of a node whose position in the graph is fixed; any other
        # way to give them values is another node, later in the order. Nobody has read them, so
        # autograd has saved nothing.
        self.x.data = stream.detach()
        if self.block is None:
            return
        has_gradient = self.y.requires_grad
        # The norm is computed on a leaf, with a graph of its own that ``BlockInputBackward`` runs.
        leaf = stream.detach().requires_grad_(has_gradient)
        with torch.set_grad_enabled(has_gradient):
            y = self.block.norm(leaf)
        self.y.data = y.detach()
        if y.requires_grad:
            self.backward.leaf = leaf
            self.backward.norm = get_gradient_edge(y)


def _adds_in_one_pass(block: Block) -> bool:
    """Return whether one kernel may stand for the residual add before a block and its norm."""
    norm = block.norm
    # Hooks run where the module is called. DDP's wait for updated weights that are still being
    # gathered (--overlap-param-gather): without them the kernel would read last iteration's.
    if norm._forward_pre_hooks or norm._forward_hooks:
        return False
    if norm._backward_pre_hooks or norm._backward_hooks:
        return False
    # A norm that the backward computes again must give the same bits then, by its own kernel.
    return not block.recomputes_norm and getattr(norm, "adds_in_one_pass", False)


class BlockInputBackward:
    """The backward of a block input: gradients of the residual stream, of the sum and of the norm.

    An object of its own: the graph holds it, not the ``BlockInput`` with its tensors. It and those
    of the neighbours hold each other in cycles, so ``gradients`` drops every reference itself: the
    memory is freed then, not when Python's garbage collector comes by.

    Args:
        parameters: those of the norm.
        column: of the next block: has the sum of the gradient of ``y`` under way. None: there is no
            block.
        previous: of the input of the half's previous block, whose ``x`` is the residual stream
            before.
        row: of the half's previous block: gathers the gradient of its sum. None: there is no block.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        column: ColumnStandIn | None,
        previous: "BlockInputBackward | None",
        row: RowStandIn | None,
    ) -> None:
        self.parameters = parameters
        self.column = column
        self.previous = previous
        self.row = row
        self.drop: Linear | None = None
        """Dropout of the previous block's output; None: none."""
        self.leaf: torch.Tensor | None = None
        """The norm's input, in the norm's own graph."""
        self.norm: GradientEdge | None = None
        """The end of that graph, without ``y`` itself."""
        self.normed: residual_norm.Normed | None = None
        """What the norm's backward needs, where the add and the norm were one pass; then there is
        no graph."""
        self.norm_module: torch.nn.Module | None = None
        """The norm, in that case."""
        self._grad_x: torch.Tensor | None = None
        """The gradient of ``x``, known before the engine gives it."""
        self._early: tuple | None = None
        """What ``gradients`` returns, where ``start_gather`` has computed it early."""

    def start_gather(self) -> None:
        """Compute the gradients and begin to gather that of the previous sum, with sequence
        parallelism.

        Called before the last product of the other half's backward, which overlaps with the gather.
        The gradient of ``x`` is known by then: the next input of this half has computed it.
        """
        if self.row is None or not self.row.has_backward or self._grad_x is None:
            return
        if self.column is not None and self.column.gradient is not None:
            self._early = self.gradients(self._grad_x, None)
            self.row.start_gradient_gather(self._early[1])

    def gradients(self, grad_x: torch.Tensor | None, grad_y: torch.Tensor | None) -> tuple:
        """Return all gradients of the block input.

        Args:
            grad_x: of ``x``; None: ``x`` has none.
            grad_y: of ``y``; a placeholder where the column-parallel layer has its sum under way,
                which is waited for here.

        Returns: the gradients of the residual stream before, of dropout's input (the previous
            block's sum and bias), a list of those of the norm's parameters, and that of the bias
            where it is known, fp32 ``[h]``.
        """
        if self._early is not None:
            early, self._early = self._early, None
            return early
        self._grad_x = None
        if self.column is not None and self.column.gradient is not None:
            work, self.column.gradient = self.column.gradient, None
            # The layer gave a placeholder, since it did not wait.
            grad_y = work.wait()
        gradient = grad_x
        grad_parameters: list[torch.Tensor | None] = [None] * len(self.parameters)
        grad_bias = None
        if grad_y is not None and self.normed is not None:
            gradient, grad_parameters, grad_bias = self._through_add_and_norm(grad_y, grad_x)
        elif grad_y is not None:
            gradient, grad_parameters = self._through_norm(grad_y)
            if grad_x is not None:
                gradient = gradient.add_(grad_x)
        if self.previous is not None:
            # The previous input may begin its gather with it before the engine comes to its node.
            self.previous._grad_x = gradient
        drop = self.drop
        # What is large is dropped, and the references that close cycles with the neighbours.
        self.leaf = self.norm = self.drop = self.previous = None
        self.normed = self.norm_module = None
        if self.column is not None:
            self.column.after_gather = None
        grad_output = gradient
        if gradient is not None and drop is not None:
            grad_output = drop(gradient)
        return gradient, grad_output, grad_parameters, grad_bias

    def _through_add_and_norm(
        self, grad_y: torch.Tensor, grad_x: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None], torch.Tensor]:
        """Return the gradient of the residual stream in whole, those of the norm's parameters, and
        that of the bias; arguments as of ``gradients``."""
        norm = self.norm_module
        centres = getattr(norm, "bias", None) is not None
        gradient, columns = residual_norm.backward(
            grad_y, grad_x, self.normed, norm.weight, centres, norm.zero_centered_gamma
        )
        grad_gamma, grad_beta, grad_bias = columns
        # In the order of the norm's parameters; RMS norm has no second one.
        grad_parameters: list[torch.Tensor | None] = []
        for parameter, grad in zip(self.parameters, (grad_gamma, grad_beta), strict=False):
            if parameter.requires_grad:
                grad_parameters.append(grad.to(parameter.dtype))
            else:
                grad_parameters.append(None)
        return gradient, grad_parameters, grad_bias

    def _through_norm(self, grad_y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return the gradients of the norm's input and of its parameters, None for those not
        trained."""
        if self.norm is None:
            raise RuntimeError(
                "interleaved halves have one backward a forward; drop retain_graph=True"
            )
        # Frozen parameters of a norm have no place in its graph.
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        grad_leaf, *grad_trained = torch.autograd.grad(
            self.norm, [self.leaf, *trained], grad_y, allow_unused=True
        )
        gradients = iter(grad_trained)
        return grad_leaf, [
            next(gradients) if parameter.requires_grad else None for parameter in self.parameters
        ]


class _BlockInputNode(torch.autograd.Function):
    """The node of ``BlockInput``, whose values it fills in later."""

    @staticmethod
    def forward(ctx, backward, residual, total, bias, *parameters):
        # None says that an output had no gradient; zeros would be summed over the ranks.
        ctx.set_materialize_grads(False)
        ctx.input_backward = backward
        # Only shapes and types: the values are not there yet, and are not needed in the backward.
        ctx.bias_shape_and_dtype = None
        ctx.total_dtype = None
        if bias is not None:
            ctx.bias_shape_and_dtype = bias.shape, bias.dtype
        if total is not None:
            ctx.total_dtype = total.dtype
        # A norm gives its weight's type, also of an fp32 residual stream.
        norm_dtype = residual.dtype
        if parameters:
            norm_dtype = parameters[0].dtype
        return empty(residual, residual.dtype), empty(residual, norm_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_x, grad_y):
        gradients = ctx.input_backward.gradients(grad_x, grad_y)
        grad_residual, grad_output, grad_parameters, summed_over_tokens = gradients
        if ctx.total_dtype is None or grad_residual is None:
            return None, grad_residual, None, None, *grad_parameters
        grad_bias = None
        if ctx.bias_shape_and_dtype is not None and ctx.needs_input_grad[3]:
            shape, dtype = ctx.bias_shape_and_dtype
            if summed_over_tokens is None:
                summed_over_tokens = grad_output.reshape(-1, *shape).sum(dim=0)
            grad_bias = summed_over_tokens.to(dtype)
        grad_total = grad_output.to(ctx.total_dtype)
        return None, grad_residual, grad_total, grad_bias, *grad_parameters


def interleave(
    blocks: Sequence[Block], halves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run blocks of two halves in turn.

    Args:
        blocks: in their order: the first one of the first half, the first one of the second, and so
            on.
        halves: the residual streams ``[s, b, h]`` before the first block.

    Returns: the two residual streams ``[s, b, h]`` after the last block.
    """
    following = [*blocks, None, None]
    running = BlockInput(halves[0], following[0])
    waiting = BlockInput(halves[1], following[1])
    for block, next_of_half in zip(blocks, following[2:], strict=True):
        output = block.run(running, waiting)
        # The node is made before the other half's block runs: see the order of the backward above.
        running, waiting = waiting, BlockInput(running, next_of_half, output)
    running.compute()
    waiting.compute()
    return running.x, waiting.x
