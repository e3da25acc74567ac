"""Settings of data parallelism: how gradients and weights travel, and what Megatron's flags allow."""

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron.compression.codecs import Codec
from megatron.compression.communication.policy import Rule
from megatron.compression.data_parallel.compressor import GradientCompressor, parse_gradient_compressor
from megatron.compression.data_parallel.error_feedback import parse_error_feedback
from megatron.compression.data_parallel.presets import PRESETS
from megatron.compression.dimension import (
    Dimension,
    codec_of,
    refuse_cuda_graphs,
    refuse_flags,
    refuse_fp16,
)
from megatron.compression.errors import CompressionConfigError, naming

# Megatron's flag -> why its gradients or weights do not pass through a bucket group that we know
_REFUSED = {
    "use_megatron_fsdp": "communicates inside its own buffers",
    "use_torch_fsdp2": "communicates inside torch",
    "fp8_param_gather": "gathers fp8 weights already",
    "fp4_param_gather": "gathers fp4 weights already",
    "reuse_grad_buf_for_mxfp8_param_ag": "gathers weights through the gradients' buffer",
    "overlap_param_gather_with_optimizer_step": "gathers weights in the middle of the optimizer's step",
    "ddp_reduce_scatter_with_fp32_accumulation": "has its own reduce-scatter; ours sums in fp32 too",
    "nccl_ub": "registers the buffers that its own collectives use",
}


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig(Dimension):
    """Compression of the gradients and weights that data parallelism sends."""

    flag: ClassVar[str] = "--dp-compression"
    idle: ClassVar[str] = (
        "--dp-compression has no effect here: there is one data-parallel rank, and so nothing to send"
    )

    compression: str = "none"
    """Codec of the gradients, a gradient compressor such as tagc, or the recipe gradients-4bit; none =
    uncompressed. sdp4bit, lossless and zero++ alone compress the distributed optimizer's weights as well;
    loco and zero++ are presets."""

    weights: str | None = None
    """Codec of the change of the weights that the distributed optimizer gathers; by default what
    ``compression`` says alone."""

    error_feedback: str | None = None
    """What the compression of a gradient lost is added to the next one: fp32, or int8 (LoCo), each with
    ``:average=A`` in (0, 1], the weight of the newest error, and ``reset=N``, iterations after which all is
    forgotten; none. By default the compressor's own choice.
    What is lost of the 8 bits inside a node before the exchange between nodes is not remembered."""

    node_size: int | None = None
    """Data-parallel ranks that count as one node, in the order of the ranks; by default the real nodes.
    Splits one host into several nodes for a trial."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.node_size is not None and self.node_size < 1:
            raise CompressionConfigError(
                f"DataParallelConfig.node_size {self.node_size} must be a number >= 1"
            )
        codec_of(self.weights, "--dp-compression WEIGHTS")
        parse_error_feedback(self.error_feedback or "none")
        compressor = self.compressor
        if compressor is None and self.feedback != "none":
            raise CompressionConfigError(
                f"--dp-error-feedback {self.feedback} given, but gradients are not compressed; add "
                "--dp-compression"
            )
        if getattr(compressor, "lossless", False) and self.feedback != "none":
            raise CompressionConfigError(
                f"--dp-error-feedback {self.feedback} has nothing to add to {self.compression}, which loses "
                "nothing; drop it"
            )
        if compressor is not None and self.feedback == "none" != compressor.default_error_feedback:
            raise CompressionConfigError(
                f"--dp-error-feedback none: {self.compression} would lose most of each gradient; drop it, or "
                "give fp32 or int8"
            )

    @property
    def specs(self) -> tuple[str | None, str | None]:
        return self.compression, self.weights

    @property
    def compressor(self) -> GradientCompressor | None:
        """A new instance of the gradients' compressor; None: uncompressed."""
        if self.compression == "none":
            return None
        with naming(self.flag):
            return parse_gradient_compressor(self.compression)

    @property
    def weight_codec(self) -> Codec | None:
        """Of the distributed optimizer's 16-bit weights; None: uncompressed."""
        return codec_of(self._weights, "--dp-compression WEIGHTS")

    @property
    def _weights(self) -> str:
        """``weights``, or what the compression's name means."""
        if self.weights is not None or self.compression not in PRESETS:
            return self.weights or "none"
        return PRESETS[self.compression].weights

    @property
    def feedback(self) -> str:
        """``error_feedback``, or the compressor's own choice."""
        if self.error_feedback is not None or self.compressor is None:
            return self.error_feedback or "none"
        preset = PRESETS.get(self.compression)
        return (preset and preset.error_feedback) or self.compressor.default_error_feedback

    def resolved(self, args: Namespace) -> "DataParallelConfig":
        """What is left to be understood, spelled out: weights and error feedback."""
        weights = self.weights
        if weights is None:
            sharded = args.use_distributed_optimizer and (args.bf16 or args.fp16)
            weights = self._weights if sharded else "none"
        return replace(self, weights=weights, error_feedback=self.feedback)

    def rules(self, start_iteration: int | None, train_iters: int | None = None) -> dict[str, Rule]:
        """For the policy. The codec of dp.gradient's rule is a ``GradientCompressor``.

        Args:
            start_iteration: the first iteration that compresses; None: the compressor's own choice.
        """
        compressor, start = self.compressor, start_iteration
        if start is None and compressor is not None:
            start = compressor.default_start_iteration(train_iters)
        return {
            "dp.gradient": Rule(compressor, self.min_bytes, start_iteration=start or 0, activations=False),
            "dp.weight": Rule(
                self.weight_codec, self.min_bytes, start_iteration=start_iteration or 0, activations=False
            ),
        }

    def check(self, args: Namespace) -> None:
        """Refuse what would leave traffic uncompressed without a word, or break training.

        Raises: CompressionConfigError: with the flag, the reason and the fix.
        """
        if not self.enabled:
            return
        refuse_flags(args, _REFUSED, "drop it or --dp-compression")
        gradients = getattr(self.compressor, "codec", None)
        refuse_fp16(args, self.flag, (gradients, self.weight_codec))
        if getattr(args, "use_layer_wise_distributed_optimizer", False):
            raise CompressionConfigError(
                f"--optimizer {args.optimizer} with --use-distributed-optimizer gathers whole parameters "
                "instead of shards; drop --use-distributed-optimizer or --dp-compression"
            )
        if args.num_distributed_optimizer_instances > 1:
            raise CompressionConfigError(
                "--num-distributed-optimizer-instances reduces gradients in two steps of its own; drop it, "
                "--dp-compression knows the nodes itself"
            )
        if getattr(args, "gtp_weight_remat_size", 1) > 1:
            raise CompressionConfigError(
                "--tensor-parallel-num-weight-shards spreads data-parallel ranks over another group as well, "
                "which is not covered; drop it or --dp-compression"
            )
        refuse_cuda_graphs(args, self.flag)
        if self.weight_codec is not None:
            _check_weights(args)
        if self.feedback != "none":
            _check_error_feedback(args)

    def describe(self) -> str:
        """For the log: what travels how."""
        compressor, weights = self.compressor, self.weight_codec
        parts = ["weights uncompressed" if weights is None else f"weight changes {weights.name}"]
        parts.append("gradients uncompressed" if compressor is None else compressor.describe())
        if self.feedback != "none":
            parts.append(f"error feedback in {self.feedback}")
        return f"data parallelism uses {self.compression}: {'; '.join(parts)}"


