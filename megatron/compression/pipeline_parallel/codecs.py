"""The codecs between pipeline stages that the flags describe."""

from megatron.compression.codecs import MessageCodec, TacoCodec, TahQuantCodec, WholeMessage
from megatron.compression.pipeline_parallel.config import PipelineParallelCompression
from taco_kernels import CodecConfig
from taco_kernels.tah_quant import TahConfig


def forward_codec(settings: PipelineParallelCompression) -> MessageCodec | None:
    """For activations, from stage to stage; None: uncompressed.

    Raises:
        ValueError: a setting that the codec refuses.
    """
    if settings.pp_compression == "tah-quant":
        return TahQuantCodec(
            TahConfig(
                tile_size=settings.tah_tile_size,
                high_bits=settings.tah_high_bits,
                low_bits=settings.tah_low_bits,
                high_ratio=settings.tah_high_ratio,
                allocation=settings.tah_allocation,
                transform=settings.tah_transform,
            )
        )
    return _eight_bits(settings.pp_compression, settings)


def backward_codec(settings: PipelineParallelCompression) -> MessageCodec | None:
    """For the gradients that go back; None: uncompressed.

    TAH-Quant's is plain fixed point. Its scales are bf16, of fp32's range: gradients are often too small
    for fp16.

    Raises:
        ValueError: a setting that the codec refuses.
    """
    if settings.backward == "tah-quant":
        return _plain_integers(settings.tah_backward_bits, settings.tah_backward_tile_size)
    return _eight_bits(settings.backward, settings)


def describe_pipeline(settings: PipelineParallelCompression) -> str:
    """What the log says of the codecs."""
    backward = backward_codec(settings)
    line = f"pipeline stages send {forward_codec(settings).name}, back "
    line += backward.name if backward is not None else "uncompressed"
    return line + f", from iteration {settings.tah_start_iteration}" * (settings.tah_start_iteration > 0)


def _eight_bits(name: str, settings: PipelineParallelCompression) -> MessageCodec | None:
    if name == "none":
        return None
    if name == "int8":
        return _plain_integers(8, 128)
    return WholeMessage(
        TacoCodec(CodecConfig(format=settings.pp_taco_format, group_size=settings.pp_taco_group_size))
    )


def _plain_integers(bits: int, group_size: int) -> MessageCodec:
    config = CodecConfig(format=f"int{bits}", group_size=group_size, scales="single", hadamard=False)
    return WholeMessage(TacoCodec(config), f"fixed point int{bits} tile {group_size}")
