"""Attention of torch-native layers: on `torch.nn.functional.scaled_dot_product_attention`, and
multi-latent.

    context = dropout(softmax(scale * q k^T + mask)) v

The same function as megatron-core's DotProductAttention, without the [b, heads, s, s] scores in
memory.
"""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
)
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant

from megatron.compression.communication.collectives import WithBackward, uncompressed_all_reduce
from megatron.compression.context_parallel.gather import SharesSequence, chunks_of, gather_sequence
from megatron.compression.errors import InputError
from megatron.compression.tensor_parallel.layers import CompressedLatentAttention

USE_LOCAL = "use --attention-backend local (megatron-core's unfused attention)"
USE_TE = "use --transformer-impl transformer_engine"

_KERNELS = {
    # torch's own order (on Hopper cuDNN before flash), which also saves the host 30 microseconds a
    # call
    AttnBackend.auto: None,
    AttnBackend.flash: [SDPBackend.FLASH_ATTENTION],
    AttnBackend.fused: [SDPBackend.CUDNN_ATTENTION],
    AttnBackend.unfused: [SDPBackend.MATH],
}
"""Kernels that each ``--attention-backend`` allows; None: any."""
_DETERMINISTIC_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
_MASK_TYPES = (
    AttnMaskType.causal,
    AttnMaskType.no_mask,
    AttnMaskType.padding,
    AttnMaskType.arbitrary,
)


