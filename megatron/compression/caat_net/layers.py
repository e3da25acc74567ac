"""The layers of a CAAT-Net."""

import torch

from megatron.compression.caat_net.streams import (
    copy_to_streams,
    linear_deferring,
    partial_row_parallel_linear,
)
from megatron.compression.tensor_parallel.layers import (
    CompressedColumnParallelLinear,
    CompressedLanguageModelEmbedding,
    CompressedRowParallelLinear,
)
from megatron.compression.tensor_parallel.overlap import Handover


class PartialRowParallelLinear(CompressedRowParallelLinear):
    """Attention projection or fc2 whose first channels alone are all-reduced, forward and backward."""

    shared_channels: int
    next_weight: Handover | None = None
    """Shared with the column-parallel layer after this one: its weight gradient runs behind our exchange."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """``[s, b, h_in / W] -> [s, b, h_out]``, bias included: it is scaled with the private channels."""
        output = partial_row_parallel_linear(
            input_, self.weight, self.bias, self.site, self.shared_channels, self.next_weight, self.entry
        )
        return output, None


class StreamColumnParallelLinear(CompressedColumnParallelLinear):
    """qkv, fc1 or the output layer of one rank's stream: nothing is communicated, forward or backward."""

    next_weight: Handover | None = None
    """Shared with the row-parallel layer before this one: brings our weight."""

    def _forward_impl(self, input, weight, *args, **kwargs):
        output = self._of_stream(input, weight, *args, **kwargs)
        if self.entry is not None:
            self.entry.behind()
        return output

    def _of_stream(self, input, weight, *args, **kwargs):
        made = self.next_weight.take() if self.next_weight is not None else None
        if made is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        weight, gradient = made
        if not torch.is_grad_enabled():  # a region to be recomputed, inside a graph
            return super()._forward_impl(input, self.weight, *args, **kwargs)
        return linear_deferring(input, weight, kwargs["bias"], gradient)


class StreamEmbedding(CompressedLanguageModelEmbedding):
    """Word and position embeddings, from which every rank's stream begins."""

    def forward(self, input_ids, position_ids, tokentype_ids=None) -> torch.Tensor:
        """Token ids ``[b, s]`` to ``[s, b, h]``; its backward has the only all-reduce of all channels."""
        return copy_to_streams(super().forward(input_ids, position_ids, tokentype_ids), self.site)
