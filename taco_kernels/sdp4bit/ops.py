"""The operations: Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors."""

from taco_kernels.common.dispatch import dispatched
from taco_kernels.sdp4bit import reference

quantize = dispatched(reference.quantize)
quantize_difference = dispatched(reference.quantize_difference)
sum_dequantize = dispatched(reference.sum_dequantize)
sum_requantize = dispatched(reference.sum_requantize)
add_dequantized = dispatched(reference.add_dequantized)
