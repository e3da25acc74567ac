"""Settings of tensor parallelism: which codec, for which messages.

    TensorParallelConfig(compression="taco")                       # --taco
    TensorParallelConfig(compression="int8", backward="int6")      # --tp-compression int8 int6
    TensorParallelConfig(compression="int6;fc2=int5;@0-1=int8")    # other codecs for some sites and
    layers

Codecs by site and layer are one text: ``int6;fc2=int5;@0-1=int8;fc1@2-29,output=none``. The first
part is for every site that no later one names. A later part is SITE=SPEC, @LAYERS=SPEC or
SITE@LAYERS=SPEC, with SITE one of SITES and LAYERS as in ``--tp-compression-layers``; of several
that name a site the last counts.
"""

import functools
import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from megatron.compression.codecs import Codec
from megatron.compression.communication.collectives import why_not_rows
from megatron.compression.communication.policy import SITES, Choice, Rule
from megatron.compression.dimension import (
    ActivationConfig,
    codec_of,
    documented,
    refuse_arguments,
    refuse_fp16,
)
from megatron.compression.errors import CompressionConfigError, SettingError, argument, setting
from megatron.compression.graphs import refuse_by_layer, refuse_host_splits
from megatron.compression.names import PARALLELISMS, Parallelism

_COMPRESSION = "tensor_parallel.compression"
_BACKWARD = "tensor_parallel.backward"
_LAYERS = "tensor_parallel.layers"
_OVERLAP = "tensor_parallel.overlap"
_HALVES = f"{setting(_OVERLAP)} halves"
HALVES = "--tp-compression-overlap halves"
"""What switches ``halves.py`` on, as typed on the command line."""

OTHER_LAYERS = (
    "experimental_attention_variant",
    "heterogeneous_layers_config_path",
    "kitchen_config_file",
    "kitchen_recipe_number",
    "use_kitchen",
)
"""Arguments of Megatron's whose layers are not a dense GPT's."""

_NOT_COVERED = {
    "distribute_saved_activations": "gathers the inputs of recomputed layers, which are not "
    "compressed",
    **dict.fromkeys(
        OTHER_LAYERS, f"is not a dense GPT layer's, which {setting(_COMPRESSION)} covers"
    ),
}
"""What compression cannot be combined with: Megatron's argument -> why."""

_NOT_COVERED_IN_TE = {
    "symmetric_ar_type": f"sums in symmetric memory, past {setting(_COMPRESSION)}",
    "use_transformer_engine_op_fuser": f"builds layers that {setting(_COMPRESSION)} does not reach",
}
"""The same for Transformer Engine's layers."""

_CALLS_MODULES = "gathers weights when a layer is called, and halves call its modules"
_MOVES = "moves what a layer keeps when the layer is called, and halves call its modules"
_NOT_HALVED = {
    "num_experts": "balances the loads of experts over a whole micro-batch",
    "multi_latent_attention": "has attention whose input goes to several layers",
    "mtp_num_layers": "has layers that are not halved",
    **dict.fromkeys(OTHER_LAYERS, "has layers that are not halved"),
    "distribute_saved_activations": "keeps a part of one tensor, where there are two",
    "cpu_offloading_num_layers": _MOVES,
    "fine_grained_activation_offloading": _MOVES,
    "use_megatron_fsdp": _CALLS_MODULES,
    "use_torch_fsdp2": _CALLS_MODULES,
}
"""What halves of a micro-batch cannot be combined with: Megatron's argument -> why."""

NAMED_LAYERS = ("embedding", "output", "mtp")
"""What ``--tp-compression-layers`` calls the layers outside the transformer's numbered ones; mtp:
those of multi-token prediction."""

