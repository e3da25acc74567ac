"""Tensor-parallel layers whose collectives go through a site.

Each is megatron-core's layer with its communication replaced. Without a site (``hooks.attach``
gives it one) a layer is megatron-core's. With one, its forward asks the site once, for both
directions:

    messages = self.site.pair(...)    how the forward's and the backward's messages are sent
    if not messages.compressed:       megatron-core's own functions send them; they are counted
    else:                             our functions (functions.py) send them

Where only one direction is compressed our functions send the other one as well, uncompressed.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megatron.compression.communication.collectives import WithBackward
from megatron.compression.communication.site import CommSite, MessagePair
from megatron.compression.tensor_parallel.functions import (
    DeferredWeightGradient,
    column_parallel_linear,
    gather_channels,
    gather_columns,
    gather_tokens,
    local_tokens,
    row_parallel_linear,
    scatter_tokens,
)

BOTH = ("tp.forward", "tp.backward")
"""Traffic classes of a layer that sends in both directions."""


class CompressedRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer: attention projection and fc2.

    Compressed: the forward's all-reduce; with sequence parallelism the forward's reduce-scatter and
    the backward's all-gather.
    """

    site: CommSite | None = None
    deferred: DeferredWeightGradient | None = None
    """This layer's, shared with the column-parallel layer before it."""

    @property
    def traffic(self) -> tuple[str, ...]:
        """The traffic classes of this layer's messages."""
        return BOTH if self.sequence_parallel else ("tp.forward",)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map ``[s, b, h_in / W]`` to ``[s, b, h_out]``, or to ``[s / W, b, h_out]``.

        Returns: the output, and the bias where it is left to the caller.
        """
        output, bias = self._product(input_)
        if bias is not None:
            # A view: --recompute-modules mlp returns it from an autograd function, which would
            # otherwise make the parameter itself its output, and the backward run in a circle.
            bias = bias.view_as(bias)
        return output, bias

    def _product(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and the bias, as ``forward``, of our function or of megatron-core's
        layer."""
        if self.site is None:
            return super().forward(input_)
        tokens = input_.numel() // input_.shape[-1]
        nbytes = tokens * self.output_size * input_.element_size()
        backward = "tp.backward" if self.sequence_parallel else None
        messages = self.site.pair("tp.forward", backward, nbytes)
        if not messages.compressed:
            _count_reduction(messages, self.sequence_parallel, has_backward(input_, self.weight))
            return super().forward(input_)
        output = row_parallel_linear(
            input_,
            self.weight,
            messages,
            self.sequence_parallel,
            self.deferred,
            self.gradient_accumulation_fusion,
        )
        # As megatron-core: a bias that is left to the caller is added in a fused kernel.
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None


class CompressedColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear layer: qkv, fc1 and the output layer.

    Compressed: the all-reduce of the input gradient; with sequence parallelism the all-gathers of
    the input in both directions and the reduce-scatter of its gradient.
    """

    site: CommSite | None = None
    deferred: DeferredWeightGradient | None = None
    """That of the row-parallel layer after this one."""

    @property
    def traffic(self) -> tuple[str, ...]:
        """The traffic classes of this layer's messages."""
        return BOTH if self.sequence_parallel else ("tp.backward",)

    def _forward_impl(self, input, weight, *args, **kwargs):
        """Return the product ``[s, b, h_out / W]``, in place of megatron-core's function."""
        # Frozen inputs and CAAT-Net's streams have nothing to sum.
        communicates = kwargs["allreduce_dgrad"] or kwargs["sequence_parallel"]
        if self.site is None or not communicates:
            return super()._forward_impl(input, weight, *args, **kwargs)
        sequence_parallel = kwargs["sequence_parallel"]
        if sequence_parallel:
            nbytes = input.nbytes * self.site.group.size()
            messages = self.site.pair("tp.forward", "tp.backward", nbytes)
        else:
            # Without sequence parallelism the input is whole on every rank.
            messages = self.site.pair(None, "tp.backward", input.nbytes)
        if messages.compressed:
            return column_parallel_linear(
                input,
                weight,
                kwargs["bias"],
                messages,
                sequence_parallel,
                self.deferred,
                kwargs["gradient_accumulation_fusion"],
            )
        if sequence_parallel:
            messages.forward("all_gather")
        if has_backward(input, weight):
            # The backward gathers the input again for the weight's gradient.
            if sequence_parallel and weight.requires_grad:
                messages.backward("all_gather")
            messages.backward("reduce_scatter" if sequence_parallel else "all_reduce")
        return super()._forward_impl(input, weight, *args, **kwargs)


