"""Settings of data parallelism: how gradients and weights are sent, and what Megatron's flags allow."""

import re
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron.compression.codecs import Codec
from megatron.compression.codecs.recipes import expand
from megatron.compression.codecs.sdp4bit import Sdp4bitCodec
from megatron.compression.communication.policy import Rule
from megatron.compression.data_parallel.codec_gradients import parse_gradient_compressor
from megatron.compression.data_parallel.compressor import GradientCompressor
from megatron.compression.dimension import DimensionConfig, codec_of, refuse_flags, refuse_fp16
from megatron.compression.errors import CompressionConfigError, naming
from megatron.compression.graphs import FULL, whole_iterations

# Megatron's flag -> why its gradients or weights do not pass through a bucket group that we know
_REFUSED = {
    "use_megatron_fsdp": "communicates inside its own buffers (--use-torch-fsdp2 is supported)",
    "fp8_param_gather": "gathers fp8 weights already",
    "fp4_param_gather": "gathers fp4 weights already",
    "reuse_grad_buf_for_mxfp8_param_ag": "gathers weights through the gradients' buffer",
    "overlap_param_gather_with_optimizer_step": "gathers weights in the middle of the optimizer's step",
    "ddp_reduce_scatter_with_fp32_accumulation": "has its own reduce-scatter; ours sums in fp32 too",
    "nccl_ub": "registers the buffers that its own collectives use",
}


