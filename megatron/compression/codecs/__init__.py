"""Codecs by name."""

from megatron.compression.codecs.base import Codec, hop_codecs
from megatron.compression.codecs.identity import IdentityCodec
from megatron.compression.codecs.message import MessageCodec, WholeMessage
from megatron.compression.codecs.normalized import NormalizedMessage
from megatron.compression.codecs.taco import TacoCodec
from megatron.compression.codecs.tah_quant import TahQuantCodec

__all__ = [
    "Codec",
    "IdentityCodec",
    "MessageCodec",
    "NormalizedMessage",
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
            format and the rounding may name two, ``int6,int8``: for the first hop and the second.

    Raises:
        ValueError: an unknown name, or a setting the codec refuses.
    """
    if name == "taco":
        from taco_kernels import CodecConfig

        hops = [{}, {}]
        for name in ("format", "rounding"):
            first, _, second = settings.pop(name, getattr(CodecConfig, name)).partition(",")
            hops[0][name], hops[1][name] = first, second or first
        first, second = (CodecConfig(**settings, **hop) for hop in hops)
        return TacoCodec(first, second if second != first else None)
    if name == "identity":
        return IdentityCodec(**settings)
    raise ValueError(f"unknown codec {name!r}; choose taco or identity")
