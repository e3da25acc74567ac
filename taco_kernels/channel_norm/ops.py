"""The operations: Triton kernels on CUDA tensors, ``reference.py`` on CPU tensors."""

from taco_kernels.channel_norm import reference
from taco_kernels.common.dispatch import dispatched

encode = dispatched(reference.encode)
decode = dispatched(reference.decode)
