"""Codecs by name."""

from dataclasses import replace

from megatron.compression.codecs.base import Codec, hop_codecs
from megatron.compression.codecs.identity import IdentityCodec
from megatron.compression.codecs.message import MessageCodec, WholeMessage
from megatron.compression.codecs.taco import TacoCodec
from megatron.compression.codecs.tah_quant import TahQuantCodec

__all__ = [
    "Codec",
    "IdentityCodec",
    "MessageCodec",
    "TacoCodec",
    "TahQuantCodec",
    "WholeMessage",
    "build_codec",
    "hop_codecs",
]


def build_codec(name: str, **settings) -> Codec:
    """Build a codec.

    Args:
        name: ``taco`` or ``identity``.
        settings: for taco the fields of ``taco_kernels.CodecConfig`` (format, group_size, scales, ...); the
            format may name two, ``int6,int8``: of the first hop and of the second.

    Raises:
        ValueError: an unknown name, or a setting the codec refuses.
    """
    if name == "taco":
        from taco_kernels import CodecConfig

        first, _, second = settings.pop("format", CodecConfig.format).partition(",")
        config = CodecConfig(format=first, **settings)
        return TacoCodec(config, replace(config, format=second) if second not in ("", first) else None)
    if name == "identity":
        return IdentityCodec(**settings)
    raise ValueError(f"unknown codec {name!r}; choose taco or identity")
