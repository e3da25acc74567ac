"""The transformer block that runs the halves of a micro-batch interleaved (halves.py)."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from megatron.compression.errors import CompressionConfigError, InputError
from megatron.compression.patches import symbols
from megatron.compression.tensor_parallel.config import HALVES, check_halves
from megatron.compression.tensor_parallel.halves import Block, Linear, interleave

_PASSED_ON = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset")
"""What attention is given in both halves."""
_OF_INFERENCE = ("inference_context", "inference_params")
_NOT_HALVED = (
    "context",
    *_OF_INFERENCE,
    "packed_seq_params",
    "attention_bias",
    "extract_layer_indices",
)


class Dropout:
    """The dropout of one block's output, drawn once for the whole micro-batch; ``sizes``: sequences of each
    half."""

    def __init__(self, probability: float, sizes: Sequence[int]) -> None:
        self.probability, self.sizes = probability, sizes
        self._kept: list[torch.Tensor] = []

    def __call__(self, total: torch.Tensor) -> Linear | None:
        """The next half's part of it; ``total`` is that half's ``[s, b, h]``."""
        if self.probability == 0:
            return None
        if not self._kept:
            tokens, _, hidden = total.shape
            kept = F.dropout(total.new_ones(tokens, sum(self.sizes), hidden), self.probability) != 0
            self._kept = list(kept.split(self.sizes, 1))
        kept, scale = self._kept.pop(0), 1 / (1 - self.probability)
        return lambda x: x * scale * kept


def blocks_of(
    layer: torch.nn.Module, arguments: dict[str, Any], draws: Sequence[Dropout]
) -> list[Block]:
    """Attention, with its ``arguments``, and MLP of a layer; ``draws`` are of both outputs."""
    attention, mlp = layer.self_attention, layer.mlp
    return [
        Block(
            attention,
            layer.input_layernorm,
            attention.linear_qkv,
            attention.linear_proj,
            draws[0],
            arguments,
        ),
        Block(mlp, layer.pre_mlp_layernorm, mlp.linear_fc1, mlp.linear_fc2, draws[1]),
    ]


class HalvesBlock(TransformerBlock):
    """Two halves of the micro-batch: one computes while the other's sums are under way.

    The same function as megatron-core's block, with its random numbers. The halves of an odd micro-batch
    differ by a sequence. What generates text, and evaluates sequences one by one, is not halved.

    Replaces ``TransformerBlock`` by a change of class, with its state. Layers themselves are not called, but
    their modules are: hooks of a ``TransformerLayer`` would not run.
    """

    def forward(self, hidden_states, attention_mask=None, **options) -> torch.Tensor:
        """``[s, b, h] -> [s, b, h]``, of what training and evaluation pass to megatron-core's.

        Raises: InputError: an argument that halves do not support.
        """
        received = hidden_states if self.pre_process else self.input_tensor
        # megatron-core's inference engine passes a wrapper of the tensor, which has no shape
        whole = not self.layers or any(options.get(name) is not None for name in _OF_INFERENCE)
        if whole or (not torch.is_grad_enabled() and received.shape[1] < 2):
            return super().forward(hidden_states, attention_mask, **options)
        if received.shape[1] < 2:
            raise InputError(f"a micro-batch of one sequence has no two halves; drop {HALVES}")
        for name in _NOT_HALVED:
            if options.get(name) is not None:
                raise InputError(f"{name} is not halved; drop {HALVES}")
        hidden_states = make_viewless_tensor(inp=received, requires_grad=True, keep_graph=True)
        arguments = {name: options.get(name) for name in _PASSED_ON} | {
            "attention_mask": attention_mask
        }
        of_ranks = tensor_parallel.get_cuda_rng_tracker().fork
        with of_ranks() if self.config.sequence_parallel else nullcontext():
            stream = (
                hidden_states.float() if self.config.fp32_residual_connection else hidden_states
            )
            batch = stream.shape[1]
            halves = [
                half.contiguous() for half in stream.split([batch - batch // 2, batch // 2], 1)
            ]
            for layers, recomputed in self._recomputed_parts():
                halves = self._run(layers, arguments, halves, recomputed)
        hidden_states = torch.cat(halves, 1)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)

    def _run(self, layers, arguments, halves, recomputed: bool) -> Sequence[torch.Tensor]:
        # Both halves in one checkpoint: its backward has one graph of them, as all of this needs.
        def run(*halves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return interleave(
                self._blocks(layers, arguments, [half.shape[1] for half in halves]), halves
            )

        return tensor_parallel.checkpoint(run, False, *halves) if recomputed else run(*halves)

    def _blocks(self, layers, arguments: dict[str, Any], sizes: Sequence[int]) -> list[Block]:
        """Of these layers, in the order in which they run; ``arguments`` of the attentions are the whole
        micro-batch's."""
        mask, angles = arguments["attention_mask"], arguments["rotary_pos_emb"]
        by_half = [arguments, arguments]
        if mask is not None and mask.shape[0] == sum(sizes):
            by_half = [arguments | {"attention_mask": part} for part in mask.split(sizes)]
        if isinstance(angles, torch.Tensor) and angles.shape[1] == sum(
            sizes
        ):  # each sequence's (mrope)
            parts = zip(by_half, angles.split(sizes, 1), strict=True)
            by_half = [one | {"rotary_pos_emb": part} for one, part in parts]
        blocks = []
        for layer in layers:
            probability = layer.hidden_dropout if self.training else 0.0
            draws = [Dropout(probability, sizes) for _ in range(2)]
            for pair in zip(
                *(blocks_of(layer, of_half, draws) for of_half in by_half), strict=True
            ):
                blocks += pair
        return blocks

    def _recomputed_parts(self) -> list[tuple[Sequence[torch.nn.Module], bool]]:
        """The layers in the parts that ``--recompute-method`` has, and whether each is recomputed."""
        config, layers = self.config, list(self.layers)
        count = config.recompute_num_layers or 1
        if config.recompute_granularity != "full" or not self.training:
            return [(layers, False)]
        if config.recompute_method == "uniform":
            return [(layers[first : first + count], True) for first in range(0, len(layers), count)]
        return [([layer], True) for layer in layers[:count]] + [(layers[count:], False)]


