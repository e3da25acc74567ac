"""The codecs between pipeline stages that the flags describe."""

from megatron.compression.codecs import (
    MessageCodec,
    NormalizedMessage,
    TacoCodec,
    TahQuantCodec,
    WholeMessage,
)
from megatron.compression.pipeline_parallel.config import PipelineParallelCompression
from taco_kernels import CodecConfig
from taco_kernels.tah_quant import TahConfig

INTEGERS = {"int8": (8, 128), "int6": (6, 64), "int5": (5, 64), "int4": (4, 64)}
"""Bits and values that share a scale."""


def forward_codec(settings: PipelineParallelCompression) -> MessageCodec | None:
    """For activations, from stage to stage; None: uncompressed.

    Raises:
        ValueError: a setting that the codec refuses.
    """
    if settings.forward == "tah-quant":
        codec = TahQuantCodec(
            TahConfig(
                tile_size=settings.tah_tile_size,
                high_bits=settings.tah_high_bits,
                low_bits=settings.tah_low_bits,
                high_ratio=settings.tah_high_ratio,
                allocation=settings.tah_allocation,
                transform=settings.tah_transform,
            )
        )
    else:
        codec = _fixed(settings.forward, settings, settings.pp_rounding)
    if codec is None or settings.pp_normalize == "none":
        return codec
    return NormalizedMessage(codec, scale=settings.pp_normalize == "standardize")


def backward_codec(settings: PipelineParallelCompression) -> MessageCodec | None:
    """For the gradients that go back; None: uncompressed.

    TAH-Quant's is plain fixed point. Its scales are bf16, of fp32's range: gradients are often too small
    for fp16.

    Raises:
        ValueError: a setting that the codec refuses.
    """
    if settings.backward == "tah-quant":
        return _plain_integers(
            settings.tah_backward_bits, settings.tah_backward_tile_size, settings.pp_backward_rounding
        )
    return _fixed(settings.backward, settings, settings.pp_backward_rounding)


def describe_pipeline(settings: PipelineParallelCompression) -> str:
    """What the log says of the codecs."""
    backward = backward_codec(settings)
    chosen = " (--pp-compression auto)" if settings.pp_compression == "auto" else ""
    line = f"pipeline stages send {forward_codec(settings).name}{chosen}, back "
    line += backward.name if backward is not None else "uncompressed"
    return line + f", from iteration {settings.tah_start_iteration}" * (settings.tah_start_iteration > 0)


def _fixed(name: str, settings: PipelineParallelCompression, rounding: str) -> MessageCodec | None:
    """The codecs that give all values as many bits."""
    if name == "none":
        return None
    if name in INTEGERS:
        bits, group_size = INTEGERS[name]
        if settings.pp_group_size is not None:
            group_size = settings.pp_group_size
        return _plain_integers(bits, group_size, rounding, settings.pp_scales)
    config = CodecConfig(
        format=settings.pp_taco_format, group_size=settings.pp_taco_group_size, rounding=rounding
    )
    return WholeMessage(TacoCodec(config))


def _plain_integers(bits: int, group_size: int, rounding: str, scales: str = "single") -> MessageCodec:
    config = CodecConfig(
        format=f"int{bits}", group_size=group_size, scales=scales, hadamard=False, rounding=rounding
    )
    label = f"fixed point int{bits} tile {group_size}" + ", signed scales" * (scales == "signed")
    return WholeMessage(
        TacoCodec(config), label if rounding == "nearest" else f"{label}, {rounding} rounding"
    )
