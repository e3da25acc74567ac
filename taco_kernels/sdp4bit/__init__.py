"""SDP4Bit's arithmetic (arXiv 2410.15526) as device code of its own.

Group-quantised integers with one fp32 step a group: gradients rotated by a 32-point Hadamard transform and
summed without leaving its domain, and weight differences. Fused Triton kernels on CUDA tensors, the
plain-torch definition in ``reference.py`` on CPU tensors; both use the wire format of ``layout.py``.
"""

from taco_kernels.sdp4bit.layout import BITS, GROUP_SIZES, GroupFormat
from taco_kernels.sdp4bit.ops import (
    add_dequantized,
    quantize,
    quantize_difference,
    sum_dequantize,
    sum_requantize,
)

__all__ = [
    "BITS",
    "GROUP_SIZES",
    "GroupFormat",
    "add_dequantized",
    "quantize",
    "quantize_difference",
    "sum_dequantize",
    "sum_requantize",
]
