"""TACO's codec as device code of its own: needs torch and triton, knows nothing of Megatron.

``encode``, ``decode``, ``decode_sum`` and ``decode_sum_encode`` run fused Triton kernels on CUDA tensors and
the plain-torch definition in ``reference.py`` on CPU tensors; both use the same wire format (``layout.py``).
"""

from taco_kernels.layout import FORMATS, GROUP_SIZES, ROUNDINGS, SCALES, CodecConfig, Stream
from taco_kernels.ops import decode, decode_sum, decode_sum_encode, encode

__all__ = [
    "FORMATS",
    "GROUP_SIZES",
    "ROUNDINGS",
    "SCALES",
    "CodecConfig",
    "Stream",
    "decode",
    "decode_sum",
    "decode_sum_encode",
    "encode",
]