class SDPACoreAttention(SharesSequence, MegatronModule):
    """Drop-in for megatron-core's DotProductAttention (a ``core_attention`` of a layer spec).

    Causal, padding and arbitrary masks, grouped queries, dropout. Softmax is computed in fp32
    inside the kernels, so ``--attention-softmax-in-fp32`` always holds, and
    ``--apply-query-key-layer-scaling``, which divides the scores by the layer number and multiplies
    them back before the softmax, changes nothing.

    Args:
        config: of the model.
        layer_number: from 1.
        attn_mask_type: causal, padding, arbitrary or none.
        attention_type: self or cross; the tensors say as much.
        attention_dropout: probability; None: the config's.
        softmax_scale: of the scores; None: one over the root of the head's width.
        pg_collection: has the ranks that share a sequence; None: Megatron's.
        unused: ``cp_comm_type`` (keys and values are gathered), widths of keys and values (their
            tensors').

    Raises:
        InputError: a setting that this attention does not have; the message names the flag to
            change.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        _refuse_unsupported(config, layer_number, attn_mask_type)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = (
            1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        )
        self.dropout_p = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        if config.context_parallel_size > 1:
            group = getattr(pg_collection, "cp", None)
            if group is None:
                group = parallel_state.get_context_parallel_group()
            self.context_group = group
        if config.deterministic_mode and config.attention_backend is AttnBackend.auto:
            self.kernels = _DETERMINISTIC_KERNELS
        else:
            self.kernels = _KERNELS[config.attention_backend]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend over this rank's heads.

        Args:
            query: ``[sq, b, heads, head_dim]``.
            key: ``[sk, b, groups, head_dim]``; heads is a multiple of groups.
            value: likewise, but it may have another head_dim.
            attention_mask: bool, broadcastable to ``[b, heads, sq, sk]``, True where attention is
                NOT allowed; it replaces the causal one. A row without any allowed position gives
                finite numbers of no meaning (megatron-core: the mean of all values).
            attn_mask_type: of this call; None: that of the layer.
            attention_bias: not covered.
            packed_seq_params: not covered.

        Returns: ``[sq, b, heads * head_dim]``, of the values' head_dim.

        Raises:
            InputError: an argument that is not covered, or that no kernel of
                ``--attention-backend`` has.
        """
        if packed_seq_params is not None:
            raise InputError(
                f"packed sequences are not covered by the torch-native attention; {USE_TE}"
            )
        if attention_bias is not None:
            raise InputError(
                f"an attention bias is not covered by the torch-native attention; {USE_TE}"
            )
        causal = (attn_mask_type or self.attn_mask_type) is AttnMaskType.causal
        # Megatron's masks say what is left out, torch's what takes part.
        allowed = None if attention_mask is None else ~attention_mask
        # One query row against a key/value cache sees all of it.
        causal = causal and allowed is None and query.size(0) > 1
        if causal and query.size(0) > key.size(0):
            raise InputError(
                f"causal attention of {query.size(0)} queries over {key.size(0)} keys needs "
                "an attention mask"
            )
        if self.context_group is None:
            return self._attend(query, key, value, allowed, causal)
        key, value = gather_sequence(key, value, self.context_group, self.context_site)
        # Without an order every query sees the whole sequence.
        if not causal:
            return self._attend(query, key, value, allowed, False)
        # This rank's queries are two chunks of the sequence; each sees the keys up to its own end.
        contexts = []
        numbers = chunks_of(self.context_group.rank(), self.context_group.size())
        for number, chunk in zip(numbers, query.chunk(2), strict=True):
            end = (number + 1) * chunk.size(0)
            contexts.append(self._attend(chunk, key[:end], value[:end], None, True))
        return torch.cat(contexts)

    def _attend(
        self, query, key, value, allowed: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """Return ``[sq, b, heads * head_dim]``.

        Args:
            query: ``[sq, b, heads, head_dim]``.
            key: ``[sk, b, groups, head_dim]``.
            value: likewise.
            allowed: bool, broadcastable to ``[b, heads, sq, sk]``, True where attention is allowed;
                None: all.
            causal: each query sees the keys up to its own position. Queries that are fewer than the
                keys are those of the last positions.
        """
        if causal and query.size(0) < key.size(0):
            allowed = _last_positions(query, key)
            causal = False
        # [s, b, n, d] -> [b, n, s, d], as views.
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout_p = self.dropout_p if self.training else 0.0
        try:
            with self._random_state(dropout_p), self._kernel_choice():
                context = F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=allowed,
                    dropout_p=dropout_p,
                    is_causal=causal,
                    scale=self.softmax_scale,
                    # Kernels share keys and values among a group's queries; no copy is made.
                    enable_gqa=query.size(1) != key.size(1),
                )
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise InputError(self._without_kernel(query, allowed)) from error
            raise
        return context.permute(2, 0, 1, 3).flatten(2)

    def _random_state(self, dropout_p: float) -> contextlib.AbstractContextManager:
        """Return the random state of dropout: tensor-parallel ranks hold different heads and draw
        different numbers."""
        # With sequence parallelism the transformer block has already entered that state.
        if dropout_p > 0 and not self.config.sequence_parallel:
            return get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()

    def _kernel_choice(self) -> contextlib.AbstractContextManager:
        """Return the context in which torch chooses among the kernels of
        ``--attention-backend``."""
        return contextlib.nullcontext() if self.kernels is None else sdpa_kernel(self.kernels)

    def _without_kernel(self, query: torch.Tensor, allowed: torch.Tensor | None) -> str:
        """Return the error's line where no kernel takes these queries ``[b, heads, sq,
        head_dim]``."""
        mask = "no mask"
        if allowed is not None and not isinstance(allowed, CausalBias):
            mask = f"a {allowed.dtype} mask {list(allowed.shape)}"
        return (
            f"--attention-backend {self.config.attention_backend.name} has no kernel for "
            f"{query.dtype} queries {list(query.shape)} on {query.device.type} with {mask}; "
            "use --attention-backend auto"
        )


