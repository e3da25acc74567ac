"""Settings of tensor parallelism: which codec, for which messages.

Codecs by site and layer are one text: ``int6;fc2=int5;@0-1=int8;fc1@2-29,output=none``. The first part is for
every site that no later one names. A later part is SITE=SPEC, @LAYERS=SPEC or SITE@LAYERS=SPEC, with SITE one
of SITES and LAYERS as in ``--tp-compression-layers``; of several that name a site the last counts.
"""

import functools
import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from megatron.compression.codecs import Codec
from megatron.compression.communication.collectives import why_not_rows
from megatron.compression.communication.policy import SITES, Choice, Rule
from megatron.compression.dimension import DimensionConfig, codec_of, refuse_flags, refuse_fp16
from megatron.compression.errors import CompressionConfigError
from megatron.compression.graphs import refuse_by_layer, refuse_host_splits

_GATHERS = "gathers the inputs of recomputed layers, which"

OTHER_LAYERS = (
    *("experimental_attention_variant", "heterogeneous_layers_config_path"),
    *("kitchen_config_file", "kitchen_recipe_number", "use_kitchen"),
)
"""Flags whose layers are not a dense GPT's."""

_NOT_COVERED = {
    "distribute_saved_activations": f"{_GATHERS} are not compressed",
    **dict.fromkeys(OTHER_LAYERS, "is not a dense GPT layer's, which --tp-compression covers"),
}
"""What compression cannot be combined with: Megatron's argument -> why."""

_NOT_COVERED_IN_TE = {
    "symmetric_ar_type": "sums in symmetric memory, past --tp-compression",
    "use_transformer_engine_op_fuser": "builds layers that --tp-compression does not reach",
}

_BACKWARD, _LAYERS = "--tp-compression BACKWARD", "--tp-compression-layers"
HALVES = "--tp-compression-overlap halves"

_NOT_HALVED = {
    "num_experts": "routes the tokens of a whole micro-batch",
    "multi_latent_attention": "has attention whose input goes to several layers",
    **dict.fromkeys(("mtp_num_layers", *OTHER_LAYERS), "has layers that are not halved"),
    "distribute_saved_activations": "keeps a part of one tensor, where there are two",
    **dict.fromkeys(
        ("use_megatron_fsdp", "use_torch_fsdp2"),
        "gathers weights when a layer is called, and halves call its modules",
    ),
}
"""What halves of a micro-batch cannot be combined with: Megatron's argument -> why."""

NAMED_LAYERS = ("embedding", "output", "mtp")
"""What ``--tp-compression-layers`` calls the layers outside the transformer's numbered ones; mtp: those of
multi-token prediction."""