class CompressedVocabParallelEmbedding(VocabParallelEmbedding):
    """Vocabulary-parallel embedding.

    Compressed: the forward's all-reduce, or its reduce-scatter and the all-gather of the gradients.
    """

    site: CommSite | None = None

    @property
    def traffic(self) -> tuple[str, ...]:
        """The traffic classes of this layer's messages."""
        return BOTH if self.reduce_scatter_embeddings else ("tp.forward",)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Map token ids ``[b, s]`` to ``[b, s, h]``, or to ``[s / W, b, h]`` with
        ``reduce_scatter_embeddings``."""
        if self.site is None:
            return super().forward(input_)
        scatters = self.reduce_scatter_embeddings
        nbytes = input_.numel() * self.embedding_dim * self.weight.element_size()
        messages = self.site.pair("tp.forward", "tp.backward" if scatters else None, nbytes)
        if not messages.compressed:
            _count_reduction(messages, scatters, has_backward(self.weight))
            return super().forward(input_)
        # Each rank has the rows of its part of the vocabulary, and zeros for all other ids.
        on_other_rank = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local_ids = (input_ - self.vocab_start_index).masked_fill(on_other_rank, 0)
        # F.embedding's backward is not deterministic on CUDA; indexing's is.
        if self.deterministic_mode:
            rows = self.weight[local_ids]
        else:
            rows = F.embedding(local_ids, self.weight)
        rows = rows.masked_fill(on_other_rank[..., None], 0)
        if scatters:
            return WithBackward.apply(
                rows.transpose(0, 1),
                lambda x: messages.forward("reduce_scatter").start(x).wait(),
                lambda gradient: messages.backward("all_gather").start(gradient).wait(),
            )
        return WithBackward.apply(
            rows,
            lambda x: messages.forward("all_reduce").start(x).wait(),
            lambda gradient: gradient,
        )


class CompressedLanguageModelEmbedding(LanguageModelEmbedding):
    """Word and position embeddings under sequence parallelism.

    Compressed: the backward's all-gather of the gradient of the tokens that each rank keeps.
    Without learned positions the vocabulary embedding scatters its tokens itself.
    """

    site: CommSite | None = None

    @property
    def traffic(self) -> tuple[str, ...]:
        """The traffic classes of this layer's messages."""
        return ("tp.backward",) if self._scatters else ()

    @property
    def _scatters(self) -> bool:
        """Whether each rank keeps a part of the tokens here."""
        scatters = self.config.sequence_parallel and self.scatter_to_sequence_parallel
        return scatters and not self.reduce_scatter_embeddings

    def forward(self, input_ids, position_ids, tokentype_ids=None) -> torch.Tensor:
        """Map token ids ``[b, s]`` to ``[s / W, b, h]``.

        Args:
            input_ids: ``[b, s]``.
            position_ids: ``[b, s]``.
            tokentype_ids: ``[b, s]`` or None.
        """
        if self.site is None or not self._scatters:
            return super().forward(input_ids, position_ids, tokentype_ids)
        # In the type of the residual stream, in which megatron-core scatters them.
        fp32 = self.config.fp32_residual_connection
        itemsize = 4 if fp32 else self.config.params_dtype.itemsize
        nbytes = input_ids.numel() * self.config.hidden_size * itemsize
        messages = self.site.pair(None, "tp.backward", nbytes)
        if not messages.compressed:
            if has_backward(*self.parameters()):
                messages.backward("all_gather")
            return super().forward(input_ids, position_ids, tokentype_ids)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        embeddings = embeddings.transpose(0, 1)
        if tokentype_ids is not None:
            embeddings = embeddings + self.tokentype_embeddings(tokentype_ids).transpose(0, 1)
        if self.config.use_mup and self.config.mup_embedding_mult != 1.0:
            embeddings = embeddings * self.config.mup_embedding_mult
        if fp32:
            embeddings = embeddings.float()
        embeddings = local_tokens(
            embeddings,
            self.site.group.size(),
            self.site.group.rank(),
            lambda gradient: messages.backward("all_gather").start(gradient).wait(),
        )
        # Ranks hold different tokens and draw different dropout.
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.embedding_dropout(embeddings)


