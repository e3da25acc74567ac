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

from megatron.compression.errors import (
    CompressionConfigError,
    InputError,
    SettingError,
    setting,
)
from megatron.compression.patches import symbols
from megatron.compression.tensor_parallel.config import halves_refusal
from megatron.compression.tensor_parallel.halves import Block, Linear, interleave

_OVERLAP = "tensor_parallel.overlap"
_HALVES = f"{setting(_OVERLAP)} halves"
_PASSED_ON = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset")
"""Arguments of the block that attention is given in both halves."""
_OF_INFERENCE = ("inference_context", "inference_params")
"""Arguments of the block with which it generates text."""
_NOT_HALVED = ("context", "packed_seq_params", "attention_bias", "extract_layer_indices")
"""Arguments of the block that halves do not support."""


class Dropout:
    """The dropout of one block's output in both halves.

    The mask is drawn once for the whole micro-batch, when the first half asks, so that halves draw
    the random numbers that the whole would.

    Args:
        probability: of a value to be dropped.
        sizes: number of sequences of each half.
    """

    def __init__(self, probability: float, sizes: Sequence[int]) -> None:
        self.probability = probability
        self.sizes = sizes
        self._masks: list[torch.Tensor] = []
        """Bool ``[s, b, h]`` of the halves that have not asked yet, True where a value stays."""

    def __call__(self, total: torch.Tensor) -> Linear:
        """Return the next half's dropout; ``total`` is that half's output ``[s, b, h]``."""
        if not self._masks:
            tokens, _, hidden = total.shape
            # The same call as the whole micro-batch would make, so the same random numbers.
            ones = total.new_ones(tokens, sum(self.sizes), hidden)
            mask = F.dropout(ones, self.probability) != 0
            self._masks = list(mask.split(self.sizes, 1))
        # The halves ask in turn, the first one first.
        mask = self._masks.pop(0)
        scale = 1 / (1 - self.probability)
        return lambda x: x * scale * mask


def blocks_of(
    layer: torch.nn.Module, arguments: dict[str, Any], draws: Sequence[Dropout | None]
) -> list[Block]:
    """Return the attention and the MLP of a layer as blocks of one half.

    Args:
        layer: a ``TransformerLayer``.
        arguments: of its attention, for this half.
        draws: dropout of the attention's output, and of the MLP's; None: none.
    """
    attention = layer.self_attention
    mlp = layer.mlp
    return [
        Block(
            module=attention,
            norm=layer.input_layernorm,
            column=attention.linear_qkv,
            row=attention.linear_proj,
            draw=draws[0],
            arguments=arguments,
            recomputes_norm=layer.recompute_input_layernorm,
        ),
        Block(
            module=mlp,
            norm=layer.pre_mlp_layernorm,
            column=mlp.linear_fc1,
            row=mlp.linear_fc2,
            draw=draws[1],
            recomputes_norm=layer.recompute_pre_mlp_layernorm,
            recomputes_module=layer.recompute_mlp,
        ),
    ]


