"""Settings of tensor parallelism: which codec, for which messages."""

import dataclasses
import functools
import math
import re
from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar

from megatron.compression.codecs import Codec
from megatron.compression.communication.policy import Rule
from megatron.compression.communication.rows import why_not_rows
from megatron.compression.dimension import Dimension, codec_of, refuse_flags, refuse_fp16
from megatron.compression.errors import CompressionConfigError

RECOMMENDED = "int6:outliers=on"
"""What ``--tp-compression auto`` means: few bits for little loss (docs/choosing.md)."""

NAMED_LAYERS = ("embedding", "output")
"""What ``--tp-compression-layers`` calls the layers outside the transformer's numbered ones."""

GATHERED_BY_MEGATRON = {
    "mtp_num_layers": "the input of each multi-token-prediction layer",
    "distribute_saved_activations": "the inputs of recomputed layers",
}
"""Flags that make megatron-core communicate activations in a way that no site covers."""

_NOT_COVERED = (
    "multi_latent_attention",
    "experimental_attention_variant",
    "heterogeneous_layers_config_path",
    "use_kitchen",
)


_BACKWARD = "--tp-backward-compression"


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig(Dimension):
    """Compression of the activations and their gradients that tensor parallelism sends."""

    flag: ClassVar[str] = "--tp-compression"
    idle: ClassVar[str] = (
        "--tp-compression has no effect here: --tensor-model-parallel-size is 1, so there is no "
        "tensor-parallel traffic to compress"
    )

    compression: str = "none"
    """Codec of the tensor-parallel collectives; auto = the recommended one, none = uncompressed."""

    backward: str | None = None
    """Codec of the gradients; by default that of ``compression``."""

    min_mb: float = 8.0
    """Tensors of fewer MiB (uncompressed) are sent uncompressed: below some size compression costs more time
    than it saves. 0 compresses everything."""

    layers: str = "all"
    """Transformer layers that compress, counted from 0, such as 2-29 or 0,1,4-7; embedding and output name
    the layers outside. The others go uncompressed."""

    chunks: int = 1
    """Pieces of the sequence in which a row-parallel layer computes and sends its output, and a
    column-parallel one its input gradient: a piece's exchange runs behind the next piece's GEMM. 2 pays over
    PCIe."""

    def __post_init__(self) -> None:
        if self.compression == "auto":
            object.__setattr__(self, "compression", RECOMMENDED)
        if not (math.isfinite(self.min_mb) and self.min_mb >= 0):
            raise CompressionConfigError(
                f"--tp-compression-min-mb {self.min_mb} must be a number of MiB >= 0"
            )
        if self.chunks < 1:
            raise CompressionConfigError(f"--tp-compression-chunks {self.chunks} must be a number >= 1")
        parse_layers(self.layers)
        flags = {"backward": _BACKWARD}
        codec_of(self.compression, self.flag)
        codec_of(self.backward, _BACKWARD)
        changed = [
            flags.get(field.name, f"--tp-compression-{field.name.replace('_', '-')}")
            for field in dataclasses.fields(self)
            if field.name != "compression" and getattr(self, field.name) != field.default
        ]
        if changed and not self.enabled:
            raise CompressionConfigError(
                f"{', '.join(changed)} given, but tensor-parallel compression is off; add --taco or "
                "--tp-compression"
            )

    @property
    def backward_codec(self) -> Codec | None:
        """Of the gradients; None: uncompressed."""
        return self.forward_codec if self.backward is None else codec_of(self.backward, _BACKWARD)

    def rules(self, start_iteration: int) -> dict[str, Rule]:
        """For the policy."""
        least, layers = math.ceil(self.min_mb * 2**20), parse_layers(self.layers)
        return {
            "tp.forward": Rule(self.forward_codec, least, layers, start_iteration),
            "tp.backward": Rule(self.backward_codec, least, layers, start_iteration),
        }

    def check(self, args: Namespace) -> None:
        """Refuse what would leave some of the traffic silently uncompressed.

        Raises: CompressionConfigError: with the flag, the reason and the fix.
        """
        if not self.enabled:
            return
        refuse_fp16(args, self.flag, (self.forward_codec, self.backward_codec))
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
        numbers = [layer for layer in parse_layers(self.layers) or () if isinstance(layer, int)]
        if max(numbers, default=0) >= args.num_layers:
            raise CompressionConfigError(
                f"--tp-compression-layers {self.layers} names layer {max(numbers)}, but --num-layers "
                f"{args.num_layers} makes {args.num_layers - 1} the last one (they count from 0)"
            )

    def _check_experts(self, args: Namespace) -> None:
        """Ranks that share an expert send each other tokens, as many as the router gives them."""
        equal_parts = args.moe_pad_expert_input_to_capacity or args.expert_tensor_parallel_size == 1
        for codec in (self.forward_codec, self.backward_codec):
            if codec is None or equal_parts:
                continue
            if reason := why_not_rows(codec, args.moe_latent_size or args.hidden_size):
                raise CompressionConfigError(
                    f"{self.flag} {codec.name} {reason}; or give --expert-tensor-parallel-size 1"
                )

    def _check_transformer_engine(self, args: Namespace) -> None:
        reasons = {
            "symmetric_ar_type": f"sums in symmetric memory, past NCCL and past {self.flag}",
            "use_transformer_engine_op_fuser": f"builds layers that {self.flag} does not reach",
        }
        refuse_flags(args, reasons, "drop one of the two")
        if self.chunks > 1:
            raise CompressionConfigError(
                f"--tp-compression-chunks {self.chunks} needs --transformer-impl local: Transformer Engine "
                "computes a product in one piece; drop it"
            )

    def describe(self) -> str:
        """For the log: what travels how."""
        line = f"tensor parallelism uses {self.compression}, messages of at least {self.min_mb:g} MiB"
        if self.backward is not None:
            line += f", gradients {self.backward}"
        if self.layers != "all":
            line += f", layers {self.layers}"
        return line


@functools.cache
def parse_layers(text: str) -> frozenset[int | str] | None:
    """``0,4-6,output`` -> the layers it names: {0, 4, 5, 6, "output"}; None for ``all``.

    Raises: CompressionConfigError: something else than numbers, ranges, embedding, output.
    """
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
                f"--tp-compression-layers {text}: {part!r} is not a layer; give numbers from 0, ranges such "
                "as 2-29, embedding and output, separated by commas, or all"
            )
    return frozenset(layers)
