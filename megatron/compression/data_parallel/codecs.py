"""From the settings to what compresses gradients and weights."""

from collections.abc import Callable

from megatron.compression.data_parallel.bucket import GradientBucket, GradientSync, WeightCodec
from megatron.compression.data_parallel.config import DataParallelCompression
from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from megatron.compression.data_parallel.gradients import CodedGradientSync, ExactGradientCodec
from megatron.compression.data_parallel.weights import ExactWeightCodec

GradientSyncFactory = Callable[[GradientBucket], GradientSync]


def data_parallel_codecs(
    settings: DataParallelCompression,
) -> tuple[GradientSyncFactory | None, WeightCodec | None]:
    """The factory of gradient syncs and the weight codec that the settings describe; None: uncompressed."""
    raise NotImplementedError(settings.dp_compression)


def exact_codecs(pieces: int = 1) -> tuple[GradientSyncFactory, WeightCodec]:
    """No compression, through the same hooks: the control."""
    codec = ExactGradientCodec()

    def build(bucket: GradientBucket) -> CodedGradientSync:
        return CodedGradientSync(bucket, codec, codec, pieces, ErrorFeedback())

    return build, ExactWeightCodec()