class HalvesBlock(TransformerBlock):
    """Two halves of the micro-batch: one computes while the other's sums are under way.

    The same function as megatron-core's block, with its random numbers. The halves of an odd
    micro-batch differ by a sequence. What generates text, and evaluates sequences one by one, is
    not halved.

    Replaces ``TransformerBlock`` by a change of class, with its state. Layers themselves are not
    called, but their modules are: hooks of a ``TransformerLayer`` would not run.
    """

    interleaved = True
    """False: micro-batches run whole, by megatron-core's own forward. See ``switch``."""

    def forward(self, hidden_states, attention_mask=None, **options) -> torch.Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``; arguments are megatron-core's, of training and
        evaluation.

        Raises:
            InputError: an argument that halves do not support.
        """
        # Stages after the first one get their input from the pipeline.
        received = hidden_states if self.pre_process else self.input_tensor
        if not self._halves(received, options):
            return super().forward(hidden_states, attention_mask, **options)
        if received.shape[1] < 2:
            raise InputError(f"a micro-batch of one sequence has no two halves; drop {_HALVES}")
        for name in _NOT_HALVED:
            if options.get(name) is not None:
                raise InputError(f"{name} is not halved; drop {_HALVES}")
        # As megatron-core's block: a view would keep its base, and the pipeline frees outputs.
        hidden_states = make_viewless_tensor(inp=received, requires_grad=True, keep_graph=True)
        arguments = {name: options.get(name) for name in _PASSED_ON}
        arguments["attention_mask"] = attention_mask
        # As megatron-core's block: with sequence parallelism ranks draw different dropout.
        random_state = nullcontext()
        if self.config.sequence_parallel:
            random_state = tensor_parallel.get_cuda_rng_tracker().fork()
        with random_state:
            stream = hidden_states
            if self.config.fp32_residual_connection:
                stream = stream.float()
            batch = stream.shape[1]
            sizes = [batch - batch // 2, batch // 2]
            # Sequences are the second dimension, so a half of them is strided.
            halves = [half.contiguous() for half in stream.split(sizes, 1)]
            for layers, recomputed in self._recomputed_parts():
                halves = self._run(layers, arguments, halves, recomputed)
        hidden_states = torch.cat(halves, 1)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)

    def _halves(self, received: Any, options: dict[str, Any]) -> bool:
        """Return whether this call is halved: not text generation, nor an evaluation of single
        sequences."""
        if not self.interleaved or not self.layers:
            return False
        if any(options.get(name) is not None for name in _OF_INFERENCE):
            # megatron-core's inference engine passes a wrapper of the tensor, which has no shape.
            return False
        return torch.is_grad_enabled() or received.shape[1] >= 2

    def _run(
        self,
        layers: Sequence[torch.nn.Module],
        arguments: dict[str, Any],
        halves: Sequence[torch.Tensor],
        recomputed: bool,
    ) -> Sequence[torch.Tensor]:
        """Run layers on both halves and return their residual streams."""

        # Both halves in one checkpoint: its backward has one graph of them, as all of this needs.
        def run(*halves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            sizes = [half.shape[1] for half in halves]
            return interleave(self._blocks(layers, arguments, sizes), halves)

        if recomputed:
            return tensor_parallel.checkpoint(run, False, *halves)
        return run(*halves)

    def _blocks(
        self,
        layers: Sequence[torch.nn.Module],
        arguments: dict[str, Any],
        sizes: Sequence[int],
    ) -> list[Block]:
        """Return the blocks of both halves in the order in which they run.

        Args:
            layers: whose blocks they are.
            arguments: of the attentions, for the whole micro-batch.
            sizes: number of sequences of each half.
        """
        first_arguments, second_arguments = _arguments_by_half(arguments, sizes)
        blocks = []
        for layer in layers:
            draws: list[Dropout | None] = [None, None]
            if self.training and layer.hidden_dropout > 0:
                draws = [Dropout(layer.hidden_dropout, sizes) for _ in draws]
            attention_1, mlp_1 = blocks_of(layer, first_arguments, draws)
            attention_2, mlp_2 = blocks_of(layer, second_arguments, draws)
            # The order in which ``interleave`` runs them: the halves take turns.
            blocks += [attention_1, attention_2, mlp_1, mlp_2]
        return blocks

    def _recomputed_parts(self) -> list[tuple[Sequence[torch.nn.Module], bool]]:
        """Return the layers in the parts that ``--recompute-method`` has, and whether each is
        recomputed."""
        config = self.config
        layers = list(self.layers)
        count = config.recompute_num_layers or 1
        if config.recompute_granularity != "full" or not self.training:
            return [(layers, False)]
        if config.recompute_method == "uniform":  # all layers, ``count`` in one checkpoint
            return [(layers[first : first + count], True) for first in range(0, len(layers), count)]
        # block: the first ``count`` layers, one in each checkpoint
        return [([layer], True) for layer in layers[:count]] + [(layers[count:], False)]


def _arguments_by_half(
    arguments: dict[str, Any], sizes: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide the arguments of attentions that differ between sequences.

    Args:
        arguments: for the whole micro-batch.
        sizes: number of sequences of each half.
    """
    first = dict(arguments)
    second = dict(arguments)
    mask = arguments["attention_mask"]
    # One mask for all sequences is given to both.
    if mask is not None and mask.shape[0] == sum(sizes):
        first["attention_mask"], second["attention_mask"] = mask.split(sizes)
    angles = arguments["rotary_pos_emb"]
    if isinstance(angles, torch.Tensor) and angles.shape[1] == sum(sizes):  # as mrope has them
        first["rotary_pos_emb"], second["rotary_pos_emb"] = angles.split(sizes, 1)
    return first, second