Overlap = Literal["weights", "halves"]


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig(DimensionConfig):
    """Compression of the activations and their gradients that tensor parallelism sends."""

    default_min_mb: ClassVar[float] = 8.0
    flag: ClassVar[str] = "--tp-compression"
    idle: ClassVar[str] = (
        "--tp-compression has no effect here: --tensor-model-parallel-size is 1, so there is no "
        "tensor-parallel traffic to compress; give 2 or more, or drop --tp-compression"
    )

    compression: str = "none"
    """Codec of the tensor-parallel collectives, or a recipe (tensor-6bit, tensor-8bit); none = uncompressed.
    Others by site (qkv, proj, fc1, fc2) and layer can follow: 'int6;fc2=int5;@0-1=int8;fc1@2-29=none'."""

    backward: str | None = None
    """Codec of the gradients; by default that of ``compression``."""

    layers: str = "all"
    """Transformer layers that compress, counted from 0, such as 2-29 or 0,1,4-7; embedding, output and mtp
    name the layers outside. The others go uncompressed."""

    overlap: Overlap = "weights"
    """What overlaps with exchanges: weights = weight gradients, in the backward; halves = also the other half
    of the micro-batch, forward and backward, compressed or not. Torch-native layers."""

    def validate(self) -> None:
        if self.overlap not in get_args(Overlap):
            raise CompressionConfigError(
                f"--tp-compression-overlap {self.overlap} is unknown; choose one of "
                f"{', '.join(get_args(Overlap))}"
            )
        parse_layers(self.layers)
        _ = self._forward, self._backward
        if self.layers != "all" and not self.enabled:
            raise CompressionConfigError(
                "--tp-compression-layers given, but tensor-parallel compression is off; add --taco or "
                "--tp-compression"
            )

    @property
    def halves(self) -> bool:
        """Whether halves of a micro-batch are interleaved, compressed or not."""
        return self.overlap == "halves"

    @staticmethod
    def ranks(args: Namespace) -> int:
        """Ranks that share an expert send each other tokens as tensor parallelism does."""
        sharing = (args.expert_tensor_parallel_size or 1) if args.num_experts else 1
        return max(args.tensor_model_parallel_size, sharing)

    def lines(self, args: Namespace) -> list[str]:
        """Also of halves that are not compressed, and of what is not counted."""
        lines = []
        if args.tensor_model_parallel_size > 1 and getattr(
            args, "distribute_saved_activations", False
        ):
            lines = [f"--distribute-saved-activations {_GATHERS} are not counted"]
        if not self.halves:
            typed = self.flag if getattr(args, "taco", None) is None else "--taco"
            return lines + [line.replace(self.flag, typed) for line in super().lines(args)]
        if self.ranks(args) > 1:
            return [*lines, self.describe()]
        return [
            f"{HALVES} has no effect here: --tensor-model-parallel-size is 1, so nothing is exchanged"
        ]

    @property
    def forward_codec(self) -> Codec | None:
        return self._forward[0]

    @property
    def _forward(self) -> tuple[Codec | None, tuple[Choice, ...]]:
        return parse_choices(self.compression, self.flag)

    @property
    def _backward(self) -> tuple[Codec | None, tuple[Choice, ...]]:
        return self._forward if self.backward is None else parse_choices(self.backward, _BACKWARD)

    @property
    def codecs(self) -> list[Codec]:
        """Every one that some site uses."""
        return [codec for rule in self.rules(0).values() for codec in rule.codecs]

    def rules(self, start_iteration: int | None, train_iters: int | None = None) -> dict[str, Rule]:
        least, layers = self.min_bytes, parse_layers(self.layers)
        return {
            traffic: Rule(codec, least, layers, start_iteration or 0, choices=choices)
            for traffic, (codec, choices) in (
                ("tp.forward", self._forward),
                ("tp.backward", self._backward),
            )
        }

    def unmet_parts(self, messages: Iterable[tuple[str, int | str | None, str]]) -> set[str]:
        """The parts of the settings by site and layer, such as ``--tp-compression fc2@output=int8``, that
        name none of ``messages``: site, its layer and traffic class of everything that is sent."""
        if not self.enabled:
            return set()
        layers = parse_layers(self.layers)
        messages = [message for message in messages if layers is None or message[1] in layers]
        at = {layer for _, layer, _ in messages}
        named = [] if layers is None else self.layers.split(",")
        unmet = {
            f"{_LAYERS} {part.strip()}" for part in named if at.isdisjoint(parse_layers(part) or ())
        }
        specs = [(self.flag, self.compression, "tp.")]
        if self.backward is not None:
            specs = [
                (self.flag, self.compression, "tp.forward"),
                (_BACKWARD, self.backward, "tp.backward"),
            ]
        for flag, text, traffic in specs:
            choices = parse_choices(text, flag)[1]  # last first: the last that names a site counts
            met = {
                next(
                    (number for number, choice in enumerate(choices) if choice.names(site, layer)),
                    None,
                )
                for site, layer, one in messages
                if one.startswith(traffic)
            }
            parts = enumerate(reversed(text.split(";")[1:]))
            unmet |= {f"{flag} {part.strip()}" for number, part in parts if number not in met}
        return unmet

    def check(self, args: Namespace) -> None:
        if self.halves:
            check_halves(args)
        if not self.enabled:
            return
        refuse_fp16(args, self.flag, self.codecs)
        if args.transformer_impl not in ("local", "transformer_engine"):
            raise CompressionConfigError(
                f"--tp-compression does not cover --transformer-impl {args.transformer_impl}; use "
                "transformer_engine or local, or drop --taco"
            )
        if args.num_experts is not None and args.moe_token_dispatcher_type == "alltoall":
            self._check_experts(args)
        in_te = _NOT_COVERED_IN_TE if args.transformer_impl == "transformer_engine" else {}
        refuse_flags(args, in_te | _NOT_COVERED, "drop one of the two")
        for flag, text, choices in (
            (self.flag, self.compression, self._forward[1]),
            (_BACKWARD, self.backward, self._backward[1]),
            (_LAYERS, self.layers, [Choice(None, None, parse_layers(self.layers))]),
        ):
            layers = [layer for choice in choices for layer in choice.layers or ()]
            last = max((layer for layer in layers if isinstance(layer, int)), default=0)
            if last >= args.num_layers:
                raise CompressionConfigError(
                    f"{flag} {text} names layer {last}: with --num-layers {args.num_layers} layers are 0 to "
                    f"{args.num_layers - 1}"
                )

    def _check_experts(self, args: Namespace) -> None:
        """Ranks that share an expert send each other as many tokens as the router gives them."""
        if args.expert_tensor_parallel_size > 1:
            refuse_host_splits(args, self.flag)
        equal_parts = args.moe_pad_expert_input_to_capacity or args.expert_tensor_parallel_size == 1
        for codec in [] if equal_parts else self.codecs:
            if reason := why_not_rows(codec, args.moe_latent_size or args.hidden_size):
                raise CompressionConfigError(
                    f"{self.flag} {codec.name} {reason}; or give --expert-tensor-parallel-size 1"
                )

    def describe(self) -> str:
        if not self.enabled:
            return "tensor parallelism interleaves halves of a micro-batch, uncompressed"
        line = f"tensor parallelism uses {self.compression}, messages from {self.min_bytes / 2**20:g} MiB on"
        if self.backward is not None:
            line += f", gradients {self.backward}"
        if self.halves:
            line += ", halves of a micro-batch interleaved"
        if self.layers != "all":
            line += f", layers {self.layers}"
        return line


