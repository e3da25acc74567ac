"""Self-attention of fewer query groups than tensor-parallel ranks.

Then several ranks share a group's keys and values, and megatron-core gathers the output of ``linear_qkv``
over all ranks in every layer. That is traffic of its own, beside the linear layers'.
"""

import torch
from megatron.core.transformer.attention import SelfAttention

from megatron.compression.communication.site import CommSite
from megatron.compression.tensor_parallel.mappings import gather_columns


class CompressedSelfAttention(SelfAttention):
    """megatron-core's, but for the gather of queries, keys and values.

    Compressed: that all-gather, and the reduce-scatter of its gradient. Without a site, or where messages go
    uncompressed, megatron-core does it, and it is counted.
    """

    site: CommSite | None = None

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple:
        """Queries ``[s, b, heads / W, d]`` and this rank's group's keys and values ``[s, b, 1, d]``.

        Args:
            hidden_states: ``[s, b, h]``, or ``[s / W, b, h]`` with sequence parallelism.
            split_qkv: False for the group's columns as they are, and the sizes of their three parts.
        """
        inherited = super().get_query_key_value_tensors
        if self.site is None or output_gate:
            return inherited(hidden_states, key_value_states, output_gate, split_qkv)
        ranks = self.site.group.size()
        tokens = hidden_states.shape[:-1].numel() * (ranks if self.config.sequence_parallel else 1)
        nbytes = tokens * self.linear_qkv.output_size * hidden_states.element_size()
        if not self.site.compresses(nbytes, "tp.forward", "tp.backward"):
            self.site.count_uncompressed("tp.forward", "all_gather", nbytes)
            result = inherited(hidden_states, key_value_states, output_gate, split_qkv)
            if result[0].requires_grad:
                self.site.count_uncompressed("tp.backward", "reduce_scatter", nbytes)
            return result
        sharers = ranks // self.config.num_query_groups
        position = self.site.group.rank() % sharers
        own, _ = self.linear_qkv(hidden_states)
        head = self.hidden_size_per_attention_head
        heads = self.config.num_attention_heads // self.config.num_query_groups
        sizes = [heads * head, head, head]
        columns = gather_columns(own, self.site, self.site.group.rank() - position, sharers).unsqueeze(2)
        if not split_qkv:
            return columns, sizes
        query, key, value = columns.split(sizes, dim=-1)
        query = query.unflatten(-1, (heads, head)).flatten(2, 3)
        query = query.tensor_split(sharers, dim=2)[position]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        if self.config.test_mode:
            self.run_realtime_tests()
        return query, key, value
