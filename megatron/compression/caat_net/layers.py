"""The layers of a CAAT-Net: row-parallel ones synchronise only part of their output.

The method is that of arXiv 2506.19645.

With k = int(p * h) shared channels, W ranks, and rank r's partial sum y_r = x_r A_r and stream z_r:

    z_r[:k] = sum_j y_j[:k] + b[:k]                 shared: all-reduced, equal on all ranks
    z_r[k:] = sqrt(W) * (y_r[k:] + b[k:])           private: one partial sum, scaled to the
                                                    variance of W of them

Each rank has its own residual stream from there on, so that the loss is a function of W streams.
Every gradient of a stream is the loss's by that rank's stream alone; the adjoint of the formula is

    dy_r[:k] = sum_j dz_j[:k],    dy_r[k:] = sqrt(W) * dz_r[k:]

Column-parallel layers therefore reduce nothing: their input gradient already is that of their own
stream. The streams begin as copies of one embedding, whose gradient is the sum over the ranks.
"""

import math
from collections.abc import Callable

import torch

from megatron.compression.communication import Work
from megatron.compression.communication.collectives import WithBackward, fp32_all_reduce
from megatron.compression.communication.ledger import bytes_sent
from megatron.compression.communication.site import CommSite
from megatron.compression.tensor_parallel.functions import (
    DeferredWeightGradient,
    InputGradientExchange,
    gradient_from,
    placeholder,
)
from megatron.compression.tensor_parallel.layers import (
    CompressedColumnParallelLinear,
    CompressedLanguageModelEmbedding,
    CompressedRowParallelLinear,
)


def _sum_over_ranks(tensor: torch.Tensor, site: CommSite, traffic: str, private: int = 0) -> Work:
    """Start to sum over the group, with the codec or without one.

    Args:
        tensor: this rank's addend; it may come to hold the sum.
        site: decides and counts.
        traffic: tp.forward or tp.backward.
        private: bytes of private channels, which ordinary tensor parallelism would sum as well.
            They are counted as not sent.
    """
    decision = site.decide(traffic, tensor.nbytes)
    codec, reason = decision
    if private:
        uncompressed_bytes = bytes_sent("all_reduce", private, site.group.size())
        site.run.ledger.record(traffic, reason, "instead_of_all_reduce", 0, uncompressed_bytes)
    if codec is None and traffic == "tp.backward" and tensor.itemsize == 2:
        # Gradients of two bytes a value are summed in fp32 and rounded once.
        for operation in ("all_to_all", "all_gather"):
            site.count(traffic, reason, operation, tensor.nbytes)
        return fp32_all_reduce(tensor, site.group)
    message = site.message(traffic, "all_reduce", tensor.nbytes, decision)
    return message.start(tensor, tensor if codec is None else None)


