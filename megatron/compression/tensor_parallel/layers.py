"""Tensor-parallel layers whose collectives go through a site.

Each is megatron-core's layer with one thing changed: who communicates with the tensor-parallel group. Until
``hooks.attach`` has given it a site, a layer is megatron-core's. Messages that are not compressed take
megatron-core's own path and are counted.
"""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

from megatron.compression.communication import Work
from megatron.compression.communication.site import CommSite, Packed
from megatron.compression.tensor_parallel.column_linear import column_parallel_linear, start_gather
from megatron.compression.tensor_parallel.mappings import (
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.compression.tensor_parallel.overlap import Handover
from megatron.compression.tensor_parallel.row_linear import row_parallel_linear
from megatron.compression.tensor_parallel.turns import Entry


class CompressedRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer: attention projection and fc2.

    Compressed: the forward's all-reduce; with sequence parallelism its reduce-scatter and the backward's
    all-gather.
    """

    site: CommSite | None = None
    handover: Handover | None = None
    """Shared with the column-parallel layer before this one."""
    entry: Entry | None = None
    """Where blocks take turns, that of the block under way."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, b, h_in / W] -> [s, b, h_out]`` (``[s / W, b, h_out]``) and the bias if left to callers."""
        output, bias = self._reduced(input_)
        # A view: --recompute-modules mlp returns it from an autograd function, which would otherwise make the
        # parameter itself its output, and the backward run in a circle.
        return output, None if bias is None else bias.view_as(bias)

    def _reduced(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.site is None:
            return super().forward(input_)
        nbytes = input_.numel() // input_.shape[-1] * self.output_size * input_.element_size()
        site = self.site
        if not _compresses_reduction(site, self.sequence_parallel, nbytes):
            if self.entry is None:  # else ours leaves an uncompressed sum under way as well
                _count_reduction(site, self.sequence_parallel, nbytes, has_backward(input_, self.weight))
                return super().forward(input_)
            site = site.uncompressed(nbytes)
        output = row_parallel_linear(
            input_,
            self.weight,
            site,
            self.sequence_parallel,
            self.handover,
            self.gradient_accumulation_fusion,
            self.entry,
        )
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


class CompressedColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear layer: qkv, fc1 and the output layer.

    Compressed: the backward's all-reduce of the input gradient; with sequence parallelism the all-gather of
    the input, forward and backward, and the reduce-scatter of its gradient.
    """

    site: CommSite | None = None
    handover: Handover | None = None
    """Shared with the row-parallel layer that takes this one's output."""
    entry: Entry | None = None
    """Where blocks take turns, that of the block under way."""

    def start_gather(self, x: torch.Tensor) -> tuple[Packed, Work] | None:
        """Begin to gather this layer's next input ``[s / W, b, h]``, where sequence parallelism needs it."""
        return start_gather(x, self._site_for(x)) if self.sequence_parallel and self.site else None

    def _site_for(self, x: torch.Tensor) -> CommSite:
        """The site, or one that compresses nothing where messages of an input ``x`` are to go so."""
        nbytes = x.nbytes * (self.site.group.size() if self.sequence_parallel else 1)
        traffic = ("tp.forward", "tp.backward") if self.sequence_parallel else ("tp.backward",)
        return self.site if self.site.compresses(nbytes, *traffic) else self.site.uncompressed(nbytes)

    def _forward_impl(self, input, weight, *args, **kwargs):
        communicates = kwargs["allreduce_dgrad"] or kwargs["sequence_parallel"]
        if self.site is None or not communicates:
            return super()._forward_impl(input, weight, *args, **kwargs)
        sequence_parallel, site = kwargs["sequence_parallel"], self._site_for(input)
        if site is self.site or self.entry is not None:
            return column_parallel_linear(
                input,
                weight,
                kwargs["bias"],
                site,
                sequence_parallel,
                self.handover,
                kwargs["gradient_accumulation_fusion"],
                self.entry,
            )
        nbytes = input.nbytes * (self.site.group.size() if sequence_parallel else 1)
        if sequence_parallel:
            self.site.count_uncompressed("tp.forward", "all_gather", nbytes)
        if has_backward(input, weight):
            if sequence_parallel and weight.requires_grad:
                self.site.count_uncompressed("tp.backward", "all_gather", nbytes)
            operation = "reduce_scatter" if sequence_parallel else "all_reduce"
            self.site.count_uncompressed("tp.backward", operation, nbytes)
        return super()._forward_impl(input, weight, *args, **kwargs)


class CompressedVocabParallelEmbedding(VocabParallelEmbedding):
    """Vocabulary-parallel embedding: the forward's all-reduce, or its reduce-scatter and their all-gather."""

    site: CommSite | None = None

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Token ids ``[b, s]`` to ``[b, s, h]``, or ``[s / W, b, h]`` with ``reduce_scatter_embeddings``."""
        if self.site is None:
            return super().forward(input_)
        nbytes = input_.numel() * self.embedding_dim * self.weight.element_size()
        if not _compresses_reduction(self.site, self.reduce_scatter_embeddings, nbytes):
            _count_reduction(self.site, self.reduce_scatter_embeddings, nbytes, has_backward(self.weight))
            return super().forward(input_)
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local_ids = (input_ - self.vocab_start_index).masked_fill(elsewhere, 0)
        # F.embedding's backward is not deterministic on CUDA; indexing's is.
        rows = self.weight[local_ids] if self.deterministic_mode else F.embedding(local_ids, self.weight)
        rows = rows.masked_fill(elsewhere[..., None], 0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1), self.site)
        return reduce_from_tensor_parallel_region(rows, self.site)


class CompressedLanguageModelEmbedding(LanguageModelEmbedding):
    """Word and position embeddings under sequence parallelism.

    Compressed: the backward's all-gather of the slice that each rank keeps, which only learned positions need
    (without them the vocabulary embedding scatters itself).
    """

    site: CommSite | None = None

    def forward(self, input_ids, position_ids, tokentype_ids=None) -> torch.Tensor:
        """Token ids ``[b, s]`` to ``[s / W, b, h]``."""
        scatters = self.config.sequence_parallel and self.scatter_to_sequence_parallel
        if self.site is None or not scatters or self.reduce_scatter_embeddings:
            return super().forward(input_ids, position_ids, tokentype_ids)
        nbytes = input_ids.numel() * self.config.hidden_size * self.config.params_dtype.itemsize
        if not self.site.compresses(nbytes, "tp.backward"):
            if has_backward(*self.parameters()):
                self.site.count_uncompressed("tp.backward", "all_gather", nbytes)
            return super().forward(input_ids, position_ids, tokentype_ids)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        embeddings = embeddings.transpose(0, 1)
        if tokentype_ids is not None:
            embeddings = embeddings + self.tokentype_embeddings(tokentype_ids).transpose(0, 1)
        if self.config.use_mup and self.config.mup_embedding_mult != 1.0:
            embeddings = embeddings * self.config.mup_embedding_mult
        if self.config.fp32_residual_connection:
            embeddings = embeddings.float()
        embeddings = scatter_to_sequence_parallel_region(embeddings, self.site)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.embedding_dropout(embeddings)


def _compresses_reduction(site: CommSite, sequence_parallel: bool, nbytes: int) -> bool:
    """Whether a forward's reduction, or the all-gather of its backward, is compressed."""
    traffic = ("tp.forward", "tp.backward") if sequence_parallel else ("tp.forward",)
    return site.compresses(nbytes, *traffic)


def _count_reduction(site: CommSite, sequence_parallel: bool, nbytes: int, backward: bool) -> None:
    """Count megatron-core's own reduction of a forward, and the all-gather that its backward will do."""
    if not sequence_parallel:
        site.count_uncompressed("tp.forward", "all_reduce", nbytes)
        return
    site.count_uncompressed("tp.forward", "reduce_scatter", nbytes)
    if backward:
        site.count_uncompressed("tp.backward", "all_gather", nbytes)


def has_backward(*inputs: torch.Tensor) -> bool:
    """Whether a backward will come to what is computed of ``inputs`` now: once for each such forward."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