def attach(chunk: torch.nn.Module) -> None:
    """Make a model chunk's transformer block a ``HalvesBlock``.

    Raises: CompressionConfigError: a layer that halves do not cover, or a setting.
    """
    check_halves(chunk.config)
    decoder = getattr(chunk, "decoder", None)
    if type(decoder) is not TransformerBlock and not isinstance(decoder, HalvesBlock):
        raise CompressionConfigError(
            f"{HALVES} covers a decoder of megatron-core's TransformerBlock, not {type(decoder).__name__}; "
            "drop the flag"
        )
    for path, layer in decoder.layers.named_children():
        if reason := _why_not_halved(layer):
            raise CompressionConfigError(
                f"{HALVES} covers layers of one self-attention and one dense MLP, but layer {path} "
                f"{reason}; drop the flag"
            )
    symbols.change_class(decoder, HalvesBlock)


def _why_not_halved(layer: torch.nn.Module) -> str | None:
    """What of a layer would not be computed if its modules are called instead of it."""
    if type(layer) is not TransformerLayer:
        return f"is a {type(layer).__name__}"
    attention = layer.self_attention
    if not isinstance(attention, SelfAttention) or isinstance(attention, MLASelfAttention):
        return f"has a {type(attention).__name__}"
    if type(layer.mlp) is not MLP:
        return f"has a {type(layer.mlp).__name__}"
    others = layer.cross_attention, layer.pre_cross_attn_layernorm
    if not all(isinstance(one, IdentityOp) for one in others):
        return "has cross attention"
    if any(one is not get_bias_dropout_add for one in (layer.self_attn_bda, layer.mlp_bda)):
        return "adds to the residual stream in a way of its own"
    linear = attention.linear_qkv, attention.linear_proj, layer.mlp.linear_fc1, layer.mlp.linear_fc2
    if any(getattr(one, "site", None) is None for one in linear):
        return "has linear layers of another kind"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return "has hooks"
    return None