Overlap = Literal["weights", "halves"]


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig(ActivationConfig):
    """Compression of the activations and their gradients that tensor parallelism sends."""

    default_min_mb: ClassVar[float] = 8.0
    parallelism: ClassVar[Parallelism] = PARALLELISMS["tensor_parallel"]
    idle: ClassVar[str] = (
        f"{setting(_COMPRESSION)} has no effect here: {argument('tensor_model_parallel_size')} is "
        "1, so there is no tensor-parallel traffic to compress; give 2 or more, or drop "
        f"{setting(_COMPRESSION)}"
    )

    compression: str = documented(
        "none",
        "Codec of the tensor-parallel collectives, or a recipe (tensor-6bit, tensor-8bit); none = "
        "uncompressed. Other codecs for some sites (qkv, proj, fc1, fc2) and layers follow after "
        "semicolons: 'int6;fc2=int5;@0-1=int8;fc1@2-29=none'.",
    )

    backward: str | None = documented(None, "codec of the gradients (default: same as SPEC).")

    layers: str = documented(
        "all",
        "Transformer layers that compress, counted from 0, such as 2-29 or 0,1,4-7; embedding, "
        "output and mtp name the layers outside. The others go uncompressed.",
    )

    overlap: Overlap | None = documented(
        None,
        "What runs while tensor-parallel messages travel. weights = the weight gradients, in the "
        "backward pass. halves = also the other half of the micro-batch, forward and backward, "
        "compressed or not; it needs --transformer-impl local. (default: weights; --compression "
        "auto tries both)",
    )

    def validate(self) -> None:
        if self.overlap is not None and self.overlap not in get_args(Overlap):
            choices = ", ".join(get_args(Overlap))
            raise SettingError(_OVERLAP, self.overlap, "is unknown", f"choose one of {choices}")
        parse_layers(self.layers)
        parse_choices(self.compression, _COMPRESSION)
        if self.backward is not None:
            parse_choices(self.backward, _BACKWARD)
        if self.layers != "all" and not self.enabled:
            raise SettingError(
                _LAYERS,
                None,
                "given, but tensor-parallel compression is off",
                f"add {setting(_COMPRESSION)}, or drop it",
            )

    @property
    def halves(self) -> bool:
        """True where halves of a micro-batch are interleaved, compressed or not."""
        return self.overlap == "halves"

    @staticmethod
    def ranks(args: Namespace) -> int:
        """Return how many ranks share a layer or an expert: ranks of an expert send each other
        tokens as those of a layer send activations."""
        # Before Megatron has checked its arguments --expert-tensor-parallel-size may be None.
        sharing = 1
        if args.num_experts:
            sharing = args.expert_tensor_parallel_size or 1
        return max(args.tensor_model_parallel_size, sharing)

    def lines(self, args: Namespace) -> list[str]:
        """The lines for the log, also of halves that are not compressed and of what is not
        counted."""
        lines = []
        saves_parts = getattr(args, "distribute_saved_activations", False)
        if saves_parts and args.tensor_model_parallel_size > 1:
            name = argument("distribute_saved_activations")
            lines = [f"{name} gathers the inputs of recomputed layers, which are not counted"]
        if not self.halves:
            return lines + super().lines(args)
        if self.ranks(args) > 1:
            return [*lines, self.describe()]
        size = argument("tensor_model_parallel_size")
        return [f"{_HALVES} has no effect here: {size} is 1, so nothing is exchanged"]

    @property
    def forward_codec(self) -> Codec | None:
        return self._forward[0]

    @property
    def _forward(self) -> tuple[Codec | None, tuple[Choice, ...]]:
        return parse_choices(self.compression, _COMPRESSION)

    @property
    def _backward(self) -> tuple[Codec | None, tuple[Choice, ...]]:
        if self.backward is None:
            return self._forward
        return parse_choices(self.backward, _BACKWARD)

    @property
    def codecs(self) -> list[Codec]:
        """All codecs that some site uses."""
        return [codec for rule in self.rules(0).values() for codec in rule.codecs]

    def rules(
        self, start_iteration: int | None, train_iters: int | None = None
    ) -> dict[str, Rule[Codec | None]]:
        layers = parse_layers(self.layers)
        rules = {}
        for traffic, (codec, choices) in (
            ("tp.forward", self._forward),
            ("tp.backward", self._backward),
        ):
            rules[traffic] = Rule(
                codec, self.min_bytes, layers, start_iteration or 0, choices=choices
            )
        return rules

    def unmet_parts(self, messages: Iterable[tuple[str, int | str | None, str]]) -> set[str]:
        """Find the parts of the settings by site and layer that name nothing which is sent.

        Args:
            messages: site, its layer and traffic class of everything that is sent.

        Returns: the parts, such as ``--tp-compression fc2@output=int8``, with references for names.
        """
        if not self.enabled:
            return set()
        layers = parse_layers(self.layers)
        compressed = [message for message in messages if layers is None or message[1] in layers]
        unmet = set()
        if layers is not None:
            sending_layers = {layer for _, layer, _ in compressed}
            for part in self.layers.split(","):
                if sending_layers.isdisjoint(parse_layers(part) or ()):
                    unmet.add(f"{setting(_LAYERS)} {part.strip()}")
        # Without a codec of its own the backward counts as the forward does: a part that names a
        # site in either direction has met it.
        if self.backward is None:
            return unmet | _unmet_choices(_COMPRESSION, self.compression, compressed)
        forward = [message for message in compressed if message[2] == "tp.forward"]
        backward = [message for message in compressed if message[2] == "tp.backward"]
        unmet |= _unmet_choices(_COMPRESSION, self.compression, forward)
        return unmet | _unmet_choices(_BACKWARD, self.backward, backward)

    def check(self, args: Namespace) -> None:
        if self.halves:
            check_halves(args)
        if not self.enabled:
            return
        # From here on what concerns codecs; halves alone may send uncompressed.
        refuse_fp16(args, _COMPRESSION, self.codecs)
        implementation = args.transformer_impl
        if implementation not in ("local", "transformer_engine"):
            raise SettingError(
                _COMPRESSION,
                None,
                f"does not cover {argument('transformer_impl')} {implementation}",
                "use transformer_engine or local, or drop --taco",
            )
        if args.num_experts is not None and args.moe_token_dispatcher_type == "alltoall":
            self._check_experts(args)
        not_covered = _NOT_COVERED
        if implementation == "transformer_engine":
            not_covered = _NOT_COVERED_IN_TE | _NOT_COVERED
        refuse_arguments(args, not_covered, "drop one of the two")
        self._check_layers(args)

    def _check_layers(self, args: Namespace) -> None:
        """Refuse numbers of layers that the model does not have."""
        # --tp-compression-layers is checked as one more choice.
        every_layer = Choice(None, None, parse_layers(self.layers))
        for path, text, choices in (
            (_COMPRESSION, self.compression, self._forward[1]),
            (_BACKWARD, self.backward, self._backward[1]),
            (_LAYERS, self.layers, [every_layer]),
        ):
            named = [layer for choice in choices for layer in choice.layers or ()]
            last = max((layer for layer in named if isinstance(layer, int)), default=0)
            if last >= args.num_layers:
                raise SettingError(
                    path,
                    text,
                    f"names layer {last}: with {argument('num_layers')} {args.num_layers} layers "
                    f"are 0 to {args.num_layers - 1}",
                )

    def _check_experts(self, args: Namespace) -> None:
        """Refuse codecs that do not fit single tokens where the router decides how many a rank
        sends."""
        if args.expert_tensor_parallel_size > 1:
            refuse_host_splits(args, setting(_COMPRESSION))
        if args.moe_pad_expert_input_to_capacity or args.expert_tensor_parallel_size == 1:
            return  # all ranks send equal parts
        for codec in self.codecs:
            if reason := why_not_rows(codec, args.moe_latent_size or args.hidden_size):
                alternative = f"or give {argument('expert_tensor_parallel_size')} 1"
                raise SettingError(_COMPRESSION, codec.name, reason, alternative)

    def describe(self) -> str:
        if not self.enabled:
            return "tensor parallelism: halves of a micro-batch interleaved, uncompressed"
        parts = [self.compression]
        if self.backward is not None:
            parts.append(f"gradients {self.backward}")
        if self.min_bytes:
            parts.append(f"messages below {self.min_bytes / 2**20:g} MiB uncompressed")
        if self.halves:
            parts.append("halves of a micro-batch interleaved")
        if self.layers != "all":
            parts.append(f"layers {self.layers}")
        return f"tensor parallelism: {', '.join(parts)}"


