"""Tensor-parallel layers whose all-reduces go through a site.

Each is megatron-core's layer with one thing changed: who sums over the tensor-parallel group. Until
``bind_compression`` has given it a site, a layer is megatron-core's.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

from megatron.compression.tensor_parallel.mappings import (
    copy_to_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
)
from megatron.compression.tensor_parallel.site import TensorParallelSite


class CompressedRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer: the forward's all-reduce is compressed.

    Sites: attention projection and fc2.
    """

    site: TensorParallelSite | None = None

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, b, h_in / W] -> [s, b, h_out]`` and the bias when it is left to the caller."""
        if self.site is None:
            return super().forward(input_)
        message_bytes = input_.numel() // input_.shape[-1] * self.output_size * input_.element_size()
        if not self.site.compresses(message_bytes):
            self.site.count_uncompressed("tp.forward", message_bytes)
            return super().forward(input_)
        partial_sum = self._forward_impl(
            input=input_,
            weight=self.weight,
            bias=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=self.tp_group,
            grad_output_buffer=None,
        )
        output = reduce_from_tensor_parallel_region(partial_sum, self.site)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


class CompressedColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear layer: the backward's all-reduce of the input gradient is compressed.

    Sites: qkv, fc1 and the output layer.
    """

    site: TensorParallelSite | None = None

    def _forward_impl(self, input, weight, *args, **kwargs):
        # megatron-core reduces dgrad inside its linear's backward; taking that over means telling the linear
        # not to reduce and wrapping its input instead.
        if self.site is not None and kwargs["allreduce_dgrad"] and torch.is_grad_enabled():
            message_bytes = input.nbytes
            if self.site.compresses(message_bytes):
                input = copy_to_tensor_parallel_region(input, self.site)
                kwargs["allreduce_dgrad"] = False
            else:
                # Counted here because each forward with gradients has exactly one backward.
                self.site.count_uncompressed("tp.backward", message_bytes)
        return super()._forward_impl(input, weight, *args, **kwargs)


class CompressedVocabParallelEmbedding(VocabParallelEmbedding):
    """Vocabulary-parallel embedding: the forward's all-reduce is compressed."""

    site: TensorParallelSite | None = None

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Token ids ``[b, s]`` to embeddings ``[b, s, h]``."""
        if self.site is None:
            return super().forward(input_)
        message_bytes = input_.numel() * self.embedding_dim * self.weight.element_size()
        if not self.site.compresses(message_bytes):
            self.site.count_uncompressed("tp.forward", message_bytes)
            return super().forward(input_)
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local_ids = (input_ - self.vocab_start_index).masked_fill(elsewhere, 0)
        # F.embedding's backward is not deterministic on CUDA; indexing's is.
        rows = self.weight[local_ids] if self.deterministic_mode else F.embedding(local_ids, self.weight)
        return reduce_from_tensor_parallel_region(rows.masked_fill(elsewhere[..., None], 0), self.site)
