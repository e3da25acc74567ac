"""Settings of data-parallel compression; the flags are generated from the fields."""

import argparse
import math
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron.compression.config_errors import CompressionConfigError, changed_flags, flag_name
from megatron.compression.data_parallel.tagc_config import check_tagc, default_warmup

BITS = (4, 8)
GROUP_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)


def _switch(name: str) -> dict:
    """A field with both ``--name`` and ``--no-name``."""
    return {"argparse_meta": {"arg_names": [flag_name(name)], "action": argparse.BooleanOptionalAction}}


@dataclass(frozen=True, kw_only=True)
class DataParallelCompression:
    """Compression of the gradients and weights that data parallelism sends.

    The defaults below ``dp_compression`` are the settings of the SDP4Bit paper (arXiv 2410.15526), and the
    names those of its authors.
    """

    dp_compression: Literal["none", "sdp4bit", "tagc"] = "none"
    """Compression of data-parallel traffic: sdp4bit = 4-bit weight differences, and gradients in 8 bits
    inside a node and 4 bits between nodes. Alone it means --quantized-weights (with
    --use-distributed-optimizer) and --quantized-gradients. tagc = the largest gradients only, with error
    feedback; --quantized-weights can be added."""

    quantized_weights: bool = False
    """SDP4Bit: gather the quantised difference between the updated and the current weights instead of the
    weights. Needs --use-distributed-optimizer and --bf16 or --fp16."""

    weight_quantization_bits: int = 4
    """Bits of a weight difference: 4 or 8."""

    wq_group_size: int = 2048
    """Weights that share one fp32 scale: a power of two from 64 to 4096."""

    weight_difference: bool = field(default=True, metadata=_switch("weight_difference"))
    """Quantise the difference to the current weights; --no-weight-difference quantises the weights
    themselves, the control that shows what the difference is for."""

    quantized_gradients: bool = False
    """SDP4Bit: quantise gradients, once inside each node and once between nodes."""

    gradient_quantization_bits_intra: int = 8
    """Bits of a gradient inside a node: 4 or 8. On one node it is the only exchange."""

    gq_group_size_intra: int = 128
    """Gradient values that share one fp32 scale inside a node: a power of two from 64 to 4096."""

    gradient_quantization_bits_inter: int = 4
    """Bits of a gradient between nodes: 4 or 8."""

    gq_group_size_inter: int = 128
    """Gradient values that share one fp32 scale between nodes: a power of two from 64 to 4096."""

    hadamard_transform: bool = field(default=True, metadata=_switch("hadamard_transform"))
    """Rotate every 32 gradient values by a Hadamard transform before quantising them, so that one outlier
    does not decide its group's grid."""

    gradient_alltoall_pipeline: int = 0
    """Pieces in which a bucket's gradients travel, so that the exchange between nodes runs behind the one
    inside the node; 0 takes 8 where there are both, else 1. Small buckets take fewer."""

    gradients_quantization_start_iteration: int | None = None
    """Iterations whose gradients go uncompressed before their compression starts; by default none with
    sdp4bit, and with tagc a fifth of --train-iters, at most 1000."""

    dp_intra_node_size: int | None = None
    """Data-parallel ranks that count as one node, in the order of the ranks; by default the real topology, by
    LOCAL_WORLD_SIZE or the hosts' names. Splits one host into several nodes for a trial."""

    dp_communicators: int = 0
    """Communicators that carry each payload that crosses nodes (or that of the only exchange), gradients'
    and weights', a share on each: one alone does not fill a TCP link. 0 takes 2 where the links are TCP and 1
    elsewhere."""

    dp_error_feedback: Literal["none", "fp32", "int8"] = "none"
    """Remember what the compression of a gradient lost and add it to the next one: fp32, or int8 (LoCo's
    moving average in 8 bits). That of the exchange between nodes, or of the only one, and of the sum that
    ranks without the distributed optimizer gather; not that of the 8 bits inside a node before the exchange
    between nodes. Saved in checkpoints: 4 bytes a parameter and rank. With tagc fp32 is the default, and it
    cannot be left out."""

    dp_error_feedback_average: float = 1.0
    """Weight of the newest error in the moving average that error feedback keeps, in (0, 1]. 1 keeps the
    newest error only, and so nothing is ever lost; LoCo takes less."""

    tagc_sparsity: float = 0.8
    """TAGC: share of its gradients that a rank leaves out of an iteration, from 0.5 to 0.98: the smallest,
    which wait in error feedback."""

    tagc_wire: Literal["packed", "sketch"] = "packed"
    """TAGC: how the values travel: packed = end to end with a bitmap, exact at any density and a third of the
    sketch's bytes at 0.8 and 4 ranks; sketch = the paper's, whose sums need no decoding."""

    tagc_layers: str = "mlp,embedding"
    """TAGC: weight matrices whose gradients are compressed: mlp, embedding (with the output layer),
    attention, separated by commas, or all. The others go uncompressed, and so do biases and norms."""

    tagc_sketch_ratio: float | None = None
    """TAGC: gradient values a cell of --tagc-wire sketch; by default what the union of the ranks' choices
    needs to be recovered exactly if they are independent: 1.3 for 4 ranks at 0.8. With a larger one the ranks
    agree on sending fewer values, as many as their union has room for."""

    tagc_bits: int = 16
    """TAGC: bits of a cell of the sketch (16, 32) or of a packed value (8, 16, 32): precision of what is
    sent, counted from the largest of 1024 neighbours, less log2 of the ranks in a sketch. Error feedback
    keeps the rest."""

    def __post_init__(self) -> None:
        for name in (
            "weight_quantization_bits",
            "gradient_quantization_bits_intra",
            "gradient_quantization_bits_inter",
        ):
            if getattr(self, name) not in BITS:
                raise CompressionConfigError(f"{flag_name(name)} {getattr(self, name)} must be 4 or 8")
        for name in ("wq_group_size", "gq_group_size_intra", "gq_group_size_inter"):
            if getattr(self, name) not in GROUP_SIZES:
                raise CompressionConfigError(
                    f"{flag_name(name)} {getattr(self, name)} is not possible; it must be a power of two "
                    f"from 64 to 4096: {', '.join(map(str, GROUP_SIZES))}"
                )
        for name, lowest in (
            ("gradient_alltoall_pipeline", 0),
            ("gradients_quantization_start_iteration", 0),
            ("dp_intra_node_size", 1),
            ("dp_communicators", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise CompressionConfigError(f"{flag_name(name)} {value} must be an integer >= {lowest}")
        average = self.dp_error_feedback_average
        if not (math.isfinite(average) and 0 < average <= 1):
            raise CompressionConfigError(f"--dp-error-feedback-average {average} must lie in (0, 1]")
        if average != 1 and self.dp_error_feedback == "none":
            raise CompressionConfigError(
                "--dp-error-feedback-average given without --dp-error-feedback fp32 or int8"
            )
        check_tagc(self)
        if not self.enabled and (idle := changed_flags(self)):
            raise CompressionConfigError(
                f"{', '.join(idle)} given, but data-parallel compression is off; add --dp-compression sdp4bit"
            )

    @property
    def enabled(self) -> bool:
        """Whether any data-parallel traffic is to be compressed."""
        return self.dp_compression != "none"

    @property
    def gradients_start_iteration(self) -> int:
        """The first iteration whose gradients are compressed, counted from 0."""
        return self.gradients_quantization_start_iteration or 0

    def resolved(
        self, use_distributed_optimizer: bool, train_iters: int | None = None
    ) -> "DataParallelCompression":
        """What ``--dp-compression`` alone leaves to be understood, spelled out: parts, feedback, warm-up.

        Args:
            use_distributed_optimizer: whether there are weights to gather.
            train_iters: how long the run is; None, unknown, means no warm-up unless one is asked for.
        """
        if self.dp_compression == "tagc":
            feedback, start = self.dp_error_feedback, self.gradients_quantization_start_iteration
            if start is None:
                start = default_warmup(train_iters)
            feedback = "fp32" if feedback == "none" else feedback
            return replace(self, dp_error_feedback=feedback, gradients_quantization_start_iteration=start)
        if self.dp_compression != "sdp4bit" or self.quantized_weights or self.quantized_gradients:
            return self
        return replace(self, quantized_weights=use_distributed_optimizer, quantized_gradients=True)
