"""SDP4Bit's arithmetic (arXiv 2410.15526) as device code of its own.

Group-quantised integers with one fp32 step a group: gradients rotated by a 32-point Hadamard
transform and summed without leaving its domain, and weight differences. Fused Triton kernels on
CUDA tensors, the plain-torch definition in ``reference.py`` on CPU tensors; both use the same wire
format.
"""

from taco_kernels.common import dispatched
from taco_kernels.sdp4bit import reference
from taco_kernels.sdp4bit.reference import BITS, GROUP_SIZES, GroupFormat

# Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors.
quantize = dispatched(reference.quantize)
quantize_difference = dispatched(reference.quantize_difference)
sum_dequantize = dispatched(reference.sum_dequantize)
sum_requantize = dispatched(reference.sum_requantize)
add_dequantized = dispatched(reference.add_dequantized)
