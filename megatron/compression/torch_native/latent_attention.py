"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434) of torch-native layers.

megatron-core's, but for the projections down to the latent: every tensor-parallel rank has them whole, as
with Transformer Engine's layers. megatron-core's local ones are sharded and their output gathered, where the
gradient of the keys' positions, which all heads share, loses what the other ranks' heads add to it.
"""

import torch
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron.compression.communication.collectives import WithBackward, uncompressed_all_reduce
from megatron.compression.communication.site import CommSite
from megatron.compression.tensor_parallel.layers import has_backward


class DuplicatedLinear(torch.nn.Module):
    """``x W^T`` with a weight that every tensor-parallel rank has in whole; it communicates nothing.

    Args:
        inputs, outputs: features.
    """

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.config = config
        cpu = config.use_cpu_initialization
        device = "cpu" if cpu else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=device)
        )
        # Each rank sees part of the sequence: finalize_model_grads sums these gradients over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization and cpu:
            config.init_method(self.weight)
        elif config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                config.init_method(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """``[s, b, inputs] -> [s, b, outputs]``, and no bias."""
        fused = self.config.gradient_accumulation_fusion
        return linear_with_grad_accumulation_and_async_allreduce(
            x, self.weight, None, fused, allreduce_dgrad=False, sequence_parallel=False
        ), None


class LatentSelfAttention(MLASelfAttention):
    """megatron-core's, with ``DuplicatedLinear`` projections down.

    What is left to exchange are the keys' positions, ``qk_pos_emb_head_dim`` values a token: under sequence
    parallelism they are gathered, else their gradient is summed. That stays exact, and is counted.
    """

    site: CommSite | None = None

    def __init__(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, *args, **kwargs
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        hidden, width = config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim
        # In place of those that megatron-core has built: it takes its own classes alone.
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DuplicatedLinear(hidden, config.q_lora_rank, config)
        self.linear_kv_down_proj = DuplicatedLinear(hidden, width, config)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict:
        """As the spec says: megatron-core has norms without a query latent in fused layers alone."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents of queries (hidden states without ``q_lora_rank``) and of keys and values, with positions
        behind the latter; ``[s / W, b, ...]`` with sequence parallelism."""
        query, latent = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() == 1:
            return query, latent
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent, positions = latent.split(widths, dim=-1)
        if not self.config.sequence_parallel:
            positions = WithBackward.apply(positions, lambda x: x, self._sum)
        elif self.site is not None:  # megatron-core gathers them
            nbytes = positions.numel() * positions.element_size() * self.tp_group.size()
            self.site.count_uncompressed("tp.forward", "all_gather", nbytes, "exact")
            if has_backward(positions):
                self.site.count_uncompressed("tp.backward", "reduce_scatter", nbytes, "exact")
        return query, torch.cat([latent, positions], dim=-1)

    def _sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Each rank has what its own heads add."""
        if self.site is not None:
            self.site.count_uncompressed("tp.backward", "all_reduce", gradient.nbytes, "exact")
        return uncompressed_all_reduce(gradient, self.tp_group).wait()