def _last_positions(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask of queries ``[sq, ...]`` that are those of the last positions of keys ``[sk,
    ...]``.

    On a GPU that is torch's own mark of the order, with which flash needs no mask.
    """
    if query.is_cuda:
        # causal_lower_right would take memory of the mask's shape on the host, though nothing is in
        # it.
        mark = torch.Tensor._make_subclass(CausalBias, torch.empty(0))
        mark.variant = CausalVariant.LOWER_RIGHT
        mark.seq_len_q = query.size(0)
        mark.seq_len_kv = key.size(0)
        return mark
    positions = torch.arange(key.size(0), device=query.device)
    return positions <= positions[-query.size(0) :, None]


def _refuse_unsupported(
    config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType
) -> None:
    """Refuse settings that this attention does not have, by the flag to change."""
    uncovered = "is not covered by the torch-native attention"
    needs_scores = "needs the largest score, which torch's kernels keep inside"
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        raise InputError(f"--window-size {config.window_size} {uncovered}; {USE_LOCAL}")
    if config.softmax_type != "vanilla":
        raise InputError(f"--softmax-type {config.softmax_type} {uncovered}; {USE_LOCAL}")
    if config.qk_clip:
        raise InputError(f"--qk-clip {needs_scores}; {USE_TE}")
    if config.log_max_attention_logit:
        raise InputError(f"--log-max-attention-logit {needs_scores}; {USE_TE}")
    backend = config.attention_backend
    if backend not in _KERNELS:
        names = ", ".join(known.name for known in _KERNELS)
        raise InputError(f"--attention-backend {backend.name} {uncovered}; choose one of {names}")
    if attn_mask_type not in _MASK_TYPES:
        raise InputError(f"attention mask type {attn_mask_type.name} {uncovered}; {USE_TE}")


class DuplicatedLinear(torch.nn.Module):
    """``x W^T`` with a weight that every tensor-parallel rank has in whole; it communicates
    nothing.

    Args:
        inputs: width of its input.
        outputs: width of its output.
        config: of the model.
    """

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.config = config
        cpu = config.use_cpu_initialization
        device = "cpu" if cpu else torch.cuda.current_device()
        weight = torch.empty(outputs, inputs, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        # Each rank sees part of the sequence: finalize_model_grads sums these gradients over the
        # ranks.
        self.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization and cpu:
            config.init_method(self.weight)
        elif config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                config.init_method(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map ``[s, b, inputs]`` to ``[s, b, outputs]``; there is no bias."""
        fused = self.config.gradient_accumulation_fusion
        return linear_with_grad_accumulation_and_async_allreduce(
            x, self.weight, None, fused, allreduce_dgrad=False, sequence_parallel=False
        ), None


class LatentSelfAttention(CompressedLatentAttention):
    """megatron-core's multi-latent attention, with ``DuplicatedLinear`` projections down.

    The keys' positions are left to exchange: under sequence parallelism they are gathered, else
    their gradient is summed.
    """

    @property
    def traffic(self) -> tuple[str, ...]:
        """The traffic classes of this layer's messages."""
        return super().traffic or ("tp.backward",)

    def __init__(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, *args, **kwargs
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        hidden = config.hidden_size
        # Instead of those that megatron-core has built: it accepts its own classes alone.
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DuplicatedLinear(hidden, config.q_lora_rank, config)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = DuplicatedLinear(hidden, width, config)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict:
        """Return the modules that the spec names: megatron-core has norms without a query latent in
        fused layers alone."""
        names = (
            "linear_q_proj",
            "linear_q_up_proj",
            "linear_kv_up_proj",
            "q_layernorm",
            "kv_layernorm",
        )
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents of queries, and those of keys and values with positions after them.

        Without ``q_lora_rank`` the first are the hidden states. They are ``[s / W, b, ...]`` with
        sequence parallelism.
        """
        query, latent = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() == 1 or self.config.sequence_parallel:  # megatron-core gathers them
            return query, latent
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent, positions = latent.split(widths, dim=-1)
        # All ranks have the same positions; each has the gradient of its own heads.
        positions = WithBackward.apply(positions, lambda x: x, self._sum)
        return query, torch.cat([latent, positions], dim=-1)

    def _sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum the gradient of the positions: each rank has what its own heads add."""
        if self.site is None:
            return uncompressed_all_reduce(gradient, self.tp_group).wait()
        message = self.site.message("tp.backward", "all_reduce", gradient.nbytes)
        return message.start(gradient).wait()
