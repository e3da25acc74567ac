"""Transformer blocks whose attentions and MLPs take turns (turns.py): halves of a micro-batch, and a ladder.

They take the place of ``TransformerBlock`` by a change of class, and have its state.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from megatron.compression import patches
from megatron.compression.communication.site import CommSite
from megatron.compression.errors import CompressionConfigError, InputError, without_fix
from megatron.compression.tensor_parallel.sequence_halves import HalfAttention, arguments_by_half, deal
from megatron.compression.tensor_parallel.turns import Block, Linear, in_turns
from megatron.compression.tensor_parallel.turns_checks import HALVES, check_halves, check_sequence_halves
from megatron.compression.torch_native.attention import SDPACoreAttention

_PASSED_ON = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset")
"""What attention is given whatever the lane."""
_OF_INFERENCE = ("inference_context", "inference_params")
_NOT_TAKEN = ("context", *_OF_INFERENCE, "packed_seq_params", "attention_bias", "extract_layer_indices")


class Dropout:
    """The dropout of one block's output, drawn once for the whole micro-batch, whoever takes which rows.

    Args:
        sizes: of the lanes along ``dim`` of ``[s, b, h]``; the first lane comes first.
    """

    def __init__(self, probability: float, sizes: Sequence[int], dim: int) -> None:
        self.probability, self.sizes, self.dim = probability, sizes, dim
        self._kept: list[torch.Tensor] = []

    def __call__(self, total: torch.Tensor) -> Linear | None:
        """The next lane's part of it; ``total`` is that lane's ``[s, b, h]``."""
        if self.probability == 0:
            return None
        if not self._kept:
            shape = list(total.shape)
            shape[self.dim] = sum(self.sizes)
            kept = F.dropout(total.new_ones(shape), self.probability) != 0
            self._kept = list(kept.split(self.sizes, self.dim))
        kept, scale = self._kept.pop(0), 1 / (1 - self.probability)
        return lambda x: x * scale * kept


def blocks_of(layer: torch.nn.Module, arguments: dict[str, Any], draws: Sequence[Dropout]) -> list[Block]:
    """Attention and MLP of a layer.

    Args:
        arguments: of the attention.
        draws: of the attention's output and of the MLP's.
    """
    attention, mlp = layer.self_attention, layer.mlp
    return [
        Block(
            attention, layer.input_layernorm, attention.linear_qkv, attention.linear_proj, draws[0], arguments
        ),
        Block(mlp, layer.pre_mlp_layernorm, mlp.linear_fc1, mlp.linear_fc2, draws[1]),
    ]


class TurnsBlock(TransformerBlock):
    """megatron-core's block for the layers that ``attach`` lets pass, each block of them in turn.

    Layers themselves are not called, their modules are: hooks of a ``TransformerLayer`` would not run.
    """

    flag: str
    """What asks for it, for errors."""
    own_residual: bool
    """See ``in_turns``."""
    check: Callable[[Any], None]
    """Raises a CompressionConfigError for a model's config that turns cannot have."""

    def _lanes(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two lanes of an input ``[s, b, h]``; each kind of block has its own."""
        raise NotImplementedError

    def _joined(self, lanes: tuple[torch.Tensor, torch.Tensor], batch: int) -> torch.Tensor:
        """What goes on behind the last layer; each kind of block has its own."""
        raise NotImplementedError

    def _blocks(
        self,
        layers: Sequence[torch.nn.Module],
        arguments: dict[str, Any],
        lanes: Sequence[torch.Tensor],
        batch: int,
    ) -> list[Block]:
        """Of these layers, in the order in which they run; each kind of block has its own.

        Args:
            batch: sequences of the micro-batch.
        """
        raise NotImplementedError

    def forward(self, hidden_states, attention_mask=None, **options) -> torch.Tensor:
        """``[s, b, h] -> [s, b, h]``; takes what training and evaluation pass to megatron-core's.

        Raises: InputError: an argument that turns do not take.
        """
        received = self._received(hidden_states)
        if reason := self._refusal(received, options):
            return self._refused(reason, hidden_states, attention_mask, options)
        hidden_states = make_viewless_tensor(inp=received, requires_grad=True, keep_graph=True)
        arguments = {name: options.get(name) for name in _PASSED_ON} | {"attention_mask": attention_mask}
        of_ranks = tensor_parallel.get_cuda_rng_tracker().fork
        with of_ranks() if self.config.sequence_parallel else nullcontext():
            lanes = self._lanes(
                hidden_states.float() if self.config.fp32_residual_connection else hidden_states
            )
            for layers, recomputed in self._recomputed_parts():
                lanes = self._run(layers, arguments, lanes, hidden_states.shape[1], recomputed)
        hidden_states = self._joined(lanes, hidden_states.shape[1])
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)

    def _received(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What this stage computes with: its argument, or what the stage before has sent."""
        return hidden_states if self.pre_process else self.input_tensor

    def _refused(self, reason: str, hidden_states, attention_mask, options) -> torch.Tensor:
        raise InputError(f"{reason}; drop {self.flag}")

    def _refusal(self, hidden_states: torch.Tensor, options: dict[str, Any]) -> str | None:
        """Why turns cannot compute this; None: they can."""
        return next(
            (f"{one} does not take turns" for one in _NOT_TAKEN if options.get(one) is not None), None
        )

    def _draws(self, layer: torch.nn.Module, sizes: Sequence[int], dim: int) -> list[Dropout]:
        probability = layer.hidden_dropout if self.training else 0.0
        return [Dropout(probability, sizes, dim) for _ in range(2)]

    def _run(self, layers, arguments, lanes, batch, recomputed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        # Both lanes in one checkpoint: its backward has one graph of them, as all of this needs.
        def run(*lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return in_turns(self._blocks(layers, arguments, lanes, batch), lanes, self.own_residual)

        return tensor_parallel.checkpoint(run, False, *lanes) if recomputed else run(*lanes)

    def _recomputed_parts(self) -> list[tuple[Sequence[torch.nn.Module], bool]]:
        """The layers in the parts that ``--recompute-method`` has, and whether each is recomputed."""
        config, layers = self.config, list(self.layers)
        count = config.recompute_num_layers or 1
        if config.recompute_granularity != "full" or not self.training:
            return [(layers, False)]
        if config.recompute_method == "uniform":
            return [(layers[first : first + count], True) for first in range(0, len(layers), count)]
        return [([layer], True) for layer in layers[:count]] + [(layers[count:], False)]


class HalvesBlock(TurnsBlock):
    """Two halves of the micro-batch: one computes while the other's sums travel (turns.py).

    The same function as megatron-core's block, with its random numbers. The halves of an odd micro-batch
    differ by a sequence; a micro-batch of one is halved along the sequence (sequence_halves.py). What
    generates text, and evaluates sequences one by one, is not halved.
    """

    flag = HALVES
    own_residual = True
    check = staticmethod(check_halves)

    def forward(self, hidden_states, attention_mask=None, **options) -> torch.Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        # megatron-core's inference engine hands the tensor over in a wrapper
        whole = not self.layers or any(options.get(name) is not None for name in _OF_INFERENCE)
        if not whole and not torch.is_grad_enabled():
            whole = self._received(hidden_states).shape[1] < 2
        forward = TransformerBlock.forward if whole else TurnsBlock.forward
        return forward(self, hidden_states, attention_mask, **options)

    def _refusal(self, hidden_states, options):
        if hidden_states.shape[1] < 2:
            try:
                check_sequence_halves(self.config, hidden_states.shape[0])
            except CompressionConfigError as error:
                return without_fix(error)
            if reason := why_not_along_the_sequence(self.layers):
                return reason
        return super()._refusal(hidden_states, options)

    def _lanes(self, hidden_states):
        dim = _halved(hidden_states.shape[1])
        if dim == 0 and self.config.sequence_parallel:
            hidden_states = deal(hidden_states, self._site)
        length = hidden_states.shape[dim]
        first, second = hidden_states.split([length - length // 2, length // 2], dim)
        return first.contiguous(), second.contiguous()

    def _joined(self, lanes, batch):
        whole = torch.cat(lanes, _halved(batch))
        return deal(whole, self._site, back=True) if batch == 1 and self.config.sequence_parallel else whole

    @property
    def _site(self) -> CommSite:
        return self.layers[0].self_attention.linear_qkv.site

    def _blocks(self, layers, arguments, lanes, batch):
        dim = _halved(batch)
        sizes = [lane.shape[dim] for lane in lanes]
        mask, by_lane = arguments["attention_mask"], [arguments, arguments]
        if dim == 0:
            ranks = self._site.group.size() if self.config.sequence_parallel else 1
            by_lane = arguments_by_half(arguments, ranks * sizes[0])
        else:
            if mask is not None and mask.shape[0] == sum(sizes):
                by_lane = [arguments | {"attention_mask": part} for part in mask.split(sizes)]
            angles = arguments["rotary_pos_emb"]
            if isinstance(angles, torch.Tensor) and angles.shape[1] == sum(sizes):  # each sequence's (mrope)
                parts = zip(by_lane, angles.split(sizes, 1), strict=True)
                by_lane = [one | {"rotary_pos_emb": part} for one, part in parts]
        blocks = []
        for layer in layers:
            draws = self._draws(layer, sizes, dim)
            of_lanes = [blocks_of(layer, of_lane, draws) for of_lane in by_lane]
            if dim == 0:
                kept: list[torch.Tensor] = []
                for later, (attention, _) in enumerate(of_lanes):
                    attention.module = HalfAttention(layer.self_attention, kept, bool(later))
            for pair in zip(*of_lanes, strict=True):
                pair[1].again = True
                blocks += pair
        return blocks


class TriedHalvesBlock(HalvesBlock):
    """The same where ``--compression auto`` tries it: what halves cannot compute is computed whole."""

    def _refused(self, reason, hidden_states, attention_mask, options):
        return TransformerBlock.forward(self, hidden_states, attention_mask, **options)


def _halved(batch: int) -> int:
    """The dimension of ``[s, b, h]`` along which a micro-batch is halved."""
    return 1 if batch > 1 else 0


def check_layers(chunk: torch.nn.Module, cls: type[TurnsBlock]) -> None:
    """Refuse a model chunk whose transformer block cannot be one of ``cls``.

    Raises: CompressionConfigError: a layer that turns do not cover, or a setting.
    """
    cls.check(chunk.config)
    decoder = getattr(chunk, "decoder", None)
    if type(decoder) is not TransformerBlock and not isinstance(decoder, TurnsBlock):
        raise CompressionConfigError(
            f"{cls.flag} covers a decoder of megatron-core's TransformerBlock, not {type(decoder).__name__}; "
            "drop the flag"
        )
    for path, layer in decoder.layers.named_children():
        if reason := _why_not_in_turns(layer):
            raise CompressionConfigError(
                f"{cls.flag} covers layers of one self-attention and one dense MLP, but layer {path} "
                f"{reason}; drop the flag"
            )


def _why_not_in_turns(layer: torch.nn.Module) -> str | None:
    """What of a layer would not be computed where its modules are called in its place."""
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
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return "has hooks"
    return None


def why_not_along_the_sequence(layers: Iterable[torch.nn.Module]) -> str | None:
    """Why one sequence cannot be halved for these layers' attention; None: it can."""
    for layer in layers:
        attention = layer.self_attention
        if attention.attn_mask_type is not AttnMaskType.causal:
            return "attention that is not causal cannot have its one sequence halved"
        if not isinstance(attention.core_attention, SDPACoreAttention):
            return f"{type(attention.core_attention).__name__} takes no fewer queries than keys"
    return None


def attach(chunk: torch.nn.Module, cls: type[TurnsBlock]) -> None:
    """Make the transformer block of a model chunk one of ``cls``; raises what ``check_layers`` raises."""
    check_layers(chunk, cls)
    patches.change_class(chunk.decoder, cls)
