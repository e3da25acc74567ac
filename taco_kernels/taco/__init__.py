"""TACO's codec (arXiv 2604.24088): groups of values, transformed, scaled, rounded to fp8 or integers."""

from taco_kernels.taco.layout import FORMATS, GROUP_SIZES, SCALES, CodecConfig
from taco_kernels.taco.ops import decode, decode_sum, decode_sum_encode, encode

__all__ = [
    "FORMATS",
    "GROUP_SIZES",
    "SCALES",
    "CodecConfig",
    "decode",
    "decode_sum",
    "decode_sum_encode",
    "encode",
]
