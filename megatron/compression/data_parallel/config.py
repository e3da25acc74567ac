"""Settings of data parallelism: how gradients and weights are sent, and what Megatron's flags
allow.

DataParallelConfig(compression="sdp4bit")                     # --dp-compression sdp4bit
DataParallelConfig(compression="int8", weights="lossless")    # --dp-compression int8 lossless
DataParallelConfig(compression="sdp4bit:outer=int8")          # another codec between data centres
"""

import re
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from megatron.compression.codecs import Codec
from megatron.compression.codecs.recipes import expand
from megatron.compression.codecs.sdp4bit import Sdp4bitCodec
from megatron.compression.communication.policy import Rule
from megatron.compression.data_parallel.codec_gradients import parse_gradient_compressor
from megatron.compression.data_parallel.compressor import GradientCompressor
from megatron.compression.dimension import (
    FULL_ITERATION,
    DimensionConfig,
    codec_of,
    documented,
    refuse_arguments,
    refuse_fp16,
)
from megatron.compression.errors import SettingError, argument, refused_for, setting
from megatron.compression.graphs import whole_iterations
from megatron.compression.names import DDP_FIELDS, PARALLELISMS, Parallelism

_COMPRESSION = "data_parallel.compression"
_WEIGHTS = "data_parallel.weights"
_OUTER = "data_parallel.outer"
"""A part of ``compression``, which errors name by itself."""
_FLAG = setting(_COMPRESSION)

# Megatron's argument -> why its gradients or weights pass through no bucket group that we know
_REFUSED = {
    "use_megatron_fsdp": f"communicates inside its own buffers ({argument('use_torch_fsdp2')} is "
    "supported)",
    "fp8_param_gather": "gathers fp8 weights already",
    "fp4_param_gather": "gathers fp4 weights already",
    "reuse_grad_buf_for_mxfp8_param_ag": "gathers weights through the gradients' buffer",
    "overlap_param_gather_with_optimizer_step": "gathers weights in the middle of the optimizer's "
    "step",
    "ddp_reduce_scatter_with_fp32_accumulation": "has its own reduce-scatter; ours sums in fp32 "
    "too",
    "nccl_ub": "registers the buffers that its own collectives use",
}

# The same for compressed weights of the distributed optimizer
_REFUSED_WITH_WEIGHTS = {
    "use_precision_aware_optimizer": "writes the weights inside its own kernel, where the "
    "difference to the old ones is lost",
    "optimizer_cuda_graph": "replays the optimizer's step, in which the host computes the "
    "difference of the weights",
}

# Megatron's argument -> how it changes the unit of gradients from one iteration to the next
_CHANGES_UNIT = {
    "calculate_per_token_loss": "divides gradients by an iteration's tokens after they are reduced",
    "fp16": "changes the loss scale",
}