class _PartialRowParallelLinear(torch.autograd.Function):
    """The two blocks of the weight's rows are two GEMMs: an exchange overlaps with the private one.

    Rows of the weight are channels of the output, so the shared channels come out contiguous, as
    one message.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, site, shared, exchange, unfinished):
        """See ``PartialRowParallelLinear.forward``.

        Args:
            x: ``[s, b, h_in / W]``.
            weight: ``[h_out, h_in / W]``, shared channels first.
            bias: ``[h_out]`` or None.
            site: of the layer.
            shared: number of shared channels.
            exchange: gets the exchange of the input gradient.
            unfinished: gets what completes the weight's gradient.
        """
        ctx.site = site
        ctx.shared = shared
        ctx.has_bias = bias is not None
        ctx.exchange = exchange
        ctx.unfinished = unfinished
        ctx.save_for_backward(x, weight)
        scale = math.sqrt(site.group.size())
        rows = x.reshape(-1, x.shape[-1])
        output = x.new_empty(rows.shape[0], weight.shape[0])
        # The shared channels first: their sum is under way during the private channels' GEMMs.
        partial_sum = torch.matmul(rows, weight[:shared].t())
        work = _sum_over_ranks(partial_sum, site, "tp.forward", output.nbytes - partial_sum.nbytes)
        private = weight[shared:].t()
        pieces = 2 if work.exchanges > 1 else 1
        blocks = zip(rows.chunk(pieces), output[:, shared:].chunk(pieces), strict=True)
        for number, (block, destination) in enumerate(blocks):
            if number > 0:
                work.advance()
            if bias is None:
                torch.addmm(destination, block, private, beta=0, alpha=scale, out=destination)
            else:
                torch.addmm(bias[shared:], block, private, beta=scale, alpha=scale, out=destination)
        if bias is None:
            output[:, :shared] = work.wait()
        else:
            torch.add(work.wait(), bias[:shared], out=output[:, :shared])
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        shared = ctx.shared
        scale = math.sqrt(ctx.site.group.size())
        rows = x.reshape(-1, x.shape[-1])
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        # A copy: the sum may be formed in it, and other nodes still read grad_output.
        shared_gradient = grad_output[:, :shared].clone(memory_format=torch.contiguous_format)
        left_out = grad_output.nbytes - shared_gradient.nbytes
        work = _sum_over_ranks(shared_gradient, ctx.site, "tp.backward", left_out)
        private = grad_output[:, shared:]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            of_private = torch.matmul(private, weight[shared:])

            def add_shared(total: torch.Tensor) -> torch.Tensor:
                return torch.addmm(of_private, total, weight[:shared], beta=scale).view(x.shape)

            ctx.exchange.work = work.then(add_shared)
            grad_x = placeholder(x)
        # No other weight gradient overlaps with the second exchange, so it starts before the
        # private rows' GEMM.
        if work.exchanges > 1 and not ctx.exchange.waiting:
            work.advance()
        if ctx.needs_input_grad[1]:
            # The private rows now, the shared ones when their sum has arrived.
            full = torch.empty_like(weight)
            torch.addmm(full[shared:], private.t(), rows, beta=0, alpha=scale, out=full[shared:])

            def finish() -> torch.Tensor:
                torch.matmul(work.wait().t(), rows, out=full[:shared])
                return full

            ctx.unfinished.append(finish)
            grad_weight = placeholder(weight)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            # This rank's stream alone: the ranks' are summed once an iteration (hooks.py).
            grad_bias = grad_output.sum(dim=0)
            grad_bias[shared:] *= scale
        # site, shared, exchange and unfinished have no gradients.
        return grad_x, grad_weight, grad_bias, None, None, None, None


class _LinearDeferring(torch.autograd.Function):
    """``x @ weight.T + bias``, whose weight's gradient overlaps with another layer's exchange."""

    @staticmethod
    def forward(ctx, x, weight, bias, gradient):
        """Return the product.

        Args:
            x: ``[s, b, h_in]``.
            weight: ``[h_out, h_in]``.
            bias: ``[h_out]`` or None.
            gradient: computes the weight's gradient.
        """
        ctx.save_for_backward(x, weight)
        ctx.gradient = gradient
        ctx.has_bias = bias is not None
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = torch.matmul(rows, weight).view(x.shape)
        ctx.gradient.provide(lambda: (rows, x.reshape(-1, x.shape[-1])))
        if ctx.has_bias:
            grad_bias = rows.sum(dim=0)
        return grad_input, placeholder(weight), grad_bias, None


class PartialRowParallelLinear(CompressedRowParallelLinear):
    """Attention projection or fc2 whose first channels alone are all-reduced, forward and backward:
    without a codec in fp32 whatever the gradient's dtype. The exchange overlaps with the private
    channels' GEMMs and the weight gradient ``following``, ordered as in
    tensor_parallel/functions.py."""

    shared_channels: int
    following: DeferredWeightGradient | None = None
    """That of the column-parallel layer after this one."""
    traffic = ("tp.forward", "tp.backward")

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map ``[s, b, h_in / W]`` to ``[s, b, h_out]``, bias included: it is scaled with the
        private channels.

        The bias's gradient is that of this rank's stream.
        """
        weight = self.weight
        exchange = InputGradientExchange()
        # The shared rows of the weight's gradient need the gradient's sum. They are never added to
        # main_grad here: no other backward of that weight does so, and DDP's hook adds it.
        unfinished: list[Callable[[], torch.Tensor]] = []
        if self.following is not None:
            self.following.use()  # what is left belongs to another graph
        if torch.is_grad_enabled():
            # Nodes in the order of tensor_parallel/functions.py: the engine runs the last one made
            # first.
            weight = gradient_from(lambda: unfinished.pop()(), weight)
            input_ = gradient_from(exchange.wait, input_)
            if self.following is not None:
                self.following.prepare(exchange)
        output = _PartialRowParallelLinear.apply(
            input_, weight, self.bias, self.site, self.shared_channels, exchange, unfinished
        )
        return output, None


class StreamColumnParallelLinear(CompressedColumnParallelLinear):
    """qkv, fc1 or the output layer of one rank's stream: nothing is communicated, forward or
    backward."""

    following: DeferredWeightGradient | None = None
    """This layer's, shared with the row-parallel layer before it."""
    traffic = ()

    def _forward_impl(self, input, weight, *args, **kwargs):
        prepared = None if self.following is None else self.following.use()
        if prepared is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        weight, gradient = prepared
        if not torch.is_grad_enabled():  # a region to be recomputed, inside a graph
            return super()._forward_impl(input, self.weight, *args, **kwargs)
        return _LinearDeferring.apply(input, weight, kwargs["bias"], gradient)


class StreamEmbedding(CompressedLanguageModelEmbedding):
    """Word and position embeddings, from which every rank's stream begins: their gradient is
    summed."""

    traffic = ("tp.backward",)

    def forward(self, input_ids, position_ids, tokentype_ids=None) -> torch.Tensor:
        """Map token ids to ``[s, b, h]``; its backward has the only all-reduce of all channels.

        Args:
            input_ids: ``[b, s]``.
            position_ids: ``[b, s]``.
            tokentype_ids: ``[b, s]`` or None.
        """

        def sum_over_streams(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone(memory_format=torch.contiguous_format)
            return _sum_over_ranks(total, self.site, "tp.backward").wait()

        embeddings = super().forward(input_ids, position_ids, tokentype_ids)
        return WithBackward.apply(embeddings, lambda x: x.view_as(x), sum_over_streams)