_WEIGHTS = {"sdp4bit": "sdp4bit:intra=4,group=2048,hadamard=off", "lossless": "lossless"}
"""``--dp-compression`` without settings -> how it compresses the distributed optimizer's weights, too
(sdp4bit: as in arXiv 2410.15526)."""


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig(DimensionConfig):
    """Compression of the gradients and weights that data parallelism sends."""

    flag: ClassVar[str] = "--dp-compression"
    idle: ClassVar[str] = (
        "--dp-compression has no effect here: with one data-parallel rank nothing is sent"
    )

    compression: str = "none"
    """Codec of the gradients, a gradient compressor such as tagc, or the recipe gradients-4bit; none =
    uncompressed. sdp4bit and lossless without settings compress the distributed optimizer's weights as
    well. The last setting may be outer=CODEC, as in sdp4bit:outer=int8 or none:outer=int4: that of the sums
    between the instances of --num-distributed-optimizer-instances; by default a codec's second hop, and
    none for a gradient compressor."""

    weights: str | None = None
    """Codec of the change of the weights that the distributed optimizer gathers; by default what
    ``compression`` says alone. Under FSDP2 of the weights themselves; by default lossless."""

    node_size: int | None = None
    """Data-parallel ranks that count as one node, in the order of the ranks; by default the real nodes.
    Splits one host into several nodes for a trial."""

    def validate(self) -> None:
        if self.node_size is not None and self.node_size < 1:
            raise CompressionConfigError(
                f"DataParallelConfig.node_size {self.node_size} must be at least 1"
            )
        for flag, codec in (
            (self.flag, getattr(self.compressor, "codec", None)),
            (f"{self.flag} outer=", self.outer_codec),
            (f"{self.flag} WEIGHTS", self.weight_codec),
        ):
            if codec is not None and codec.sees_shape:
                raise CompressionConfigError(
                    f"{flag} {codec.name} needs tokens and channels, not a bucket's; use int8"
                )

    @property
    def specs(self) -> tuple[str | None, str | None]:
        return self.compression, self.weights

    @property
    def hops(self) -> tuple[str, str | None]:
        """``compression`` without its outer=, which is the other; None: not given."""
        inner, *outer = re.split("[:,]outer=", self.compression, maxsplit=1)
        return expand(self.flag, inner, None)[0], (
            expand(self.flag, outer[0], None)[0] if outer else None
        )

    @property
    def compressor(self) -> GradientCompressor | None:
        """A new instance of the gradients' compressor; None: uncompressed."""
        if self.hops[0] == "none":
            return None
        with naming(self.flag):
            return parse_gradient_compressor(self.hops[0])

    @property
    def outer_codec(self) -> Codec | None:
        """Of the sums between optimizer instances; None: uncompressed."""
        if self.hops[1] is not None:
            return codec_of(self.hops[1], f"{self.flag} outer=")
        codec = getattr(self.compressor, "codec", None)
        return codec and codec.hops[1]

    @property
    def weight_codec(self) -> Codec | None:
        """Of the distributed optimizer's 16-bit weights; None: uncompressed."""
        spec = _WEIGHTS.get(self.hops[0], "none") if self.weights is None else self.weights
        return codec_of(spec, "--dp-compression WEIGHTS")

    def resolved(self, args: Namespace) -> "DataParallelConfig":
        """With the weights' codec spelled out, which there is where there are masters."""
        if self.weights is not None:
            return self
        if args.use_torch_fsdp2 and self.hops[0] != "none":
            return replace(self, weights="lossless")
        sharded = args.use_distributed_optimizer and (args.bf16 or args.fp16)
        return replace(self, weights=_WEIGHTS.get(self.hops[0], "none") if sharded else "none")

    def rules(self, start_iteration: int | None, train_iters: int | None = None) -> dict[str, Rule]:
        """The codec of dp.gradient's rule is a ``GradientCompressor``."""
        compressor, start = self.compressor, start_iteration
        if start is None and compressor is not None:
            start = compressor.default_start_iteration(train_iters)
        return {
            "dp.gradient": Rule(
                compressor, self.min_bytes, start_iteration=start or 0, activations=False
            ),
            **{
                traffic: Rule(
                    codec, self.min_bytes, start_iteration=start_iteration or 0, activations=False
                )
                for traffic, codec in (
                    ("dp.outer", self.outer_codec),
                    ("dp.weight", self.weight_codec),
                )
            },
        }

    @staticmethod
    def ranks(args: Namespace) -> int:
        """Of an expert, or of everything else, whichever are more."""
        dense = args.data_parallel_size * args.context_parallel_size
        if args.num_experts is None:
            return dense
        shared = args.expert_model_parallel_size * args.expert_tensor_parallel_size
        return max(dense, dense * args.tensor_model_parallel_size // shared)

    def check(self, args: Namespace) -> None:
        if not self.enabled:
            return
        refuse_flags(args, _REFUSED, "drop it or --dp-compression")
        gradients = getattr(self.compressor, "codec", None)
        refuse_fp16(args, self.flag, (gradients, self.outer_codec, self.weight_codec))
        if getattr(args, "use_layer_wise_distributed_optimizer", False):
            raise CompressionConfigError(
                f"--optimizer {args.optimizer} with --use-distributed-optimizer gathers whole parameters "
                "instead of shards; drop --use-distributed-optimizer or --dp-compression"
            )
        self.check_instances(args.num_distributed_optimizer_instances)
        if getattr(args, "gtp_weight_remat_size", 1) > 1:
            raise CompressionConfigError(
                "--tensor-parallel-num-weight-shards spreads data-parallel ranks over another group as well, "
                "which is not covered; drop it or --dp-compression"
            )
        if whole_iterations(args):
            self._check_captured(args)
        if args.use_torch_fsdp2:
            if args.cuda_graph_impl != "none":
                raise CompressionConfigError(
                    f"--cuda-graph-impl {args.cuda_graph_impl} replays what the host decides under "
                    "--use-torch-fsdp2; drop it or --dp-compression"
                )
            self.check_fsdp2()
        elif self.weight_codec is not None:
            _check_weights(args)
        check_memory(self.compressor, args)
        if self.compressor is not None and self.compressor.has_memory:
            _check_repeatable(self.compressor, args)

    def check_fsdp2(self) -> None:
        """Raises: CompressionConfigError: a codec that cannot encode what torch's FSDP2 sends."""
        if self.hops[1] is not None:
            raise CompressionConfigError(
                f"--dp-compression outer={self.hops[1]} is for the distributed optimizer's instances, which "
                "FSDP2 does not have; drop outer="
            )
        if isinstance(self.weight_codec, Sdp4bitCodec):
            raise CompressionConfigError(
                f"--dp-compression WEIGHTS {self.weight_codec.name}: SDP4Bit sends differences to the last "
                "weights, which FSDP2 frees after each use; use lossless or int8"
            )
        if self.compressor is not None and self.compressor.lossless:
            raise CompressionConfigError(
                f"--dp-compression {self.compressor.name}: under FSDP2 the host would wait in each layer's "
                "backward to see whether gradients fit; use int8, or none"
            )

    def _check_captured(self, args: Namespace) -> None:
        """Refuse what the host decides in each iteration: a graph reduces gradients, and gathers the weights
        that overlap with the forward pass."""
        if self.compressor is not None and getattr(self.compressor, "codec", None) is None:
            raise CompressionConfigError(
                f"{self.flag} {self.compressor.name} may keep a state that a replay of {FULL} does not "
                "change; use a codec, or graphs of layers (--cuda-graph-impl local)"
            )
        if self.weight_codec is not None and args.overlap_param_gather:
            raise CompressionConfigError(
                f"{FULL} with --overlap-param-gather would add an update of the weights in each replay, also "
                f"after a step that was skipped; drop --overlap-param-gather, or the weights of {self.flag}"
            )

    def check_instances(self, instances: int) -> None:
        """Raises: CompressionConfigError: an outer codec, and one instance of the distributed optimizer."""
        if self.hops[1] is not None and instances == 1:
            raise CompressionConfigError(
                f"--dp-compression outer={self.hops[1]} is for the sums between optimizer instances, and "
                "there is one; add --num-distributed-optimizer-instances N, or drop outer="
            )

    def describe(self) -> str:
        compressor, weights = self.compressor, self.weight_codec
        parts = ["weights uncompressed" if weights is None else f"weight changes {weights.name}"]
        parts.append("gradients uncompressed" if compressor is None else compressor.describe())
        return f"data parallelism uses {self.compression}: {'; '.join(parts)}"

    def lines(self, args: Namespace) -> list[str]:
        if self.enabled and getattr(args, "skip_train", False):
            return [f"{self.flag} has nothing to compress here: --skip-train sends no gradients"]
        lines = super().lines(args)
        if args.use_torch_fsdp2:  # it sends the weights themselves, and its sums have one hop
            return [line.replace("weight changes", "weights") for line in lines]
        instances = args.num_distributed_optimizer_instances
        if lines and instances > 1:
            codec = self.outer_codec
            lines.append(
                f"sums of gradients between the {instances} optimizer instances: "
                f"{'uncompressed' if codec is None else codec.name} (outer=CODEC sets another codec)"
            )
        return lines


def _check_weights(args: Namespace) -> None:
    if not args.use_distributed_optimizer:
        raise CompressionConfigError(
            "--dp-compression WEIGHTS compresses the distributed optimizer's all-gather; add "
            "--use-distributed-optimizer, or drop it: without one every rank updates all weights itself"
        )
    if not (args.bf16 or args.fp16):
        raise CompressionConfigError(
            "--dp-compression WEIGHTS needs fp32 masters separate from the weights that are sent; add "
            "--bf16 or --fp16, or drop it"
        )
    reasons = {
        "use_precision_aware_optimizer": "writes the weights inside its own kernel, where the difference to "
        "the old ones is lost",
        "optimizer_cuda_graph": "replays the optimizer's step, in which the host computes the "
        "difference of the weights",
    }
    refuse_flags(args, reasons, "drop it or give none as the second value of --dp-compression")


def check_memory(compressor: GradientCompressor | None, settings: Any) -> None:
    """Raises: CompressionConfigError: a memory of gradients whose unit changes between iterations, by
    Megatron's arguments or a model's ``TransformerConfig``."""
    if compressor is None or not compressor.has_memory:
        return
    reasons = {
        "calculate_per_token_loss": "divides gradients by an iteration's tokens after they are reduced",
        "fp16": "changes the loss scale",
    }
    fix = f"{compressor.name} adds to an iteration what the one before left out: drop it or --dp-compression"
    refuse_flags(settings, reasons, fix)


def _check_repeatable(compressor: GradientCompressor, args: Namespace) -> None:
    """Refuse what would apply a memory twice, or lose it."""
    if args.rerun_mode == "report_stats":
        raise CompressionConfigError(
            f"--rerun-mode report_stats runs every iteration twice, and {compressor.name} would lose what it "
            "left out the first time; drop one of the two"
        )
    if args.save and args.use_torch_fsdp2:
        raise CompressionConfigError(
            f"--dp-compression {compressor.name} is not saved under --use-torch-fsdp2; drop --save"
        )
    if args.save and args.ckpt_format != "torch_dist":
        raise CompressionConfigError(
            f"--dp-compression {compressor.name} saves its memory with --ckpt-format torch_dist, not "
            f"{args.ckpt_format}; use it or drop --save"
        )
