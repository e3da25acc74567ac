"""Codecs by name."""

from megatron.compression.codecs.base import Codec
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
]


def build_codec(name: str, **settings) -> Codec:
    """Build a codec.

    Args:
        name: ``taco`` or ``identity``.
        settings: for taco the fields of ``taco_kernels.CodecConfig`` (format, group_size, scales, ...).

    Raises:
        ValueError: an unknown name, or a setting the codec refuses.
    """
    if name == "taco":
        from taco_kernels import CodecConfig

        return TacoCodec(CodecConfig(**settings))
    if name == "identity":
        return IdentityCodec(**settings)
    raise ValueError(f"unknown codec {name!r}; choose taco or identity")