def attach(chunk: torch.nn.Module) -> None:
    """Make a model chunk's transformer block a ``HalvesBlock``.

    Raises:
        CompressionConfigError: a layer that halves do not cover, or a setting.
    """
    error = refusal(chunk)
    if error is not None:
        raise error
    symbols.change_class(chunk.decoder, HalvesBlock)


def switch(chunk: torch.nn.Module, interleaved: bool) -> None:
    """Run the micro-batches of a chunk that ``attach`` has changed in halves, or whole as
    megatron-core does.

    Takes effect at the next forward. Every rank of the tensor-parallel group has to switch at the
    same forward, since the messages differ. A CUDA graph keeps the schedule that it was captured
    with.
    """
    chunk.decoder.interleaved = interleaved


def refusal(chunk: torch.nn.Module) -> CompressionConfigError | None:
    """Return why a model chunk cannot run in halves, or None where it can; nothing is changed.

    ``str`` of the result is one line. What the command line alone shows is in
    ``config.halves_refusal``, which is asked here too.
    """
    error = halves_refusal(chunk.config)
    if error is not None:
        return error
    decoder = getattr(chunk, "decoder", None)
    if type(decoder) is not TransformerBlock and not isinstance(decoder, HalvesBlock):
        return SettingError(
            _OVERLAP,
            "halves",
            f"covers a decoder of megatron-core's TransformerBlock, not {type(decoder).__name__}",
            "drop the flag",
        )
    for path, layer in decoder.layers.named_children():
        if reason := _why_not_halved(layer):
            return SettingError(
                _OVERLAP,
                "halves",
                f"covers layers of one self-attention and one dense MLP, but layer {path} {reason}",
                "drop the flag",
            )
    return None


def _other_modules(layer: TransformerLayer) -> str | None:
    """Return which module of a layer is not one of those that halves call, or None."""
    attention = layer.self_attention
    if not isinstance(attention, SelfAttention) or isinstance(attention, MLASelfAttention):
        return f"has a {type(attention).__name__}"
    if type(layer.mlp) is not MLP:
        return f"has a {type(layer.mlp).__name__}"
    # A layer without cross attention has megatron-core's IdentityOp in both places.
    for module in (layer.cross_attention, layer.pre_cross_attn_layernorm):
        if not isinstance(module, IdentityOp):
            return "has cross attention"
    return None


def _why_not_halved(layer: torch.nn.Module) -> str | None:
    """Return what of a layer would not be computed if its modules were called instead of it, or
    None."""
    if type(layer) is not TransformerLayer:
        return f"is a {type(layer).__name__}"
    reason = _other_modules(layer)
    if reason is not None:
        return reason
    if {layer.self_attn_bda, layer.mlp_bda} != {get_bias_dropout_add}:
        return "adds to the residual stream in a way of its own"
    attention = layer.self_attention
    mlp = layer.mlp
    for linear in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
        if getattr(linear, "site", None) is None:
            return "has linear layers of another kind"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return "has hooks"
    return None