@functools.cache
def parse_layers(text: str, flag: str = _LAYERS) -> frozenset[int | str] | None:
    """``0,4-6,output`` -> the layers it names: {0, 4, 5, 6, "output"}; None for ``all``."""
    if text == "all":
        return None
    layers: set[int | str] = set()
    for part in text.split(","):
        part = part.strip()
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part, re.ASCII)
        if part in NAMED_LAYERS:
            layers.add(part)
        elif found and int(found[1]) <= int(found[2] or found[1]):
            layers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
        else:
            raise CompressionConfigError(
                f"{flag} {text}: {part!r} is not a layer; give numbers from 0, ranges such as 2-29, "
                "embedding, output and mtp, separated by commas, or all"
            )
    return frozenset(layers)


@functools.cache
def parse_choices(text: str, flag: str) -> tuple[Codec | None, tuple[Choice, ...]]:
    """The codec of all sites, and those of some, last first."""
    first, *others = text.split(";")
    choices = []
    for part in others:
        where, equals, spec = part.strip().partition("=")
        site, at, layers = where.partition("@")
        if not equals or (not site and not at) or (site and site not in SITES):
            raise CompressionConfigError(
                f"{flag} {text}: {part.strip()!r} must be SITE=SPEC, @LAYERS=SPEC or SITE@LAYERS=SPEC, SITE "
                f"one of {', '.join(SITES)}"
            )
        codec = codec_of(spec, flag)
        choices.append(Choice(codec, site or None, parse_layers(layers, flag) if at else None))
    return codec_of(first.strip(), flag), tuple(reversed(choices))


def check_halves(args: Namespace) -> None:
    """Raises: CompressionConfigError: what halves of a micro-batch cannot have, of Megatron's arguments or of
    a ``TransformerConfig``, which has those that would give a wrong gradient."""
    implementation = args.transformer_impl
    if implementation != "local":
        raise CompressionConfigError(
            f"{HALVES} needs --transformer-impl local: layers of {implementation} wait for a sum before they "
            "return it; give local or drop the flag"
        )
    refuse_flags(args, _NOT_HALVED, f"drop it or {HALVES}")
    refuse_by_layer(args, HALVES, "calls the modules of two layers in turn")
    modules = " ".join(sorted(set(args.recompute_modules or ()) - {"core_attn"}))
    if args.recompute_granularity == "selective" and modules:
        raise CompressionConfigError(
            f"--recompute-modules {modules} has a backward for each half, so that a weight's gradient would "
            f"count as complete after one of two; recompute core_attn alone or drop {HALVES}"
        )
    for name in ("mlp_chunks_for_training", "context_parallel_size"):
        if (getattr(args, name, None) or 1) > 1:
            raise CompressionConfigError(
                f"--{name.replace('_', '-')} {getattr(args, name)} is not supported with {HALVES}; "
                "drop one of the two"
            )
    if getattr(args, "micro_batch_size", 2) < 2:
        raise CompressionConfigError(
            f"--micro-batch-size {args.micro_batch_size} has no two halves; give 2 or more, or drop {HALVES}"
        )
    if args.attention_dropout > 0:
        raise CompressionConfigError(
            f"--attention-dropout {args.attention_dropout:g} draws in a kernel by place in the batch, so "
            f"halves would drop other scores than the whole; give 0 or drop {HALVES}"
        )