_IMPLIED_WEIGHTS = {
    "sdp4bit": "sdp4bit:intra=4,group=2048,hadamard=off",
    "lossless": "lossless",
}
"""Codec of the gradients, without settings -> that of the distributed optimizer's weights which it
implies (sdp4bit: as in arXiv 2410.15526)."""


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig(DimensionConfig):
    """Compression of the gradients and weights that data parallelism sends."""

    parallelism: ClassVar[Parallelism] = PARALLELISMS["data_parallel"]
    idle: ClassVar[str] = f"{_FLAG} has no effect here: with one data-parallel rank nothing is sent"

    compression: str = documented(
        "none",
        "Codec of the gradients, a gradient compressor such as tagc, or the recipe "
        "gradients-4bit; none = uncompressed. sdp4bit and lossless without settings compress the "
        "distributed optimizer's weights as well. With --num-distributed-optimizer-instances a "
        "last setting outer=CODEC is the codec of the sums between instances, as in "
        "sdp4bit:outer=int8 or none:outer=int4 (default: the codec's setting between nodes; none "
        "for a gradient compressor).",
    )

    weights: str | None = documented(
        None,
        "codec of the weight updates that the distributed optimizer gathers (default: set by "
        "SPEC). With --use-torch-fsdp2: codec of the weights (default: lossless).",
    )

    node_size: int | None = None
    """Data-parallel ranks that count as one node, in the order of the ranks; by default the real
    nodes. Splits one host into several nodes for a trial."""

    @property
    def second_spec(self) -> str | None:
        return self.weights

    def validate(self) -> None:
        if self.node_size is not None and self.node_size < 1:
            raise SettingError("data_parallel.node_size", self.node_size, "must be at least 1")
        for path, codec in (
            (_COMPRESSION, self.gradient_codec),
            (_OUTER, self.outer_codec),
            (_WEIGHTS, self.weight_codec),
        ):
            if codec is not None and codec.sees_shape:
                raise SettingError(
                    path, codec.name, "needs tokens and channels, not a bucket's", "use int8"
                )

    @cached_property
    def hops(self) -> tuple[str, str | None]:
        """The spec of gradients inside an instance of the distributed optimizer (``compression``
        without its outer=), and that of the sums between instances; None where outer= is not given.
        """
        # outer= may be the only setting, as in none:outer=int4, or the last of several.
        inner, *outer = re.split("[:,]outer=", self.compression, maxsplit=1)
        inner_spec, _ = expand(self.parallelism.name, inner, None)
        if not outer:
            return inner_spec, None
        outer_spec, _ = expand(self.parallelism.name, outer[0], None)
        return inner_spec, outer_spec

    @cached_property
    def compressor(self) -> GradientCompressor | None:
        """The gradients' compressor; None: uncompressed."""
        if self.hops[0] == "none":
            return None
        with refused_for(_COMPRESSION):
            return parse_gradient_compressor(self.hops[0])

    @property
    def gradient_codec(self) -> Codec | None:
        """The codec of the gradients; None where there is none, or a compressor that is no
        codec."""
        return getattr(self.compressor, "codec", None)

    @property
    def outer_codec(self) -> Codec | None:
        """The codec of the sums between optimizer instances; None: uncompressed."""
        if self.hops[1] is not None:
            return codec_of(self.hops[1], _OUTER)
        if self.gradient_codec is None:
            return None
        return self.gradient_codec.hops[1]

    @property
    def weight_codec(self) -> Codec | None:
        """The codec of the distributed optimizer's 16-bit weights; None: uncompressed."""
        spec = self.weights
        if spec is None:
            spec = _IMPLIED_WEIGHTS.get(self.hops[0])
        return codec_of(spec, _WEIGHTS)

    def resolved(self, args: Namespace) -> "DataParallelConfig":
        """These settings with the weights' codec spelled out: what ``compression`` implies where
        Megatron's arguments have weights that are gathered, which takes masters in fp32, and
        ``none`` elsewhere."""
        if self.weights is not None:
            return self
        # FSDP2 gathers the weights themselves, where an error would stay: only lossless is implied.
        if args.use_torch_fsdp2 and self.hops[0] != "none":
            return replace(self, weights="lossless")
        if args.use_distributed_optimizer and (args.bf16 or args.fp16):
            return replace(self, weights=_IMPLIED_WEIGHTS.get(self.hops[0], "none"))
        return replace(self, weights="none")

    def rules(self, start_iteration: int | None, train_iters: int | None = None) -> dict[str, Rule]:
        """The policy's rules; the codec of dp.gradient's is a ``GradientCompressor``."""
        gradient_start = start_iteration
        if gradient_start is None and self.compressor is not None:
            gradient_start = self.compressor.default_start_iteration(train_iters)
        rules = {}
        for traffic, codec, start in (
            ("dp.gradient", self.compressor, gradient_start),
            ("dp.outer", self.outer_codec, start_iteration),
            ("dp.weight", self.weight_codec, start_iteration),
        ):
            rules[traffic] = Rule(
                codec, self.min_bytes, start_iteration=start or 0, activations=False
            )
        return rules

    @staticmethod
    def ranks(args: Namespace) -> int:
        """Return how many ranks sum gradients: those of an expert's weights or of all others,
        whichever are more."""
        # Ranks of a sequence hold the same weights, so gradients are summed over them, too.
        dense = args.data_parallel_size * args.context_parallel_size
        if args.num_experts is None:
            return dense
        shared = args.expert_model_parallel_size * args.expert_tensor_parallel_size
        return max(dense, dense * args.tensor_model_parallel_size // shared)

    def check(self, args: Namespace) -> None:
        if not self.enabled:
            return
        in_graph = whole_iterations(args)
        refuse_arguments(args, _REFUSED, f"drop it or {_FLAG}")
        refuse_fp16(args, _COMPRESSION, (self.gradient_codec, self.outer_codec, self.weight_codec))
        if getattr(args, "use_layer_wise_distributed_optimizer", False):
            raise SettingError(
                "args.optimizer",
                args.optimizer,
                f"with {argument('use_distributed_optimizer')} sends whole gradients and weights "
                "instead of shards",
                f"drop {argument('use_distributed_optimizer')} or {_FLAG}",
            )
        self.check_instances(args.num_distributed_optimizer_instances)
        # Another axis of ranks that share weights.
        if getattr(args, "gtp_weight_remat_size", 1) > 1:
            raise SettingError(
                "args.tensor_parallel_num_weight_shards",
                None,
                "spreads data-parallel ranks over another group as well, which is not covered",
                f"drop it or {_FLAG}",
            )
        if in_graph:
            self._check_captured(args)
        if args.use_torch_fsdp2:
            if args.cuda_graph_impl != "none":
                raise SettingError(
                    "args.cuda_graph_impl",
                    args.cuda_graph_impl,
                    f"replays what the host decides under {argument('use_torch_fsdp2')}",
                    f"drop it or {_FLAG}",
                )
            self.check_fsdp2()
        elif self.weight_codec is not None:  # of the distributed optimizer
            _check_weights(args)
        if self.compressor is not None and self.compressor.has_memory:
            _check_repeatable(self.compressor, args)
        check_memory(self.compressor, args)

    def check_wrapped(self, ddp_config: Any) -> None:
        """Refuse settings of a wrapped model that its gradients would get past the codec by.

        ``check`` has refused Megatron's flags for them already. A loop of one's own has no flags.

        Args:
            ddp_config: megatron-core's ``DistributedDataParallelConfig``.

        Raises: SettingError: one of them is set.
        """
        for name, field_name in DDP_FIELDS.items():
            if getattr(ddp_config, field_name, False):
                raise SettingError(f"args.{name}", None, _REFUSED[name], f"drop it or {_FLAG}")

    def check_fsdp2(self) -> None:
        """Refuse what cannot encode the weights and gradients that torch's FSDP2 sends.

        Raises: SettingError: a codec, or outer=, that is not for FSDP2.
        """
        self._refuse_outer("FSDP2")
        if isinstance(self.weight_codec, Sdp4bitCodec):
            raise SettingError(
                _WEIGHTS,
                self.weight_codec.name,
                ": SDP4Bit sends differences to the last weights, which FSDP2 frees after each use",
                "use lossless or int8",
            )
        if self.compressor is not None and self.compressor.lossless:
            raise SettingError(
                _COMPRESSION,
                self.compressor.name,
                ": under FSDP2 the host would wait in each layer's backward to see whether "
                "gradients fit",
                "use int8, or none",
            )

    def check_ddp(self) -> None:
        """Refuse what cannot encode the gradients of torch's DDP.

        Raises: SettingError: outer= is given.
        """
        self._refuse_outer("DDP")

    def _refuse_outer(self, wrapper: str) -> None:
        if self.hops[1] is not None:
            raise SettingError(
                _OUTER,
                self.hops[1],
                f"is for the distributed optimizer's instances, which {wrapper} does not have",
                "drop outer=",
            )

    def _check_captured(self, args: Namespace) -> None:
        """Refuse what the host decides in each iteration: a graph reduces gradients, and gathers
        the weights that overlap with the forward pass."""
        if self.compressor is not None and self.gradient_codec is None:
            raise SettingError(
                _COMPRESSION,
                self.compressor.name,
                f"may keep a state that a replay of {FULL_ITERATION} does not change",
                f"use a codec, or graphs of layers ({argument('cuda_graph_impl')} local)",
            )
        if self.weight_codec is not None and args.overlap_param_gather:
            overlap = argument("overlap_param_gather")
            raise SettingError(
                "args.cuda_graph_impl",
                "full_iteration",
                f"with {overlap} would add an update of the weights in each replay, also after a "
                "step that was skipped",
                f"drop {overlap}, or the weights of {_FLAG}",
            )

    def check_instances(self, instances: int) -> None:
        """Refuse an outer codec where there is one instance of the distributed optimizer.

        Raises: SettingError: outer= is given, and ``instances`` is 1.
        """
        if self.hops[1] is not None and instances == 1:
            raise SettingError(
                _OUTER,
                self.hops[1],
                "is for the sums between optimizer instances, and there is one",
                f"add {argument('num_distributed_optimizer_instances')} N, or drop outer=",
            )

    def describe(self) -> str:
        return self._description("weight updates")

    def _description(self, weights: str) -> str:
        """The line for the log; ``weights`` says what of the weights is sent."""
        clauses = ["gradients uncompressed"]
        if self.compressor is not None:
            clauses = [self.compressor.describe()]
        if self.weight_codec is None:
            clauses.append("weights uncompressed")
        else:
            clauses.append(f"{weights} {self.weight_codec.name}")
        return f"data parallelism: {'; '.join(clauses)}"

    def lines(self, args: Namespace) -> list[str]:
        if not self.enabled:
            return []
        if getattr(args, "skip_train", False):
            name = argument("skip_train")
            return [f"{_FLAG} has nothing to compress here: {name} sends no gradients"]
        if self.ranks(args) == 1:
            return [self.idle]
        if args.use_torch_fsdp2:  # it sends the weights themselves, and its sums have one hop
            return [self._description("weights")]
        lines = [self.describe()]
        instances = args.num_distributed_optimizer_instances
        if instances > 1:
            outer = "uncompressed" if self.outer_codec is None else self.outer_codec.name
            lines.append(
                f"sums of gradients between the {instances} optimizer instances: {outer} "
                "(outer=CODEC sets another codec)"
            )
        return lines


def _check_weights(args: Namespace) -> None:
    """Refuse compressed weights where none are gathered, or where their updates are out of
    reach."""
    # Without shards there is nothing to gather: every rank has all gradients, and updates all
    # weights.
    if not args.use_distributed_optimizer:
        raise SettingError(
            _WEIGHTS,
            None,
            "compresses the distributed optimizer's all-gather",
            f"add {argument('use_distributed_optimizer')}, or drop it: without one every rank "
            "updates all weights itself",
        )
    if not (args.bf16 or args.fp16):
        raise SettingError(
            _WEIGHTS,
            None,
            "needs fp32 masters separate from the weights that are sent",
            f"add {argument('bf16')} or {argument('fp16')}, or drop it",
        )
    fix = f"drop it or give none as {setting(_WEIGHTS)}"
    refuse_arguments(args, _REFUSED_WITH_WEIGHTS, fix)


def check_memory(compressor: GradientCompressor | None, settings: Any) -> None:
    """Refuse a compressor with a memory where the unit of gradients changes between iterations.

    Args:
        compressor: the gradients'; None is uncompressed.
        settings: Megatron's arguments, or a model's ``TransformerConfig``.

    Raises: SettingError: what it left out of one iteration would be added to another in a wrong
    unit.
    """
    if compressor is None or not compressor.has_memory:
        return
    refuse_arguments(
        settings,
        _CHANGES_UNIT,
        f"{compressor.name} adds to an iteration what the one before left out: drop it or {_FLAG}",
    )


def _check_repeatable(compressor: GradientCompressor, args: Namespace) -> None:
    """Refuse what would apply a memory twice, or lose it."""
    # --rerun-mode report_stats runs each iteration again, to compare: a memory would be used up by
    # the first.
    if args.rerun_mode == "report_stats":
        raise SettingError(
            "args.rerun_mode",
            "report_stats",
            f"runs every iteration twice, and {compressor.name} would lose what it left out the "
            "first time",
            "drop one of the two",
        )
    if args.save and args.use_torch_fsdp2:
        raise SettingError(
            _COMPRESSION,
            compressor.name,
            f"is not saved under {argument('use_torch_fsdp2')}",
            f"drop {argument('save')}",
        )
    if args.save and args.ckpt_format != "torch_dist":
        raise SettingError(
            _COMPRESSION,
            compressor.name,
            f"saves its memory with {argument('ckpt_format')} torch_dist, not {args.ckpt_format}",
            f"use it or drop {argument('save')}",
        )