def _unmet_choices(
    path: str, text: str, messages: Iterable[tuple[str, int | str | None, str]]
) -> set[str]:
    """The later parts of a spec by site and layer that decide about none of ``messages``."""
    choices = parse_choices(text, path)[1]  # the last part first, as it wins
    deciding: set[int] = set()
    for site, layer, _ in messages:
        for number, choice in enumerate(choices):
            if choice.names(site, layer):
                deciding.add(number)
                break
    parts = [part.strip() for part in reversed(text.split(";")[1:])]
    return {
        f"{setting(path)} {part}" for number, part in enumerate(parts) if number not in deciding
    }


@functools.cache
def parse_layers(text: str, path: str = _LAYERS) -> frozenset[int | str] | None:
    """The layers that a text names: ``0,4-6,output`` are {0, 4, 5, 6, "output"}, and ``all`` is
    None.

    Args:
        text: numbers, ranges and names of layers, separated by commas.
        path: the setting that has the text, for errors.

    Raises: SettingError: something in it is no layer.
    """
    if text == "all":
        return None
    layers: set[int | str] = set()
    for part in text.split(","):
        part = part.strip()
        if part in NAMED_LAYERS:
            layers.add(part)
            continue
        numbers = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part, re.ASCII)
        first = int(numbers[1]) if numbers else 0
        last = int(numbers[2] or numbers[1]) if numbers else -1
        if first > last:
            raise SettingError(
                path,
                text,
                f": {part!r} is not a layer",
                "give numbers from 0, ranges such as 2-29, embedding, output and mtp, separated "
                "by commas, or all",
            )
        layers.update(range(first, last + 1))
    return frozenset(layers)