def _check_weights(args: Namespace) -> None:
    if not args.use_distributed_optimizer:
        raise CompressionConfigError(
            "--dp-compression WEIGHTS compresses the distributed optimizer's all-gather; add "
            "--use-distributed-optimizer, or drop it: without one every rank updates all weights itself"
        )
    if not (args.bf16 or args.fp16):
        raise CompressionConfigError(
            "--dp-compression WEIGHTS needs fp32 masters apart from the weights that are sent; add --bf16 or "
            "--fp16, or drop it"
        )
    reasons = {
        "use_precision_aware_optimizer": "writes the weights inside its own kernel, where the difference to "
        "the old ones is lost",
        "optimizer_cuda_graph": "replays the optimizer's step, where the host has to hand over the "
        "difference of the weights",
    }
    refuse_flags(args, reasons, "drop it or give none as the second value of --dp-compression")


def _check_error_feedback(args: Namespace) -> None:
    if args.rerun_mode == "report_stats":
        raise CompressionConfigError(
            "--rerun-mode report_stats runs every iteration twice, and error feedback would lose what the "
            "first time sent; drop it or error feedback"
        )
    if args.fp16:
        raise CompressionConfigError(
            "--dp-error-feedback remembers gradients in units of the loss scale, which --fp16 changes; use "
            "--bf16 or drop it"
        )
    if args.save and args.ckpt_format != "torch_dist":
        raise CompressionConfigError(
            f"--dp-error-feedback is saved with --ckpt-format torch_dist, not {args.ckpt_format}; use it or "
            "drop --dp-error-feedback"
        )
