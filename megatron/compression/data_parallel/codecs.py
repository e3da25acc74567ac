"""From the settings to what compresses gradients and weights."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from megatron.compression.data_parallel.bucket import GradientBucket, GradientSync, WeightCodec
from megatron.compression.data_parallel.config import DataParallelCompression
from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from megatron.compression.data_parallel.gradients import CodedGradientSync, ExactGradientCodec
from megatron.compression.data_parallel.sdp4bit import (
    DifferenceWeightCodec,
    ErrorStore,
    GroupGradientCodec,
    PlainWeightCodec,
)
from megatron.compression.data_parallel.tagc import TagcGradientSync
from megatron.compression.data_parallel.tagc_config import parse_tagc_layers
from megatron.compression.data_parallel.tagc_monitor import TagcMonitor
from megatron.compression.data_parallel.tagc_parts import TagcSettings
from megatron.compression.data_parallel.weights import ExactWeightCodec
from taco_kernels.homomorphic import EXACT_LOAD, SketchConfig
from taco_kernels.sdp4bit import GroupFormat

GradientSyncFactory = Callable[[GradientBucket], GradientSync]


def data_parallel_codecs(
    settings: DataParallelCompression,
) -> tuple[GradientSyncFactory | None, WeightCodec | None]:
    """The factory of gradient syncs and the weight codec that the settings describe; None: uncompressed.

    Args:
        settings: ``resolved``, so that nothing stands for its parts any more.
    """
    gradients = None
    if settings.dp_compression == "tagc":
        gradients = TagcGradients(settings)
    elif settings.quantized_gradients:
        gradients = sdp4bit_gradients(settings)
    weights = None
    if settings.quantized_weights:
        kind = DifferenceWeightCodec if settings.weight_difference else PlainWeightCodec
        weights = kind(GroupFormat(settings.weight_quantization_bits, settings.wq_group_size))
    return gradients, weights


PIECES = 8
"""Of a bucket where there is an exchange inside nodes and one between them."""


def sdp4bit_gradients(settings: DataParallelCompression) -> GradientSyncFactory:
    """Builds SDP4Bit's gradient sums."""
    hadamard = settings.hadamard_transform
    intra = GroupGradientCodec(
        GroupFormat(settings.gradient_quantization_bits_intra, settings.gq_group_size_intra, hadamard)
    )
    inter = GroupGradientCodec(
        GroupFormat(settings.gradient_quantization_bits_inter, settings.gq_group_size_inter, hadamard)
    )

    def build(bucket: GradientBucket) -> CodedGradientSync:
        # with one exchange inside or between nodes there is no other link to use meanwhile
        pieces = settings.gradient_alltoall_pipeline or (PIECES if bucket.topology.two_hops else 1)
        return CodedGradientSync(bucket, intra, inter, pieces, error_feedback(settings))

    return build


class TagcGradients:
    """Builds TAGC's gradient sums.

    Args:
        settings: ``resolved``.
    """

    def __init__(self, settings: DataParallelCompression) -> None:
        self.monitor = TagcMonitor()
        """Of all buckets; the reporter reads it."""
        self._said = False
        self._flags = settings.resolved(False)
        self.layers = parse_tagc_layers(settings.tagc_layers)

    def __call__(self, bucket: GradientBucket) -> TagcGradientSync:
        flags = self._flags
        sketch = self.sketch(bucket) if flags.tagc_wire == "sketch" else SketchConfig()
        keep = 1 - flags.tagc_sparsity
        settings = TagcSettings(keep, self.layers, flags.tagc_wire, sketch, flags.tagc_bits)
        return TagcGradientSync(bucket, settings, partial(error_feedback, self._flags), self.monitor)

    def sketch(self, bucket: GradientBucket) -> SketchConfig:
        """With room for the union of the ranks' choices, were they independent; said once."""
        flags, ranks = self._flags, bucket.topology.world_size
        union = 1 - flags.tagc_sparsity**ranks
        sketch = SketchConfig(flags.tagc_sketch_ratio or EXACT_LOAD / union, cell_bits=flags.tagc_bits)
        bits, own = sketch.cell_bits / sketch.ratio + 1, 8 * bucket.gradients.element_size()
        if not self._said and dist.get_rank() == 0:
            line = f" compression: tagc: sketches of {ranks} ranks, {sketch.ratio:.2f} values a cell"
            line += f", {bits:.2f} bits a value"
            if bits >= own:
                line += f", which is more than the {own} of a gradient: take --tagc-wire packed, or raise "
                line += "--tagc-sparsity or --tagc-sketch-ratio"
            print(line, flush=True)
        self._said = True
        return sketch

    def describe(self) -> str:
        """For the log."""
        flags = self._flags
        line = (
            f"each rank leaves out {flags.tagc_sparsity:g} of its gradients of "
            f"{' and '.join(sorted(self.layers))}; the others travel "
        )
        line += "as sketches" if flags.tagc_wire == "sketch" else f"packed, {flags.tagc_bits} bits each"
        if flags.gradients_start_iteration:
            line += f", from iteration {flags.gradients_start_iteration}"
        return line


def describe_data_parallel(settings: DataParallelCompression) -> str:
    """For the log: what travels how."""
    parts = []
    if settings.quantized_weights:
        what = "weight differences" if settings.weight_difference else "weights"
        parts.append(f"{what} int{settings.weight_quantization_bits} group {settings.wq_group_size}")
    if settings.quantized_gradients:
        line = (
            f"gradients int{settings.gradient_quantization_bits_intra} group {settings.gq_group_size_intra} "
            f"inside a node, int{settings.gradient_quantization_bits_inter} group "
            f"{settings.gq_group_size_inter} between nodes"
        )
        line += " after a Hadamard transform" if settings.hadamard_transform else ""
        if settings.gradients_start_iteration:
            line += f", from iteration {settings.gradients_start_iteration}"
        parts.append(line)
    if settings.dp_compression == "tagc":
        parts.append(TagcGradients(settings).describe())
    if settings.dp_error_feedback != "none":
        parts.append(f"error feedback in {settings.dp_error_feedback}")
    return f"data parallelism uses {settings.dp_compression}: {'; '.join(parts)}"


def error_feedback(settings: DataParallelCompression) -> ErrorFeedback | None:
    """What ``--dp-error-feedback`` asks for, one a bucket; usable with any gradient codec."""
    if settings.dp_error_feedback == "none":
        return None
    store = ErrorStore() if settings.dp_error_feedback == "int8" else None
    return ErrorFeedback(settings.dp_error_feedback_average, store)


def exact_codecs(pieces: int = 1) -> tuple[GradientSyncFactory, WeightCodec]:
    """No compression, through the same hooks: the control."""
    codec = ExactGradientCodec()

    def build(bucket: GradientBucket) -> CodedGradientSync:
        return CodedGradientSync(bucket, codec, codec, pieces, ErrorFeedback())

    return build, ExactWeightCodec()
