"""Settings of tensor parallelism: which codec, for which messages."""

from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from megatron.compression.codecs import Codec
from megatron.compression.communication.policy import Choice, Rule
from megatron.compression.communication.rows import why_not_rows
from megatron.compression.dimension import Dimension, refuse_flags, refuse_fp16
from megatron.compression.errors import CompressionConfigError
from megatron.compression.tensor_parallel.by_site import parse_choices, parse_layers
from megatron.compression.tensor_parallel.turns_checks import HALVES, check_halves

GATHERED_BY_MEGATRON = {
    "mtp_num_layers": "the input of each multi-token-prediction layer",
    "distribute_saved_activations": "the inputs of recomputed layers",
}
"""Flags that make megatron-core communicate activations in a way that no site covers."""

_NOT_COVERED = (
    "experimental_attention_variant",
    "heterogeneous_layers_config_path",
    "use_kitchen",
)


_BACKWARD = "--tp-compression BACKWARD"

Overlap = Literal["weights", "halves"]


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig(Dimension):
    """Compression of the activations and their gradients that tensor parallelism sends."""

    default_min_mb: ClassVar[float] = 8.0
    flag: ClassVar[str] = "--tp-compression"
    idle: ClassVar[str] = (
        "--tp-compression has no effect here: --tensor-model-parallel-size is 1, so there is no "
        "tensor-parallel traffic to compress"
    )

    compression: str = "none"
    """Codec of the tensor-parallel collectives, or a recipe (tensor-6bit, tensor-8bit); none = uncompressed.
    Others by site (qkv, proj, fc1, fc2) and layer can follow: 'int6;fc2=int5;@0-1=int8;fc1@2-29=none'."""

    backward: str | None = None
    """Codec of the gradients; by default that of ``compression``."""

    layers: str = "all"
    """Transformer layers that compress, counted from 0, such as 2-29 or 0,1,4-7; embedding and output name
    the layers outside. The others go uncompressed."""

    overlap: Overlap = "weights"
    """What runs behind exchanges: weights = weight gradients, in the backward; halves = also the other half
    of the micro-batch, forward and backward, compressed or not. Torch-native layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        """Whether halves of a micro-batch take turns, be they compressed or not."""
        return self.overlap == "halves"

    def idle_reason(self, ranks: int) -> str | None:
        """Also of halves that are not compressed."""
        if self.halves and ranks == 1:
            return f"{HALVES} has no effect here: --tensor-model-parallel-size is 1, so nothing is exchanged"
        return super().idle_reason(ranks)

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
        rules = self.rules(0)
        return [codec for rule in rules.values() for codec in rule.codecs]

    def rules(self, start_iteration: int) -> dict[str, Rule]:
        """For the policy."""
        least, layers = self.min_bytes, parse_layers(self.layers)
        return {
            traffic: Rule(codec, least, layers, start_iteration, choices=choices)
            for traffic, (codec, choices) in (("tp.forward", self._forward), ("tp.backward", self._backward))
        }

    def check(self, args: Namespace) -> None:
        """Refuse what would leave some of the traffic silently uncompressed.

        Raises: CompressionConfigError: with the flag, the reason and the fix.
        """
        if self.halves:
            check_halves(args)
        if not self.enabled:
            return
        refuse_fp16(args, self.flag, self.codecs)
        own = "--tp-compression"
        if args.transformer_impl not in ("local", "transformer_engine"):
            raise CompressionConfigError(
                f"--tp-compression does not cover --transformer-impl {args.transformer_impl}; use "
                "transformer_engine or local, or drop --taco"
            )
        if args.transformer_impl == "transformer_engine":
            self._check_transformer_engine(args)
        if args.num_experts is not None and args.moe_token_dispatcher_type == "alltoall":
            self._check_experts(args)
        if args.cuda_graph_impl != "none":
            raise CompressionConfigError(
                "--tp-compression chooses, counts and measures on the host at each message, which a replayed "
                "graph leaves out; drop --cuda-graph-impl or --taco"
            )
        gathers = f"over the tensor-parallel ranks, which {own} does not compress"
        reasons = {name: f"gathers {what} {gathers}" for name, what in GATHERED_BY_MEGATRON.items()}
        reasons |= dict.fromkeys(_NOT_COVERED, f"is not a dense GPT layer's, which {own} covers")
        refuse_flags(args, reasons, "drop one of the two")
        for flag, text, choices in (
            (self.flag, self.compression, self._forward[1]),
            (_BACKWARD, self.backward, self._backward[1]),
            ("--tp-compression-layers", self.layers, [Choice(None, None, parse_layers(self.layers))]),
        ):
            layers = [layer for choice in choices for layer in choice.layers or ()]
            last = max((layer for layer in layers if isinstance(layer, int)), default=0)
            if last >= args.num_layers:
                raise CompressionConfigError(
                    f"{flag} {text} names layer {last}, but --num-layers {args.num_layers} makes "
                    f"{args.num_layers - 1} the last one (they count from 0)"
                )

    def _check_experts(self, args: Namespace) -> None:
        """Ranks that share an expert send each other tokens, as many as the router gives them."""
        equal_parts = args.moe_pad_expert_input_to_capacity or args.expert_tensor_parallel_size == 1
        for codec in [] if equal_parts else self.codecs:
            if reason := why_not_rows(codec, args.moe_latent_size or args.hidden_size):
                raise CompressionConfigError(
                    f"{self.flag} {codec.name} {reason}; or give --expert-tensor-parallel-size 1"
                )

    def _check_transformer_engine(self, args: Namespace) -> None:
        reasons = {
            "tp_comm_overlap": "sends tensor-parallel traffic through user buffers, past NCCL "
            f"and past {self.flag}",
            "symmetric_ar_type": f"sums in symmetric memory, past NCCL and past {self.flag}",
            "use_transformer_engine_op_fuser": f"builds layers that {self.flag} does not reach",
            "multi_latent_attention": "gathers keys' positions uncounted in Transformer Engine's layers "
            "(--transformer-impl local: counted)",
        }
        refuse_flags(args, reasons, "drop one of the two")

    def describe(self) -> str:
        """For the log: what travels how."""
        if not self.enabled:
            return "tensor parallelism has halves of a micro-batch in turn, uncompressed"
        line = (
            f"tensor parallelism uses {self.compression}, messages of at least {self.min_bytes / 2**20:g} MiB"
        )
        if self.backward is not None:
            line += f", gradients {self.backward}"
        if self.halves:
            line += ", halves of a micro-batch in turn"
        if self.layers != "all":
            line += f", layers {self.layers}"
        return line