@functools.cache
def parse_choices(text: str, path: str) -> tuple[Codec | None, tuple[Choice, ...]]:
    """Parse a spec by site and layer, ``int6;fc2=int5;@0-1=int8``.

    Args:
        text: the spec.
        path: the setting that has it, for errors.

    Returns: the codec of all sites that no part names; the choices of the parts, the last part
    first.

    Raises: SettingError: a part that is neither SITE=SPEC, @LAYERS=SPEC nor SITE@LAYERS=SPEC.
    """
    # "int6;fc2=int5" is int6 for all sites and int5 for fc2.
    first, *parts = text.split(";")
    choices = []
    for part in parts:
        where, equals, spec = part.strip().partition("=")
        site, at, layers = where.partition("@")  # "fc2@0-3", "fc2" or "@0-3"
        names_nothing = not site and not at
        if not equals or names_nothing or (site and site not in SITES):
            raise SettingError(
                path,
                text,
                f": {part.strip()!r} must be SITE=SPEC, @LAYERS=SPEC or SITE@LAYERS=SPEC, SITE "
                f"one of {', '.join(SITES)}",
            )
        codec = codec_of(spec, path)
        choices.append(Choice(codec, site or None, parse_layers(layers, path) if at else None))
    return codec_of(first.strip(), path), tuple(reversed(choices))


def halves_refusal(args: Any) -> CompressionConfigError | None:
    """Return why halves of a micro-batch cannot be interleaved under these arguments, or None where
    they can.

    Nothing is raised, so that whoever looks for the fastest schedule can leave halves out. ``str``
    of the result is one line with the flag, the reason and the fix. What only the built model
    shows is in ``halves_block.refusal``.

    Args:
        args: Megatron's arguments, or a ``TransformerConfig``, which has those that would give a
            wrong gradient.
    """
    try:
        check_halves(args)
    except CompressionConfigError as error:
        return error
    return None


def check_halves(args: Any) -> None:
    """Refuse what halves of a micro-batch cannot have.

    Args:
        args: Megatron's arguments, or a ``TransformerConfig``, which has those that would give a
            wrong gradient.

    Raises: SettingError: one of them does not fit.
    """
    drop = f"drop {_HALVES}"
    implementation = args.transformer_impl
    if implementation != "local":
        raise SettingError(
            _OVERLAP,
            "halves",
            f"needs {argument('transformer_impl')} local: a layer of {implementation} computes a "
            "norm's gradient in the function that sums it, so it waits for the sum",
            "give local or drop the flag",
        )
    refuse_arguments(args, _NOT_HALVED, f"drop it or {_HALVES}")
    refuse_by_layer(args, _HALVES, "calls the modules of two layers in turn")
    chunks = getattr(args, "mlp_chunks_for_training", None) or 1
    if chunks > 1:
        raise SettingError(
            "args.mlp_chunks_for_training",
            chunks,
            "calls the MLP once for each chunk, and halves call it once",
            f"drop it or {_HALVES}",
        )
    # A TransformerConfig has no micro-batch size: the model's first forward pass checks it then.
    if getattr(args, "micro_batch_size", 2) < 2:
        raise SettingError(
            "args.micro_batch_size",
            args.micro_batch_size,
            "has no two halves",
            f"give 2 or more, or {drop}",
        )