class CompressedSelfAttention(SelfAttention):
    """Self-attention of fewer query groups than tensor-parallel ranks.

    megatron-core gathers the output of ``linear_qkv`` then. Compressed: that all-gather, and the
    reduce-scatter of its gradient.
    """

    site: CommSite | None = None
    traffic = BOTH

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple:
        """Return this rank's queries and its group's keys and values.

        Args:
            hidden_states: ``[s, b, h]``, or ``[s / W, b, h]`` with sequence parallelism.
            key_value_states: for megatron-core's method.
            output_gate: for megatron-core's method, which is refused with compression.
            split_qkv: False: return the group's columns as they are, and the sizes of their three
                parts.

        Returns: queries ``[s, b, heads / W, d]``, keys and values ``[s, b, 1, d]``.
        """
        inherited = super().get_query_key_value_tensors
        if self.site is None or output_gate:
            return inherited(hidden_states, key_value_states, output_gate, split_qkv)
        ranks = self.site.group.size()
        # With sequence parallelism the linear layer gathers the tokens first.
        tokens = hidden_states.shape[:-1].numel() * (ranks if self.config.sequence_parallel else 1)
        nbytes = tokens * self.linear_qkv.output_size * hidden_states.element_size()
        messages = self.site.pair("tp.forward", "tp.backward", nbytes)
        if not messages.compressed:
            messages.forward("all_gather")
            result = inherited(hidden_states, key_value_states, output_gate, split_qkv)
            if result[0].requires_grad:
                messages.backward("reduce_scatter")
            return result
        # Ranks that share a query group are neighbours; each has some columns of its group's
        # queries, keys and values, and attends with its part of the queries.
        sharers = ranks // self.config.num_query_groups
        position = self.site.group.rank() % sharers
        first = self.site.group.rank() - position
        local_columns, _ = self.linear_qkv(hidden_states)
        columns = gather_columns(local_columns, messages, ranks, first, sharers).unsqueeze(2)
        head = self.hidden_size_per_attention_head
        heads = self.config.num_attention_heads // self.config.num_query_groups
        sizes = [heads * head, head, head]
        if not split_qkv:
            return columns, sizes
        query, key, value = columns.split(sizes, dim=-1)
        query = query.unflatten(-1, (heads, head)).flatten(2, 3)
        # Heads need not divide by the sharers.
        query = query.tensor_split(sharers, dim=2)[position]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        # As megatron-core's method ends.
        if self.config.test_mode:
            self.run_realtime_tests()
        return query, key, value


class CompressedLatentAttention(MLASelfAttention):
    """Multi-latent attention.

    Compressed: under sequence parallelism the gather of the keys' positions and the reduce-scatter
    of their gradient, and what sharded projections down gather.
    """

    site: CommSite | None = None

    @property
    def traffic(self) -> tuple[str, ...]:
        """The traffic classes of this layer's messages."""
        return BOTH if self.config.sequence_parallel else ()

    def get_query_key_value_tensors(self, *args, **kwargs) -> tuple:
        """Return what megatron-core's method does, whose gathers go through the site."""
        return _running(self.site, super().get_query_key_value_tensors, *args, **kwargs)


class CompressedPredictionLayer(MultiTokenPredictionLayer):
    """A multi-token-prediction layer.

    Compressed: the gather of its projection's output, and under sequence parallelism the gather of
    the gradient of the tokens that each rank keeps of it.
    """

    site: CommSite | None = None
    traffic = CompressedRowParallelLinear.traffic

    def _concat_embeddings(self, *args, **kwargs) -> torch.Tensor:
        return _running(self.site, super()._concat_embeddings, *args, **kwargs)


_active_site: ContextVar[CommSite | None] = ContextVar("active_site", default=None)
"""The site of the layer that runs and gathers or scatters by functions that get no layer; None: no
layer of ours."""


def _running(site: CommSite | None, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer's method with its site active."""
    # Layers nest where a layer is recomputed inside another one's backward.
    token = _active_site.set(site)
    try:
        return method(*args, **kwargs)
    finally:
        _active_site.reset(token)


def _instead(ours: Callable[[CommSite, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a replacement of a function of megatron-core's: ``ours(site, x)`` where a site is
    active."""

    def call(
        original: Callable[..., torch.Tensor], input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        site = _active_site.get()
        if site is None:
            return original(input_, *args, **kwargs)
        return ours(site, input_)

    return call


REGIONS = {
    "gather_from_sequence_parallel_region": _instead(gather_tokens),
    "gather_from_tensor_model_parallel_region": _instead(gather_channels),
    "scatter_to_sequence_parallel_region": _instead(scatter_tokens),
}
"""Replacements of functions in the modules of ``CompressedLatentAttention`` and
``CompressedPredictionLayer``, by their names in megatron-core."""


def _count_reduction(messages: MessagePair, sequence_parallel: bool, backward: bool) -> None:
    """Count megatron-core's own reduction of a forward, and the all-gather that its backward will
    do."""
    if not sequence_parallel:
        messages.forward("all_reduce")
        return
    messages.forward("reduce_scatter")
    if backward:
        messages.backward("all_gather")


def has_backward(*inputs: torch.Tensor) -> bool:
    """Return whether a backward will come to what is computed of ``inputs`` now."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
